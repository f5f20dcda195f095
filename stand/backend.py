"""Which way a model's steps run: captured with kernels of this project, or eager with PyTorch's attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from stand.forward.model import text_config
from stand.forward.tree_cache import TreeCache
from stand.row import Row
from stand.sampling import TargetLaw
from stand.verifiers import Verifier

if TYPE_CHECKING:
    from stand.gpu.fusion.fusion import Fusion
    from stand.step import Step

NAMES = ("auto", "sdpa", "triton")
WAITING_ROPES = frozenset({"dynamic", "longrope"})  # their frequencies depend on the length: the host waits for it


@dataclass(frozen=True, slots=True)
class Backend:
    """`str(backend)` is its name; `reason` says why it was chosen."""

    name: str
    reason: str

    def __str__(self) -> str:
        return self.name


def choose_backend(model: PreTrainedModel, verifier: Verifier, requested: str) -> Backend:
    """Resolve "auto". Raises ValueError for an unknown name, or for "triton" where it cannot serve."""
    if requested not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {requested!r}")
    if requested == "sdpa":
        return Backend("sdpa", "asked for")
    if requested == "auto" and model.device.type != "cuda":
        return Backend("sdpa", f"the model is on {model.device.type}, kernels are for CUDA")
    obstacle = kernel_obstacle(model, verifier)
    if obstacle is None:
        return Backend("triton", "asked for" if requested == "triton" else "the kernels serve this model")
    if requested == "triton":
        raise ValueError(f"backend 'triton' cannot serve here: {obstacle}; use backend='sdpa' or 'auto'")
    return Backend("sdpa", obstacle)


def kernel_obstacle(model: PreTrainedModel, verifier: Verifier) -> str | None:
    """Why the captured step cannot run this model with this rule, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from stand.gpu.device_rule import RULES
    from stand.gpu.self_check import kernel_failure

    if verifier.name not in RULES:
        return f"rule {verifier.name!r} is not one of {', '.join(RULES)}"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        return f"the model lies on {len(devices)} devices"
    if torch.get_float32_matmul_precision() != "highest":
        return "TF32 is on, which rounds rotary positions; call torch.set_float32_matmul_precision('highest')"
    rope = getattr(text_config(model), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if kinds & WAITING_ROPES:
        return f"rotary positions of kind {', '.join(sorted(kinds & WAITING_ROPES))} make the host wait"
    return kernel_failure(model)


def with_fusion(model: PreTrainedModel, backend: Backend) -> tuple[Backend, Fusion | None]:
    """Proven fused forwards for the captured step's model, checked once more all together; none for other backends."""
    if backend.name != "triton":
        return backend, None
    from stand.gpu.fusion.fusion import fuse
    from stand.gpu.self_check import kernel_failure

    fusion = fuse(model)
    with fusion.active():
        failure = kernel_failure(model)
    if failure is None:
        return backend, fusion
    fusion.undo()
    return Backend(backend.name, f"{backend.reason}; not fused, because {failure}"), None


def captured_step(
    previous: Step | None,
    model: PreTrainedModel,
    prefilled: TreeCache,
    sources: Sequence[int],
    *,
    law: TargetLaw,
    verifier: Verifier,
    rows: Sequence[Row],
    fusion: Fusion | None,
) -> Step:
    """A captured step loaded with the prompts' keys; `previous` with its graphs where it serves this call."""
    from stand.gpu.captured_step import CapturedStep
    from stand.gpu.device_rule import RULES

    step = previous
    if step is None or not step.serves(law, len(rows)):
        step = CapturedStep(model, law, RULES[verifier.name](), num_rows=len(rows), fusion=fusion)
    step.load(prefilled, sources, rows)
    return step
