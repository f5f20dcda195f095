"""The check that `wrap` makes before it uses kernels: what it passes, and that it sees what it is there to see."""

import copy
import threading
import traceback

import pytest
import torch

triton = pytest.importorskip("triton")

from plain_kernels import compact, use_plain_kernels  # noqa: E402
from plain_streams import random_streams  # noqa: E402
from tiny_models import CONFIGS, kernel_model  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from unequal_models import unequal_model  # noqa: E402

import stand  # noqa: E402
from stand.backend import choose_backend  # noqa: E402
from stand.forward.tree_attention import exclusive  # noqa: E402
from stand.gpu import (  # noqa: E402
    captured_step,
    device_rule,
    kernel_attention,
    self_check,
    step_body,
)
from stand.gpu.kernels import launch  # noqa: E402
from stand.gpu.self_check import FILTERED, FULL, GREEDY, CheckSize  # noqa: E402
from stand.verifiers import get_verifier  # noqa: E402


def kernel_failure(model, *, rule="traversal", size=None):
    return self_check.kernel_failure(model, get_verifier(rule), size=size)


@pytest.fixture
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


@pytest.fixture(scope="module")
def roomy():
    """A model whose context holds the whole check."""
    model = copy.deepcopy(kernel_model("qwen2"))
    model.config.max_position_embeddings = 2048
    return model


def with_law(params) -> CheckSize:
    return CheckSize(FULL.lengths, FULL.nodes, (params,))


@pytest.mark.parametrize("family", CONFIGS)
def test_it_passes(family):
    assert kernel_failure(kernel_model(family)) is None


@pytest.mark.parametrize("family", ["gemma4", "mimo_v2", "deepseek_v3"])
def test_it_passes_where_layers_differ(family):
    stand.wrap(unequal_model(family), backend="sdpa", fuse=False)  # which tells the kinds of its layers
    assert kernel_failure(unequal_model(family)) is None


def test_a_block_that_is_not_compacted_is_noticed(plain_kernels, monkeypatch):
    """Keys of layers with heads of another size lie in a block of their own."""
    model = copy.deepcopy(unequal_model("gemma4"))
    model.config.max_position_embeddings = 2048
    assert kernel_failure(model, size=with_law(GREEDY)) is None

    def of_two_heads(storage, *where):
        if storage.shape[2] == 2:
            compact(storage, *where)

    monkeypatch.setattr(step_body, "compact", of_two_heads)
    assert "keys kept must be" in kernel_failure(model, size=with_law(GREEDY))


def test_it_passes_with_streams():
    model = copy.deepcopy(kernel_model("qwen2"))
    rider = stand.StreamingDrafter(random_streams(model)).rider
    rider.attach(model)
    assert self_check.kernel_failure(model, get_verifier("traversal"), rider=rider) is None


@pytest.mark.parametrize("rule", ["match", "coupled", "traversal"])
def test_the_whole_check_passes(plain_kernels, roomy, rule):
    assert kernel_failure(roomy, rule=rule, size=FULL) is None


def test_the_whole_check_is_larger_than_a_tile_a_split_and_a_word(roomy):
    size = FULL.within(2048)
    step = step_body.StepOutput(roomy, num_rows=2)
    (tiling,) = step.tilings(max(size.nodes))
    assert max(size.nodes) > 64 and max(size.nodes) > tiling.tile_tokens
    assert max(size.lengths) > 512
    assert tiling.splitting.most_splits(max(size.lengths)) > 1
    assert FULL.within(100).lengths == (30, 6) and FULL.within(None).lengths == FULL.lengths


def wrong_from(place):
    """An attention that mixes a little too much in tokens from packed place `place` on."""

    def attention(query, *rest):
        mixed = right(query, *rest)
        mixed[place:] *= 1.2
        return mixed

    right = kernel_attention.tree_attention
    return attention


def test_it_sees_a_second_tile_that_is_wrong(plain_kernels, roomy, monkeypatch):
    monkeypatch.setattr(kernel_attention, "tree_attention", wrong_from(65))
    assert "must equal those of eager attention" in kernel_failure(roomy, size=FULL)


def test_it_sees_a_second_word_that_is_not_read(plain_kernels, roomy, monkeypatch):
    right = kernel_attention.tree_attention

    def first_word(query, keys, values, pages, ancestors, *rest):
        return right(query, keys, values, pages, torch.cat([ancestors[:, :1], 0 * ancestors[:, 1:]], 1), *rest)

    monkeypatch.setattr(kernel_attention, "tree_attention", first_word)
    assert "must equal those of eager attention" in kernel_failure(roomy, size=FULL)


def test_it_sees_pages_that_are_not_looked_up(plain_kernels, roomy, monkeypatch):
    """The long row's last page does not follow the others: the short row began before it was taken."""
    right = kernel_attention.tree_attention

    def one_after_another(query, keys, values, pages, *rest):
        return right(query, keys, values, pages[:, :1] + torch.arange(pages.shape[1], dtype=torch.int32), *rest)

    monkeypatch.setattr(kernel_attention, "tree_attention", one_after_another)
    assert "must equal those of eager attention" in kernel_failure(roomy, size=FULL)


def test_it_sees_processors_that_are_left_out(plain_kernels, roomy, monkeypatch):
    """A second part that is given the first one's scores as they were."""
    monkeypatch.setattr(captured_step.CapturedStep, "_process", lambda step: None)
    assert "laws of a replayed step must be those" in kernel_failure(roomy, size=FULL)


def stays_at_the_root(drawn, laws, token_ids, parents, follows, offsets, stops, next_tokens, is_broken, path):
    """A verdict that keeps nothing, whatever was drawn."""
    stops.copy_(offsets[:-1])
    next_tokens.copy_(drawn[: len(next_tokens)])
    is_broken.zero_()
    path.fill_(-1)


