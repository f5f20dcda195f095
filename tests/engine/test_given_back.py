"""The model is the user's again after every block of an engine, interrupts or not."""

import copy
import os
import sys
import threading

import pytest
import torch
from recurrent_models import recurrent_model
from tiny_models import tiny_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import stand
from stand.forward import tree_attention as tree_attention_module
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.recurrent.layers import recurrent_forwards, recurrent_layers
from stand.forward.tree_attention import ATTENTION_NAME, exclusive, tree_attention
from stand.fusion.on_cpu import fuse_on_cpu


class Interrupts:
    """Raises KeyboardInterrupt where the n-th function from now on begins or goes on, as Python delivers a signal.

    Not in `contextlib` itself: what is cut there is put right when the block's generator goes. Nor in torch's own
    blocks, which leave gradients switched off."""

    PASSED = ("contextlib.py", "grad_mode.py", "test_given_back.py")

    def __init__(self, place: int):
        self.left = place

    def __call__(self, frame, event, argument):
        if event == "call" and not frame.f_code.co_filename.endswith(self.PASSED):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return None


def is_given_back(model: torch.nn.Module) -> bool:
    swapped = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return not swapped and model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # generators that end by an interrupt
@pytest.mark.parametrize("block", ["attention", "layers", "fusion", "recurrent"])
def test_an_interrupt_anywhere_gives_the_model_back(block):
    model = copy.deepcopy(recurrent_model("qwen3_5") if block == "recurrent" else tiny_model("llama"))
    if block != "recurrent":
        model.model.layers = model.model.layers[:2]  # two are enough: the work grows with the square of their number
    fusion = fuse_on_cpu(model)
    recurrent_layers(model)  # they are found once
    blocks = {
        "attention": lambda: tree_attention(model),
        "layers": lambda: few_token_layers(model),
        "fusion": fusion.active,
        "recurrent": lambda: recurrent_forwards(model),
    }
    with blocks[block]():
        assert not is_given_back(model)
    place = 0
    while True:
        interrupts = Interrupts(place)
        try:
            sys.settrace(interrupts)
            with blocks[block]():
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert is_given_back(model), place
        if interrupts.left >= 0:
            break
        place += 1
    assert place > (5 if block == "recurrent" else 20)  # calls inside: three layers are swapped there
    with blocks[block]():  # and the next block is like the first
        assert not is_given_back(model)
    assert is_given_back(model)


def test_what_an_interrupt_has_left_is_put_right_by_the_next_call():
    model = copy.deepcopy(tiny_model("llama"))
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=4))
    model.set_attn_implementation(ATTENTION_NAME)
    engine.generate(input_ids=[[5, 9, 11]], max_new_tokens=4)
    assert is_given_back(model)


def test_inner_models_keep_the_attention_that_their_user_chose():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={**sizes, "vocab_size": 61, "num_key_value_heads": 2, "head_dim": 8},
            vision_config={**sizes, "image_size": 56, "patch_size": 14},
        )
    )
    model.set_attn_implementation({"": "sdpa", "vision_config": "eager"})
    before = [model.config, model.config.text_config, model.config.vision_config]
    chosen = [config._attn_implementation for config in before]
    assert "eager" in chosen and "sdpa" in chosen
    with tree_attention(model):
        assert model.config.text_config._attn_implementation == ATTENTION_NAME
    assert [config._attn_implementation for config in before] == chosen


def test_a_process_that_was_forked_amid_a_call_is_told(monkeypatch):
    """In it nobody would give the turn back."""
    model = copy.deepcopy(tiny_model("llama"))
    has_begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive(model):
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_begun.wait()
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    try:
        with (
            pytest.raises(ValueError, match="must be forked while no thread runs the model"),
            exclusive(model),
        ):
            pass
    finally:
        monkeypatch.undo()
        may_end.set()
        thread.join()
    with exclusive(model):
        assert not tree_attention_module._TURNS[model].line.locked()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)  # forked while nobody runs it
    with exclusive(model):
        pass
