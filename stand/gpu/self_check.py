"""Does the kernel path give this model's logits? Asked once, on the loaded weights, before it is used."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import CHECK_TOKENS, TOLERANCES, check_specimen, relative_difference
from stand.forward.tree_attention import tree_attention
from stand.forward.tree_cache import TreeCache
from stand.gpu.device_cache import DeviceCache, is_uniform
from stand.gpu.device_rule import GreedyRule
from stand.gpu.kernel_attention import KERNEL_ATTENTION_NAME
from stand.gpu.step_body import StepBody, StepOutput
from stand.gpu.step_packet import StepPacket
from stand.gpu.step_size import StepSize
from stand.gpu.work_list import SPLIT_LENGTH, WorkList
from stand.sampling import SamplingParams, TargetLaw
from stand.trees import DraftBatch
from stand.verifiers import VerifierNoise

ROOM = 64


def kernel_failure(model: PreTrainedModel) -> str | None:
    """Why the kernel path cannot serve the model, or None when its logits equal the eager ones up to rounding."""
    try:
        difference = kernel_difference(model)
    except (RuntimeError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        return f"a step with kernels ends in {type(error).__name__}: {error}"
    tolerance = TOLERANCES[model.dtype]
    if not difference <= tolerance:
        return f"kernels must equal eager attention up to {tolerance:g} of the logits' spread, got {difference:.3g}"
    return None


@torch.inference_mode()
def kernel_difference(model: PreTrainedModel) -> float:
    """`relative_difference` of the kernels' logits over the specimen's tree to the eager ones.

    Raises ValueError where layers differ in shape, and what the model raises.
    """
    prompt, batch = check_specimen(model)
    lengths = np.array([CHECK_TOKENS], dtype=np.int64)
    cache = TreeCache(num_rows=1, room=ROOM)
    with tree_attention(model):
        run_plan(model, cache, StepPlan.for_prompt(prompt, 0, row=0, device=model.device), logits_to_keep=1)
        if not is_uniform(cache):
            raise ValueError("all layers must have one head count, head size and type, got different ones")
        filled = DeviceCache.like(cache, num_rows=1, room=ROOM)
        filled.load(cache, [0], CHECK_TOKENS)
        eager = run_plan(model, cache, StepPlan.for_drafts(batch, lengths, device=model.device)).float()
    with tree_attention(model, KERNEL_ATTENTION_NAME):
        kernels = _kernel_logits(model, filled, batch, lengths).float()[: batch.num_nodes]
    return relative_difference(kernels, eager)


def _kernel_logits(model: PreTrainedModel, cache: DeviceCache, batch: DraftBatch, lengths: np.ndarray) -> torch.Tensor:
    """[M, V] by the body of a captured step, run directly."""
    output, rule, row = StepOutput(model, num_rows=1), GreedyRule(), np.zeros(1, dtype=np.int64)
    tile = output.tile_tokens(batch.num_nodes)
    work = WorkList.build(batch.offsets, lengths, row, tile_tokens=tile, split_length=SPLIT_LENGTH)
    size = StepSize.covering(batch.num_nodes, len(work.items), 1, tile_tokens=tile)
    packet = StepPacket(size, rule, model.device)
    noise = VerifierNoise(seed=0, rows=row, steps=row, positions=lengths)
    packet.fill(batch, lengths, row, noise, work=work, room=cache.room)
    law = TargetLaw(SamplingParams(temperature=0.0))
    body = StepBody(model, cache, law, rule, packet, output, SPLIT_LENGTH)
    packet.upload()
    return body.forward()