@pytest.mark.parametrize(
    ("module", "name", "wrong", "law", "message"),
    [
        (step_body, "filter_rows", lambda *arguments: None, FILTERED, "laws of a replayed step"),
        (step_body, "softmax_rows", lambda laws, *rest: laws.fill_(1 / laws.shape[1]), GREEDY, "laws of a replayed"),
        (step_body, "compact", lambda *arguments: None, GREEDY, "the keys kept"),
        (device_rule, "follow", stays_at_the_root, GREEDY, "verdicts"),
    ],
)
def test_it_sees_a_wrong_part(plain_kernels, roomy, monkeypatch, module, name, wrong, law, message):
    monkeypatch.setattr(module, name, wrong)
    assert message in kernel_failure(roomy, size=with_law(law))


def test_it_sees_a_wrong_rule(plain_kernels, roomy, monkeypatch):
    right = device_rule.traverse

    def stops_at_roots(probs, token_ids, parents, offsets, *rest):
        return offsets[:-1].long().clip(max=76), *right(probs, token_ids, parents, offsets, *rest)[1:]

    monkeypatch.setattr(device_rule, "traverse", stops_at_roots)
    assert "verdicts of a replayed step" in kernel_failure(roomy, size=with_law(FILTERED))


def test_it_sees_wrong_best_tokens(plain_kernels, roomy, monkeypatch):
    def worst(probs, count):
        ids, values = torch.topk(probs, count, dim=1, largest=False)[::-1]
        return ids.to(torch.int32), values

    monkeypatch.setattr(step_body, "top_tokens", worst)
    assert "best tokens of a replayed step" in kernel_failure(roomy, size=with_law(GREEDY))


def test_it_sees_a_recording_that_is_not_what_was_recorded(plain_kernels, roomy, monkeypatch):
    class Stale(captured_step.runner_for(torch.device("cpu")).__class__):
        def step(self, program):
            """A graph that does nothing: the verdict of the step before."""

    monkeypatch.setattr(captured_step, "runner_for", lambda device: Stale())
    assert kernel_failure(roomy, size=with_law(GREEDY)) is not None


def test_any_error_is_a_reason(plain_kernels, monkeypatch):
    """Triton's errors derive from Exception alone."""

    def refuse(*arguments):
        raise OutOfResources(114688, 101376, "shared memory")

    monkeypatch.setattr(kernel_attention, "tree_attention", refuse)
    assert not issubclass(OutOfResources, (RuntimeError, ValueError))
    with pytest.raises(ValueError, match="cannot serve here: a step with kernels ends in OutOfResources: ") as raised:
        stand.wrap(kernel_model("qwen2"), backend="triton")
    assert "in refuse" in "".join(traceback.format_exception(raised.value))  # which kernel it was


def test_a_capture_that_is_refused_at_loading_is_a_reason(plain_kernels, monkeypatch):
    class Refusing(captured_step.runner_for(torch.device("cpu")).__class__):
        def record(self, step, best):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured_step, "runner_for", lambda device: Refusing())
    with pytest.raises(ValueError, match="ends in RuntimeError: operation not permitted"):
        stand.wrap(kernel_model("qwen2"), backend="triton")


def test_auto_falls_back_with_the_reason(monkeypatch, caplog):
    model = copy.deepcopy(kernel_model("qwen2"))
    kind = type("OnGpu", (type(model),), {"device": property(lambda self: torch.device("cuda"))})
    model.__class__ = kind
    monkeypatch.setattr("stand.backend.input_device", lambda model: model.device)
    for parameter in model.parameters():
        assert parameter.device.type == "cpu"  # this machine has no GPU: everything that asks for one raises
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    properties = type("Properties", (), {"shared_memory_per_block_optin": 64 * 1024})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend = choose_backend(model, get_verifier("match"), "auto", fuse=False)
    assert str(backend) == "sdpa" and "8.0 or higher, got 7.5" in backend.reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    backend = choose_backend(model, get_verifier("match"), "auto", fuse=False)
    assert str(backend) == "sdpa" and "a step with kernels ends in" in backend.reason
    (record,) = caplog.records
    assert record.name == "stand" and record.exc_info[2] is not None  # the traceback, in the log


def test_an_interpreter_that_cannot_run_is_named(monkeypatch):
    monkeypatch.setattr(launch.triton, "__version__", "3.6.0")
    monkeypatch.setattr(launch.np, "__version__", "2.4.6")
    assert "fails with numpy >= 2.4" in kernel_failure(kernel_model("qwen2"))
    monkeypatch.setattr(launch.np, "__version__", "2.3.5")
    assert launch.interpreter_obstacle() is None
    monkeypatch.setattr(launch.triton, "__version__", "3.9.0")
    assert "the interpreter of triton 3.9.0" in kernel_failure(kernel_model("qwen2"))


def test_a_backend_is_chosen_while_nobody_else_runs_the_model(monkeypatch):
    """Its forwards are swapped meanwhile; another thread that decodes would save and restore the swapped ones."""
    model, threads = kernel_model("qwen2"), []

    def enter() -> None:
        with exclusive(model):
            pass

    def obstacle(model, verifier, **asked) -> str:
        threads.append(threading.Thread(target=enter))
        threads[0].start()
        threads[0].join(0.2)
        assert threads[0].is_alive()
        return "no kernel today"

    monkeypatch.setattr("stand.backend.kernel_obstacle", obstacle)
    with pytest.raises(ValueError, match="no kernel today"):
        choose_backend(model, get_verifier("match"), "triton", fuse=True)
    threads[0].join()
