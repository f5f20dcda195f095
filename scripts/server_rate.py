"""Tokens per second where requests come one by one: in batches to their end, in an open run, and of servers.

    python scripts/server_rate.py --model smollm2 --clients 8
    python scripts/server_rate.py --model PATH --arms drafts plain transformers batching --clients 1

So many clients ask for chats, each the next one when its answer is there; the samples of a problem come one after the
other. Arms, of which the first two run in this process:

| arm | what |
|---|---|
| batches | `engine.generate` of as many requests as there are clients, each batch to its end |
| open | `engine.open_run` |
| drafts, plain | `python -m stand.plugins.server`, with and without drafts |
| transformers | `transformers serve`, which decodes one request after the other |
| batching | the same with its continuous batching |

All draw from one law. Every arm starts with an empty lookup and is warmed by one problem beforehand; arms take turns
--repeats times. Needs `pip install ".[server]"`. Progress goes to stderr, a table to stdout; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.error import URLError
from urllib.request import Request, urlopen

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.interruption import Interruption, run_command
from measuring.option_types import number_from_zero, positive_integer, share
from measuring.progress import say
from measuring.setup import WORD_PROBLEMS
from measuring.text_table import format_table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from workloads.problem_sets import read_tasks
from workloads.real_models import model_folder

import stand

ARMS = ("batches", "open", "drafts", "plain", "transformers", "batching")
PATIENCE = 600  # seconds until a server listens


@dataclass(frozen=True, slots=True)
class Rate:
    tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


Ask = Callable[[list[list[dict]]], int]  # answers chats, and says how many tokens that were


def server_command(arm: str, folder: str, port: int, clients: int) -> list[str]:
    if arm in ("drafts", "plain"):
        options = ["--rows", str(clients), *([] if arm == "drafts" else ["--no-drafts"])]
        return [sys.executable, "-m", "stand.plugins.server", folder, "--port", str(port), *options]
    served = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--port", str(port)]
    return [*served, "--continuous-batching"] if arm == "batching" else served


@contextmanager
def server(arm: str, folder: str, clients: int) -> Iterator[str]:
    """Its address, while it listens on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = server_command(arm, folder, port, clients)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        address, begun = f"http://localhost:{port}", time.monotonic()
        while not listens(address):
            if process.poll() is not None or time.monotonic() - begun > PATIENCE:
                raise RuntimeError(f"the server must listen, got status {process.poll()}; run {' '.join(command)}")
            time.sleep(0.2)
        yield address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def listens(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=1) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


class Workload:
    """Chats in the order in which they are asked, and what all arms sample by."""

    def __init__(self, arguments: argparse.Namespace, folder: str):
        tasks = read_tasks(str(WORD_PROBLEMS))
        self.chats = [
            [{"role": "user", "content": task.statement}]
            for task in tasks[1 : arguments.problems + 1]
            for _ in range(arguments.samples)
        ]
        self.warming = [[{"role": "user", "content": tasks[0].statement}]] * arguments.clients
        own = GenerationConfig.from_pretrained(folder)
        self.config = GenerationConfig(
            do_sample=True, temperature=arguments.temperature, top_p=arguments.top_p, top_k=0,
            max_new_tokens=arguments.max_new_tokens, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id,
        )  # fmt: skip
        self.folder, self.clients = folder, arguments.clients

    def over_http(self, address: str) -> Ask:
        settings = {"model": self.folder, "generation_config": self.config.to_json_string()}

        def ask_one(chat: list[dict]) -> int:
            body = json.dumps({**settings, "messages": chat}).encode()
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(f"{address}/v1/chat/completions", body, headers), timeout=3600) as answer:
                return json.load(answer)["usage"]["completion_tokens"]

        return self._by_clients(ask_one)

    def in_batches(self, engine: stand.Engine) -> Ask:
        def ask(chats: list[list[dict]]) -> int:
            batches = [chats[first : first + self.clients] for first in range(0, len(chats), self.clients)]
            return sum(engine.generate(batch, generation_config=self.config).stats.num_tokens for batch in batches)

        return ask

    def in_a_run(self, run: stand.OpenRun) -> Ask:
        return self._by_clients(lambda chat: len(run.submit(chat).result()[0].token_ids))

    def _by_clients(self, ask_one: Callable[[list[dict]], int]) -> Ask:
        def ask(chats: list[list[dict]]) -> int:
            with ThreadPoolExecutor(self.clients) as pool:
                return sum(pool.map(ask_one, chats))

        return ask

    def timed(self, ask: Ask) -> Rate:
        ask(self.warming)
        begun = time.perf_counter()
        tokens = ask(self.chats)
        return Rate(tokens, time.perf_counter() - begun)


def rate_of(arm: str, workload: Workload) -> Rate:
    if arm in ("batches", "open"):
        model = AutoModelForCausalLM.from_pretrained(workload.folder, dtype="auto")
        engine = stand.wrap(model, AutoTokenizer.from_pretrained(workload.folder))
        if arm == "batches":
            return workload.timed(workload.in_batches(engine))
        with engine.open_run(max_rows=workload.clients, generation_config=workload.config) as run:
            return workload.timed(workload.in_a_run(run))
    with server(arm, workload.folder, workload.clients) as address:
        return workload.timed(workload.over_http(address))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="folder of a chat model, or a short name (%(default)s)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help=f"({' '.join(ARMS)})")
    add("--clients", type=positive_integer, default=8, help="that ask at a time (%(default)s)")
    add("--problems", type=positive_integer, default=6, help="word problems (%(default)s)")
    add("--samples", type=positive_integer, default=8, help="of each problem (%(default)s)")
    add("--max-new-tokens", type=positive_integer, default=256, help="per answer (%(default)s)")
    add("--temperature", type=number_from_zero, default=0.8, help="(%(default)s)")
    add("--top-p", type=share, default=0.95, help="(%(default)s)")
    add("--repeats", type=positive_integer, default=1, help="of all arms, one after the other (%(default)s)")
    return parser.parse_args()


def run(arguments: argparse.Namespace, interruption: Interruption) -> None:
    workload = Workload(arguments, model_folder(arguments.model))
    rates: dict[str, list[Rate]] = {arm: [] for arm in arguments.arms}
    for _ in range(arguments.repeats):
        for arm in arguments.arms:
            rates[arm].append(rate_of(arm, workload))
            last = rates[arm][-1]
            say(f"{arm}: {last.per_second:.1f} tokens per second, {last.tokens} tokens in {last.seconds:.1f} s")
    medians = {arm: statistics.median(one.per_second for one in own) for arm, own in rates.items()}
    rows = [(arm, medians[arm], len(rates[arm])) for arm in arguments.arms]
    print(format_table(("arm", "tokens per second", "times"), rows), end="\n\n")
    print(json.dumps({**vars(arguments), "threads": torch.get_num_threads(), "tokens_per_second": medians}), flush=True)


def main() -> int:
    arguments = read_arguments()
    return run_command("server_rate", lambda interruption: run(arguments, interruption))


if __name__ == "__main__":
    sys.exit(main())
