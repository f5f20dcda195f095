"""The command that times requests which come one by one, on the bundled model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")

import server_rate

SCRIPTS = Path(server_rate.__file__).parent


@pytest.mark.long
def test_arms_are_timed_and_told():
    options = ["--model", str(SCRIPTS / "reasoner"), "--problems", "1", "--samples", "3", "--clients", "2"]
    command = [sys.executable, str(SCRIPTS / "server_rate.py"), *options, "--max-new-tokens", "6", "--arms"]
    done = subprocess.run([*command, "open"], capture_output=True, text=True, timeout=300, check=True)
    lines = done.stdout.splitlines()
    told = json.loads(lines[-1])
    assert set(told["tokens_per_second"]) == {"open"} and told["tokens_per_second"]["open"] > 1
    assert lines[0].split() == ["arm", "tokens", "per", "second", "times"] and lines[2].startswith("open")
    assert "open: " in done.stderr and f"{3 * 6} tokens in" in done.stderr


def test_servers_are_asked_for_what_the_arms_say():
    ours = server_rate.server_command("plain", "m", 5, 3)
    assert ours[1:] == ["-m", "stand.plugins.server", "m", "--port", "5", "--rows", "3", "--no-drafts"]
    assert "--no-drafts" not in server_rate.server_command("drafts", "m", 5, 3)
    for arm, is_batching in (("transformers", False), ("batching", True)):
        command = server_rate.server_command(arm, "m", 5, 3)
        assert "serve" in command and ("--continuous-batching" in command) == is_batching


def test_a_server_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(server_rate, "server_command", lambda *told: [sys.executable, "-c", "raise SystemExit(2)"])
    with pytest.raises(RuntimeError, match="the server must listen, got status 2; run .*python"):
        with server_rate.server("transformers", "/no/model", 1):
            pass
