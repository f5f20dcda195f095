"""Does the door to llama.cpp work with the llama-cpp-python that is installed here, and what does it bring?

    python scripts/llama_cpp_check.py                                         # the bundled model; needs `gguf`, too
    python scripts/llama_cpp_check.py FILE.gguf --tokenizer FOLDER --samples 8

Greedy token ids must be those of llama-cpp-python's own `generate`, with and without drafts; of a file with a 16-bit or
quantised type near-ties may differ, and the number of equal texts is printed. Of the bundled model 16 samples of each
problem must give 85 % right answers. Then samples of every problem are drawn in three ways, which take turns: one by
one by llama-cpp-python, all together without drafts, and with drafts. Exits with 1 where something is not as it must
be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.beside_library import BesideLibrary, add_options, judged
from measuring.option_types import positive_integer
from measuring.progress import say
from measuring.setup import REASONER


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="GGUF file (default: the bundled model, written to a temporary one)")
    parser.add_argument("--tokenizer", help="folder or hub id, for a file that is given (default: the bundled model's)")
    add_options(parser)
    parser.add_argument("--num-slots", type=positive_integer, default=8192, help="tokens of the cache (%(default)s)")
    parser.add_argument("--threads", type=positive_integer, default=1, help="of llama.cpp (%(default)s)")
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on a GPU, -1 for all (%(default)s)")
    arguments = parser.parse_args(command_line)
    if (arguments.model is None) != (arguments.tokenizer is None):
        parser.error("a file and --tokenizer must be given together; leave both out for the bundled model")
    return arguments


class Model(BesideLibrary):
    """One file, and the engine around it."""

    library = "llama-cpp-python"

    def __init__(self, arguments: argparse.Namespace, file: str):
        import llama_cpp
        import torch
        from transformers import AutoTokenizer

        from stand.plugins.llama_cpp import wrap

        torch.set_num_threads(arguments.threads)
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or REASONER)
        threads = {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
        self.llm = llama_cpp.Llama(file, n_ctx=2048, n_gpu_layers=arguments.gpu_layers, verbose=False, **threads)
        engine = wrap(self.llm, tokenizer, num_slots=arguments.num_slots)
        ends = engine.model.generation_config.eos_token_id or [tokenizer.eos_token_id]
        super().__init__(engine, tokenizer, arguments, end_ids=ends, is_bundled=arguments.model is None)

    def own_tokens(self, prompt: list[int], temperature: float, seed: int) -> Iterator[int]:
        """Ends at a whole context."""
        self.llm.set_seed(seed)
        return self.llm.generate(prompt, top_k=0, top_p=self.law["top_p"], min_p=0.0, temp=temperature)


def main(command_line: list[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        say(f"llama_cpp_check: needs llama-cpp-python and gguf ({error}); pip install llama-cpp-python gguf")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model = Model(arguments, arguments.model or bundled_file(Path(folder)))
    say(f"llama-cpp-python {llama_cpp.__version__}, {model.engine.backend}")
    return judged(model, arguments.samples)


def bundled_file(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM
    from workloads.gguf_writing import write_gguf

    write_gguf(AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32), folder / "reasoner.gguf")
    return str(folder / "reasoner.gguf")


if __name__ == "__main__":
    sys.exit(main())
