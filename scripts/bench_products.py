"""What linear layers of a few tokens cost on this processor, by who multiplies.

    python scripts/bench_products.py                                  # SmolLM2's layers, 1 to 16 tokens
    python scripts/bench_products.py --shapes 2048x2048 --tokens 1,8 --threads 1 --dtype bfloat16

`linear`: torch.nn.functional.linear. `onednn`: torch's oneDNN operator, where this build has it and the processor can
run it. `ours`: `stand.forward.few_tokens.product`. Weights change from call to call, so that they come from memory (a
model's do), and the ways take turns. Milliseconds are the least over rounds; `GB/s` says how fast ours reads weights,
`GFLOP/s` how fast it calculates. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.option_types import count_list, positive_integer
from measuring.text_table import format_table

from stand.forward.few_tokens.product import few_token_product

LAYERS = "192x576,576x576,1536x576,576x1536,49152x576"
MEGABYTES = 64  # of different weights in a round: more than most caches hold
HEADER = ("weights", "threads", "tokens", "linear", "onednn", "ours", "GB/s", "GFLOP/s")

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def one_dnn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def ways(dtype: torch.dtype) -> dict[str, Product]:
    found: dict[str, Product] = {"linear": torch.nn.functional.linear, "ours": few_token_product}
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if has_operator and (dtype is not torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        found["onednn"] = one_dnn
    return found


def seconds_per_product(weights: Sequence[torch.Tensor], num_tokens: int, rounds: int) -> dict[str, float]:
    """Of every way the least over rounds of its mean over the weights; their results are compared first."""
    x = torch.randn(num_tokens, weights[0].shape[1]).to(weights[0].dtype)
    products = ways(x.dtype)
    least = dict.fromkeys(products, float("inf"))
    expected = x.double() @ weights[0].double().T
    tolerance = 1e-2 if x.dtype is torch.bfloat16 else 1e-4
    for multiply in products.values():
        torch.testing.assert_close(multiply(x, weights[0]).double(), expected, rtol=tolerance, atol=10 * tolerance)
    for _ in range(rounds):
        for way, multiply in products.items():
            begin = time.perf_counter()
            for weight in weights:
                multiply(x, weight)
            least[way] = min(least[way], (time.perf_counter() - begin) / len(weights))
    return least


def measure(shape: tuple[int, int], options: argparse.Namespace) -> list[dict]:
    num_rows, depth = shape
    dtype = getattr(torch, options.dtype)
    nbytes = dtype.itemsize * num_rows * depth
    weights = [torch.randn(shape).to(dtype) for _ in range(max(1, round(options.megabytes * 1e6 / nbytes)))]
    found = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for num_tokens in options.tokens:
            seconds = seconds_per_product(weights, num_tokens, options.rounds)
            sizes = {"rows": num_rows, "depth": depth, "nbytes": nbytes, "threads": threads, "tokens": num_tokens}
            found.append({**sizes, **seconds})
    return found


def table_row(found: dict) -> tuple:
    milliseconds = [1e3 * found[way] if way in found else None for way in ("linear", "onednn", "ours")]
    weights = found["rows"] * found["depth"]
    speeds = 1e-9 * found["nbytes"] / found["ours"], 2e-9 * weights * found["tokens"] / found["ours"]
    cells = [None if value is None else f"{value:.3f}" for value in milliseconds]
    return (f"{found['rows']}x{found['depth']}", found["threads"], found["tokens"], *cells, *speeds)


def shape_list(text: str) -> list[tuple[int, int]]:
    """Rows and depth of weights, as 576x1536,49152x576."""
    pairs = [count_list(part.replace("x", ",")) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"must be ROWSxDEPTH with commas between, as 576x1536,192x576; got {text!r}")
    return [(rows, depth) for rows, depth in pairs]


def read_options(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    threads = sorted({1, torch.get_num_threads()})
    parser.add_argument("--shapes", type=shape_list, default=shape_list(LAYERS), help=f"default: {LAYERS}")
    parser.add_argument(
        "--tokens", type=count_list, default=[1, 2, 4, 8, 16], help="tokens of a product (default: 1,2,4,8,16)"
    )
    parser.add_argument("--threads", type=count_list, default=threads, help="default: 1 and all of torch's")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and states (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=positive_integer, default=10, help="of all ways in turn; the least time counts (%(default)s)"
    )
    parser.add_argument(
        "--megabytes",
        type=positive_integer,
        default=MEGABYTES,
        help="of weights in a round (%(default)s); more where a cache holds as many, so that they come from memory",
    )
    return parser.parse_args(command_line)


@torch.inference_mode()
def main(command_line: Sequence[str] | None = None) -> None:
    options = read_options(command_line)
    found = [each for shape in options.shapes for each in measure(shape, options)]
    print(format_table(HEADER, [table_row(each) for each in found]), end="\n\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
