"""Where attention is chosen: configurations that layers have for themselves, and that several models share."""

import copy
import threading

import pytest
import torch
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM

import stand
from stand.drafters.blended import BlendedDrafter
from stand.forward.tree_attention import ATTENTION_NAME, exclusive, tree_attention

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6]


def new_model(config, *, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def greedy(model, num_tokens: int = 24) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()


def drafted(engine, num_tokens: int = 24) -> list[int]:
    settings = {"temperature": 0, "max_new_tokens": num_tokens, "stop_token_ids": []}
    return engine.generate([PROMPT], **settings).token_ids[0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_copied_layer_has_a_configuration_of_its_own(family):
    """As in models that are made deeper; before wrap and after."""
    model = new_model(copy.deepcopy(CONFIGS[family]))
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=6))
    assert drafted(engine) == greedy(model)
    layers = model.model.layers
    layers[1] = copy.deepcopy(layers[0])
    layers[1].self_attn.layer_idx = 1
    own = layers[1].self_attn.config
    assert own is not model.config
    for one in (engine, stand.wrap(model, drafter=BlendedDrafter(budget=6))):
        assert drafted(one) == greedy(model)
        assert own._attn_implementation == model.config._attn_implementation == "sdpa"
    with tree_attention(model):
        assert own._attn_implementation == ATTENTION_NAME


def test_models_that_share_a_configuration_take_turns():
    config = copy.deepcopy(CONFIGS["llama"])
    first, second = type(new_model(config))(config), type(new_model(config))(config)
    other = new_model(copy.deepcopy(config))
    assert first.config is second.config
    entered, may_end, order = threading.Event(), threading.Event(), []

    def hold():
        with exclusive(first):
            entered.set()
            assert may_end.wait(20)
            order.append("first")

    def wait():
        with exclusive(second):
            order.append("second")

    threads = [threading.Thread(target=work, daemon=True) for work in (hold, wait)]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    with exclusive(other):  # which does not wait
        order.append("other")
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert order == ["other", "first", "second"]


def test_threads_with_models_that_share_a_configuration_get_their_tokens():
    config = copy.deepcopy(CONFIGS["llama"])
    kind = type(new_model(config))
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(kind(config).eval())
    expected = [greedy(model, 40) for model in models]
    engines, wrong = [stand.wrap(model, drafter=BlendedDrafter(budget=6)) for model in models], []

    def work(number):
        for _ in range(10):
            if drafted(engines[number], 40) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and config._attn_implementation == "sdpa"
