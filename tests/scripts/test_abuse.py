"""scripts/abuse.py: what it tries comes out well, and targets that are broken on purpose are counted as wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import abuse
import numpy as np
import pytest
from abuse_parts import interruptions
from abuse_parts.child import run_all
from abuse_parts.core_calls import sound_calls
from abuse_parts.damaged_files import damaged_files, reseal, taught
from abuse_parts.interruptions import kills
from abuse_parts.trial import EITHER, HONOURED_ONLY, REFUSED_ONLY, Trial, Unsound, judge

from stand.trees.checked_file import LookupFileError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def raises(error):
    raise error


def verdicts(trials, **settings):
    """(verdict, detail) of every trial, in order."""
    outcomes = []
    run_all(trials, lambda trial, outcome: outcomes.append((outcome.verdict, outcome.detail)), **settings)
    return outcomes


def test_sound_calls_are_sound():
    lookups = taught()
    for call in sound_calls(lookups["blended"], lookups["longest match"]):
        call.verb(**call.arguments)


def test_an_interrupt_ends_the_child_first(tmp_path):
    """One that goes on would write into a folder that is being removed."""
    late, number = tmp_path / "late", tmp_path / "number"

    def interrupted(trial, outcome):
        raise KeyboardInterrupt

    def quick():
        number.write_text(str(os.getpid()))

    def slow():
        time.sleep(1)
        late.touch()

    trials = [Trial("kind", name, run, HONOURED_ONLY) for name, run in (("quick", quick), ("slow", slow))]
    with pytest.raises(KeyboardInterrupt):
        run_all(trials, interrupted)
    with pytest.raises(ChildProcessError):
        os.waitpid(int(number.read_text()), os.WNOHANG)  # other tests of this process may have children, too
    time.sleep(1.2)
    assert not late.exists()


def test_an_interrupted_run_tells_what_it_found(monkeypatch, capsys):
    def trials(options, folder):
        yield Trial("kind", "first", lambda: 1, REFUSED_ONLY)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("abuse_parts.child.BATCH", 1)
    monkeypatch.setattr(abuse, "trials", trials)
    assert abuse.main([]) == 143
    text, said = capsys.readouterr()
    assert said == "abuse: ended early by SIGTERM\n"
    assert "wrong: kind: first: taken without a word" in text
    assert json.loads(text.splitlines()[-1])["counts"] == {"kind": {"wrong": 1}}


def test_a_small_run_finds_nothing_wrong(capsys):
    status = abuse.main(["--tries", "240", "--kills", "2", "--forks", "1", "--threads", "1", "--calls", "0"])
    text, said = capsys.readouterr()
    assert status == 0, text
    assert "blended file, bits flipped" in text and "core, wrong arguments" in text
    assert '"wrong": []' in text.splitlines()[-1]


def test_progress_is_said(capsys, monkeypatch):
    monkeypatch.setattr(abuse, "SAID_EVERY", 20)
    abuse.main(["--tries", "60", "--kills", "0", "--forks", "0", "--threads", "0", "--calls", "0"])
    assert "0 wrong so far" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "allowed", "verdict"),
    [
        (lambda: 1, HONOURED_ONLY, "honoured"),
        (lambda: raises(ValueError("k must be 1, got 2; say 1")), REFUSED_ONLY, "refused by name"),
        (lambda: raises(LookupFileError("k must be 1, got 2; say 1")), EITHER, "refused by name"),
        (lambda: raises(TypeError("an integer is required")), EITHER, "refused bluntly"),
        (lambda: raises(TypeError("an integer is required")), REFUSED_ONLY, "wrong"),
        (lambda: raises(ValueError("k must be 1, got 2; say 1")), HONOURED_ONLY, "wrong"),
        (lambda: raises(KeyError("k must be 1, got 2; say 1")), EITHER, "wrong"),
        (lambda: raises(Unsound("half a draft")), EITHER, "wrong"),
        (lambda: 1, REFUSED_ONLY, "wrong"),
    ],
)
def test_every_end_has_its_verdict(run, allowed, verdict):
    assert judge(Trial("kind", "name", run, allowed)).verdict == verdict


def test_crashes_and_hangs_are_counted_and_the_rest_goes_on():
    runs = [lambda: 1, lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: 1, lambda: time.sleep(60),
            lambda: os._exit(0), lambda: 1]  # fmt: skip
    outcomes = verdicts([Trial("kind", "name", run, HONOURED_ONLY) for run in runs], limit_s=2)
    assert [verdict for verdict, _ in outcomes] == ["honoured", "wrong", "honoured", "wrong", "wrong", "honoured"]
    assert "-15" in outcomes[1][1] and "hung" in outcomes[3][1] and "exit status 0" in outcomes[4][1]


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda name, path: taught()[name], "taken without a word"),
        (lambda name, path: raises(OSError("unreadable")), "raised OSError"),
        (lambda name, path: os.kill(os.getpid(), signal.SIGTERM), "crashed"),
    ],
)
def test_a_loader_that_does_not_look_is_found_out(load, said, tmp_path):
    outcomes = verdicts(damaged_files(12, tmp_path, seed=0, load=load))
    assert len(outcomes) == 12
    found = Counter(verdict for verdict, _ in outcomes)
    assert found["wrong"] == (8 if said == "taken without a word" else 12)  # what is resealed may be taken
    assert all(said in detail for verdict, detail in outcomes if verdict == "wrong")


def test_a_save_in_place_is_found_out(tmp_path, monkeypatch):
    """Control: a save that empties the old file first, as `open(path, "wb")` does, loses it in a kill. The child waits
    in the middle of its save, and is killed there."""

    contents = {}  # by number of contexts: the file, and who saved it; a child has what its parent saved before
    is_half_saved = tmp_path / "half-saved"

    def save_in_place(lookup, path):
        if len(lookup) not in contents:
            lookup.save(tmp_path / "whole")
            contents[len(lookup)] = (tmp_path / "whole").read_bytes(), os.getpid()
        data, process = contents[len(lookup)]
        with open(path, "wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            if os.getpid() != process:
                is_half_saved.touch()
                time.sleep(60)
            file.write(data[len(data) // 2 :])

    def wait_for_the_child(seconds):
        end = time.monotonic() + 30
        while not is_half_saved.exists():
            assert time.monotonic() < end
            time.sleep(1e-3)
        is_half_saved.unlink()

    monkeypatch.setattr(interruptions, "time", SimpleNamespace(sleep=wait_for_the_child))
    outcomes = verdicts(kills(4, tmp_path, seed=0, save=save_in_place))
    assert [verdict == "wrong" and "neither" in detail for verdict, detail in outcomes] == [True] * 4


def test_resealed_files_get_past_the_checksum(tmp_path):
    """What is resealed must reach the checks behind the checksum, or the tries of that kind try nothing."""
    lookup = taught()["blended"]
    lookup.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    messages = set()
    for number in range(40):
        (tmp_path / "damaged").write_bytes(reseal(data, np.random.default_rng(number)))
        try:
            type(lookup).load(tmp_path / "damaged")
        except LookupFileError as error:
            messages.add("checksum" in str(error))
    assert messages == {False}


@pytest.mark.slow
def test_the_tables_of_the_public_door_hold():
    """`wrap`, the drafters and `generate`: what must be taken is taken, what must be refused says why."""
    pytest.importorskip("torch")
    options = ["--tries", "0", "--kills", "0", "--forks", "0", "--threads", "0", "--calls", "1"]
    # With Triton's interpreter, as in this process, `backend="triton"` runs on a CPU too.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, abuse.__file__, *options]
    tried = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert tried.returncode == 0, tried.stdout
