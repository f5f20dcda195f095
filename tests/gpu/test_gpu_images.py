"""Captured steps behind prompts with images: the tokens of eager steps, at rotary positions of the row's own."""

import numpy as np
import pytest

pytest.importorskip("triton")

from image_cases import SERVED, image_model, image_prompt
from plain_kernels import use_plain_kernels
from plain_scan import use_plain_scans
from step_pair import taught_lookup

import stand
from stand.drafters.blended import BlendedDrafter
from stand.gpu.packets.step_packet import StepPacket

SETTINGS = {"num_return_sequences": 2, "max_new_tokens": 24, "temperature": 0.8, "seed": 4, "stop_token_ids": []}
TEXT = [3, 4, 5, 6, 7, 3, 4]


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)
    use_plain_scans(monkeypatch)


def tokens_of(family: str, backend: str) -> list[list[int]]:
    """Of two prompts with images and one without, as they share steps."""
    drafter = BlendedDrafter(taught_lookup(image_model(family), [TEXT], 40), budget=16)
    engine = stand.wrap(image_model(family), verifier="match", backend=backend, drafter=drafter, fuse=False)
    prompts = [image_prompt(family), TEXT, image_prompt(family, num_images=2, before=(9,))]
    found = engine.run([stand.Request(prompt) for prompt in prompts], **SETTINGS, learn=False, max_rows=4)
    tokens = {one.row: one.token_ids for one in found}
    assert str(engine.backend) == backend
    return [tokens[row] for row in range(6)]


@pytest.mark.parametrize("family", SERVED)
def test_tokens_equal_the_eager_step(family):
    tokens = tokens_of(family, "triton")
    assert tokens == tokens_of(family, "sdpa") and len({*map(tuple, tokens)}) > 4


def test_steps_that_forget_a_row_s_offset_are_seen(monkeypatch):
    """Control."""
    real = StepPacket.fill

    def without_offsets(self, *given, rotary_offsets):
        real(self, *given, rotary_offsets=np.zeros_like(rotary_offsets))

    expected = tokens_of("qwen3_vl", "sdpa")
    monkeypatch.setattr(StepPacket, "fill", without_offsets)
    tokens = tokens_of("qwen3_vl", "triton")
    assert tokens[2:4] == expected[2:4] and tokens[:2] != expected[:2] and tokens[4:] != expected[4:]
