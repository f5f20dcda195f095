"""Does the door to MLX work with the mlx-lm that is installed here, and what does it bring?

    python scripts/mlx_check.py                                      # the bundled model
    python scripts/mlx_check.py mlx-community/Qwen3-4B-4bit --samples 8

Greedy token ids must be those of mlx-lm's own generation, with and without drafts; of a model in 16 bits or quantised
near-ties may differ, and the number of equal texts is printed. Of the bundled model, in float32, 16 samples of each
problem must give 85 % right answers. Then samples of every problem are drawn in three ways, which take turns: one by
one by mlx-lm, all together without drafts, and with drafts. Exits with 1 where something is not as it must be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.beside_library import BesideLibrary, add_options, judged
from measuring.progress import say
from measuring.setup import REASONER


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub id of an mlx-lm model (default: the bundled model)")
    add_options(parser)
    return parser.parse_args(command_line)


class Model(BesideLibrary):
    """One model, and the engine around it."""

    library = "mlx-lm"

    def __init__(self, arguments: argparse.Namespace):
        import mlx.core as mx
        import mlx_lm

        from stand.plugins.mlx import wrap

        is_bundled = arguments.model is None
        self.inner, tokenizer = mlx_lm.load(str(REASONER) if is_bundled else arguments.model)
        if is_bundled:
            self.inner.set_dtype(mx.float32)
        engine = wrap(self.inner, tokenizer)
        ends = tokenizer.eos_token_ids
        super().__init__(engine, engine.tokenizer, arguments, end_ids=ends, is_bundled=is_bundled)

    def own_tokens(self, prompt: list[int], temperature: float, seed: int) -> Iterator[int]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.sample_utils import make_sampler

        mx.random.seed(seed)
        sampler = make_sampler(temp=temperature, top_p=self.law["top_p"])
        for token, _ in generate_step(mx.array(prompt), self.inner, max_tokens=self.most, sampler=sampler):
            yield int(token)


def main(command_line: list[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    try:
        import mlx_lm
    except ImportError as error:
        say(f"mlx_check: needs mlx-lm ({error}); pip install mlx-lm, and on Linux mlx-lm[cpu] or mlx-lm[cuda13]")
        return 2
    model = Model(arguments)
    say(f"mlx-lm {mlx_lm.__version__}, {model.engine.backend}")
    return judged(model, arguments.samples)


if __name__ == "__main__":
    sys.exit(main())
