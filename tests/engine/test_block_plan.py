"""What places of blocks see, made on the device, is what a step's plan makes of the same ancestors."""

import numpy as np
import pytest
import torch

from stand.drafters.dflash.block_plan import BlockPlan
from stand.forward.packed_plan import StepPlan

LENGTHS = np.array([0, 5, 17, 2])
SIZE = 6


def plans(*, is_causal: bool) -> tuple[BlockPlan, StepPlan]:
    token_ids = np.arange(len(LENGTHS) * SIZE, dtype=np.int32).reshape(-1, SIZE)
    seen = np.tri(SIZE, dtype=bool) if is_causal else np.ones((SIZE, SIZE), dtype=bool)
    offsets, places = SIZE * np.arange(len(LENGTHS) + 1), np.tile(np.arange(SIZE), len(LENGTHS))
    block = BlockPlan(token_ids, LENGTHS, is_causal=is_causal, has_windows=True, device=torch.device("cpu"))
    return block, StepPlan(token_ids.ravel(), offsets, places, np.tile(seen, (len(LENGTHS), 1)), LENGTHS)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window", [None, 3, 7, 50])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_are_those_of_a_steps_plan(is_causal, window, groups):
    block, step = plans(is_causal=is_causal)
    asked = {"window": window, "groups": groups, "dtype": torch.float32}
    assert torch.equal(block.mask(**asked), step.mask(**asked))
    assert block.num_tokens == step.num_tokens and block.kv_length == step.kv_length
    assert torch.equal(block.position_ids, step.position_ids) and torch.equal(block.cache_slots, step.cache_slots)
    assert block.mask(**asked) is block.mask(**asked)  # layers share it


def test_another_order_or_window_is_seen():
    asked = {"groups": 1, "dtype": torch.float32}
    for is_causal in (False, True):
        block, _ = plans(is_causal=is_causal)
        _, other = plans(is_causal=not is_causal)
        assert not torch.equal(block.mask(window=None, **asked), other.mask(window=None, **asked))
        assert not torch.equal(block.mask(window=3, **asked), block.mask(window=4, **asked))


@pytest.mark.parametrize(("is_causal", "has_windows"), [(True, True), (True, False), (False, True), (False, False)])
def test_attention_by_paths_is_left_where_it_would_count_windows_wrongly(is_causal, has_windows):
    told = {"is_causal": is_causal, "has_windows": has_windows, "device": torch.device("cpu")}
    block = BlockPlan(np.zeros((1, 4), dtype=np.int32), np.array([3]), **told)
    step = StepPlan(np.zeros(1, dtype=np.int32), np.array([0, 1]), np.zeros(1), np.ones((1, 1), bool), np.array([3]))
    assert block.has_few_tokens == (step.has_few_tokens and (is_causal or not has_windows))
