"""The captured step in the engine: the same tokens as the eager step, whatever moves, grows, ends or is padded."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from plain_kernels import use_plain_kernels
from step_pair import HOT, taught_lookup
from tiny_models import CONFIGS, kernel_model

import stand
from stand.drafters.blended import BlendedDrafter
from stand.forward import model as forward_model
from stand.gpu import captured_step
from stand.gpu.device_rule import rule_like
from stand.gpu.packets import page_table
from stand.gpu.runner import DirectRunner
from stand.scheduling import prefilled, prompt_keys
from stand.trees import DraftBatch
from stand.verifiers.rules.match import MatchVerifier

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]


@pytest.fixture
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


def generate(backend, *, verifier="match", family="qwen2", lookup=None, budget=16, **settings):
    model = kernel_model(family)
    drafter = BlendedDrafter(lookup, budget=budget)
    engine = stand.wrap(model, verifier=verifier, backend=backend, drafter=drafter, fuse=False)
    defaults = {"num_return_sequences": 2, "max_new_tokens": 40, "temperature": 0.6, "seed": 4, "learn": False}
    return engine.generate(input_ids=PROMPTS, **{**defaults, **settings})


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}]
)
@pytest.mark.parametrize("verifier", ["match", "coupled", "traversal"])
def test_tokens_equal_the_eager_step(plain_kernels, verifier, settings):
    lookup = taught_lookup(kernel_model("qwen2"), PROMPTS, 60)
    eager, captured = (generate(name, verifier=verifier, lookup=lookup, **settings) for name in ("sdpa", "triton"))
    assert captured.token_ids == eager.token_ids
    assert captured.stats.num_steps == eager.stats.num_steps
    assert captured.stats.mean_acceptance_length > 1.1  # drafts are accepted, so keys were moved


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_decodes_alike(plain_kernels, family):
    eager, captured = (generate(name, family=family, learn=True) for name in ("sdpa", "triton"))
    assert captured.token_ids == eager.token_ids


class Recorder(BlendedDrafter):
    """Drafts from a lookup that stays as it is, and writes down what it should have learned."""

    def __init__(self, lookup):
        super().__init__(lookup, budget=16)
        self.lessons = []

    def learn(self, lesson):
        self.lessons.append(lesson)


def test_what_is_learned_late_is_what_is_learned(plain_kernels):
    recorders = []
    for name in ("sdpa", "triton"):
        recorders.append(Recorder(taught_lookup(kernel_model("qwen2"), PROMPTS, 60)))
        engine = stand.wrap(kernel_model("qwen2"), verifier="match", backend=name, drafter=recorders[-1], fuse=False)
        engine.generate(input_ids=PROMPTS, max_new_tokens=40, temperature=0.6, seed=4)
    assert len(recorders[0].lessons) > 10
    for early, late in zip(*(recorder.lessons for recorder in recorders), strict=True):
        assert np.array_equal(early.batch.token_ids, late.batch.token_ids)
        assert np.array_equal(early.next_tokens, late.next_tokens)
        assert list(map(list, early.request.histories)) == list(map(list, late.request.histories))
        assert list(map(list, early.accepted)) == list(map(list, late.accepted))
        assert np.array_equal(early.top_ids, late.top_ids)
        np.testing.assert_allclose(early.top_probs, late.top_probs, atol=1e-4)  # two products, two roundings


def test_growth_of_the_cache_keeps_its_keys(plain_kernels, monkeypatch):
    """Table and pool begin with one page per row."""
    expected = generate("triton", lookup=taught_lookup(kernel_model("qwen2"), PROMPTS, 60), max_new_tokens=400)
    monkeypatch.setattr(page_table, "FIRST_ROOM", 1)
    monkeypatch.setattr(page_table, "DRAFT_ROOM", 32)
    assert (
        generate("triton", lookup=taught_lookup(kernel_model("qwen2"), PROMPTS, 60), max_new_tokens=400).token_ids
        == expected.token_ids
    )


@pytest.mark.parametrize("max_rows", [1, 3])
def test_rows_that_enter_free_places_have_their_tokens(plain_kernels, max_rows):
    """More rows than places, prompts of several lengths; the next prompt is run beside captured steps."""
    prompts = [*PROMPTS, [10], list(range(20, 45))]
    settings = {"num_return_sequences": 3, "max_new_tokens": 30, "temperature": 0.6, "seed": 4, "top_k": 0}
    outputs = []
    for name, places in (("sdpa", None), ("triton", max_rows)):
        drafter = BlendedDrafter(taught_lookup(kernel_model("qwen2"), PROMPTS, 60), budget=16)
        engine = stand.wrap(kernel_model("qwen2"), verifier="match", backend=name, drafter=drafter, fuse=False)
        outputs.append(engine.generate(input_ids=prompts, **settings, max_rows=places).token_ids)
    assert outputs[0] == outputs[1] and str(engine.backend) == "triton"
    assert len(engine.backend._previous.captured._table.numbers) == max_rows


def order_of(monkeypatch, *names: str) -> list[str]:
    """What the runner is asked from now on, of these."""
    order: list[str] = []

    def told(name):
        run = getattr(DirectRunner, name)
        return lambda self, *given: order.append(name) or run(self, *given)

    for name in names:
        monkeypatch.setattr(DirectRunner, name, told(name))
    return order


def test_nothing_runs_where_what_is_recorded_is_dropped(plain_kernels, monkeypatch):
    """Also where somebody interrupted between a step's start and its verdict: packets go back with the graphs."""
    order = order_of(monkeypatch, "step", "wait_for_step", "wait_for_best", "forget")

    def interrupt(self, program):
        raise KeyboardInterrupt

    engine = stand.wrap(kernel_model("qwen2"), backend="triton", drafter=BlendedDrafter(budget=4), fuse=False)
    settings = {"input_ids": [[3, 4, 5, 3, 4]], "max_new_tokens": 8}
    engine.generate(**settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DirectRunner, "wait", interrupt)
        engine.generate(**settings)
    ended = order[-order[::-1].index("step") :]
    assert ended[:1] == ["wait_for_step"]  # the next call may fill the packet that the step reads
    order.clear()
    engine.generate(input_ids=[[3, 4, 5] * 70], max_new_tokens=8)  # a larger pool: all is recorded anew
    dropped = order[: order.index("forget")]
    assert "step" not in dropped and dropped.index("wait_for_step") < len(dropped) - 1


def test_best_tokens_have_come_when_a_call_ends(plain_kernels, monkeypatch):
    """They are written next to the caller's stream, also where nobody reads them."""
    order = order_of(monkeypatch, "wait", "wait_for_best")
    engine = stand.wrap(kernel_model("qwen2"), backend="triton", drafter=BlendedDrafter(budget=4), fuse=False)
    order.clear()
    engine.generate(input_ids=[[3, 4, 5, 3, 4]], max_new_tokens=4, learn=False)
    assert order.count("wait") > 1 and order[-1] == "wait_for_best"


def test_a_prompt_beyond_the_room_makes_more(plain_kernels, monkeypatch):
    monkeypatch.setattr(page_table, "FIRST_ROOM", 1)
    monkeypatch.setattr(page_table, "DRAFT_ROOM", 20)
    prompts, settings = [[3, 4], list(range(3, 60)), [5] * 90], {"max_new_tokens": 9, "temperature": 0.6, "seed": 4}
    outputs = []
    for name, places in (("sdpa", None), ("triton", 2)):
        drafter = BlendedDrafter(budget=16)
        engine = stand.wrap(kernel_model("qwen2"), verifier="match", backend=name, drafter=drafter, fuse=False)
        outputs.append(engine.generate(input_ids=prompts, **settings, max_rows=places).token_ids)
    assert outputs[0] == outputs[1] and str(engine.backend) == "triton"


def test_runs_that_take_turns_keep_their_keys_apart(plain_kernels):
    settings = {"num_return_sequences": 2, "max_new_tokens": 30, "temperature": 0.6, "max_rows": 2}
    engines = [stand.wrap(kernel_model("qwen2"), verifier="match", backend="triton", fuse=False) for _ in range(2)]
    alone = [{one.row: one.token_ids for one in engines[0].run(PROMPTS, **settings, seed=seed)} for seed in (1, 2)]
    runs = [engines[1].run(PROMPTS, **settings, seed=seed) for seed in (1, 2)]
    found = [{}, {}]
    for ends in zip(*runs, strict=True):
        for one, own in zip(ends, found, strict=True):
            own[one.row] = one.token_ids
    assert found == alone


def test_a_run_that_was_left_leaves_nothing_to_the_next(plain_kernels):
    settings = {"num_return_sequences": 2, "max_new_tokens": 30, "temperature": 0.6, "max_rows": 2, "seed": 3}
    engine = stand.wrap(kernel_model("qwen2"), verifier="match", backend="triton", fuse=False)
    expected = engine.generate(PROMPTS, **settings).token_ids
    captured = engine.backend._previous.captured
    for calls in (1, 4, 9):
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            counts = iter(range(100))

            def launch(step, counts=counts, calls=calls, work=captured_step.CapturedStep.launch):
                if next(counts) == calls:
                    raise KeyboardInterrupt
                work(step)

            patch.setattr(captured_step.CapturedStep, "launch", launch)
            engine.generate(PROMPTS, **settings)
        assert engine.generate(PROMPTS, **settings).token_ids == expected
        assert engine.backend._previous.captured is captured


def test_a_second_call_uses_what_was_recorded(plain_kernels):
    drafter = BlendedDrafter(budget=16)
    engine = stand.wrap(kernel_model("qwen2"), backend="triton", verifier="match", drafter=drafter, fuse=False)
    settings = {"input_ids": PROMPTS, "max_new_tokens": 30, "temperature": 0.6, "seed": 9}
    first = engine.generate(**settings)
    step = engine.backend._previous.captured
    graphs = len(step._recorded)
    assert engine.generate(**settings).token_ids == first.token_ids
    assert engine.backend._previous.captured is step and graphs <= len(step._recorded) < 20
    assert engine.backend.held_bytes == step.nbytes > 0  # which the next call may count as free
    engine.generate(**{**settings, "temperature": 0.7})
    assert engine.backend._previous.captured is not step


@pytest.mark.parametrize(("family", "size"), [("qwen2", 4), ("qwen3_moe", 2)])
def test_mixtures_are_padded_less(plain_kernels, family, size):
    engine = stand.wrap(kernel_model(family), backend="triton", fuse=False)
    engine.generate(PROMPTS, draft=False, max_new_tokens=3, temperature=0.6, seed=9, stop_token_ids=[])
    assert size in {recorded.num_tokens for recorded, _ in engine.backend._previous.captured._recorded}


def test_fewer_rows_have_the_splits_of_a_call_of_their_own(plain_kernels):
    """A seed's tokens must not depend on the call before."""
    drafter = BlendedDrafter(budget=16)
    engine = stand.wrap(kernel_model("qwen2"), backend="triton", verifier="match", drafter=drafter, fuse=False)
    settings = {"input_ids": PROMPTS[:1], "max_new_tokens": 3, "temperature": 0.6, "seed": 9}
    items = []
    for num_rows in (8, 1, 2, 8):
        engine.generate(**settings, num_return_sequences=num_rows)
        output = engine.backend._previous.captured._output
        items.append(output.tilings(1)[0].splitting.row_items)
    assert items == [1, 8, 4, 1]  # of two programs on each of eight processors, and two key heads
    step = engine.backend._previous.captured
    engine.generate(**settings, num_return_sequences=7)
    assert engine.backend._previous.captured is step  # the splits are the same


def test_prompts_that_begin_alike_share_their_chunks(plain_kernels, monkeypatch):
    """Within a call, and with those of the call before; tokens are those of eager steps that compute every prompt."""
    for module in (forward_model, prefilled, prompt_keys):
        monkeypatch.setattr(module, "PROMPT_CHUNK", 4)
    shared = [*PROMPTS[0], 9, 9]  # two chunks and one token
    prompts = [[*shared, *tail] for tail in ([5], [6, 6, 6], [7])]
    found, copied = {}, {}
    for backend in ("sdpa", "triton"):
        engine = stand.wrap(kernel_model("qwen2"), verifier="match", backend=backend, fuse=False)
        with monkeypatch.context() as patch, engine.keep_prompts(1e9):
            if backend == "sdpa":
                patch.setattr(prompt_keys, "common_pieces", lambda source, target: 0)
            outputs = [engine.generate(input_ids=prompts, max_new_tokens=9, temperature=0.6, seed=4) for _ in range(2)]
        found[backend] = [output.token_ids for output in outputs]
        copied[backend] = [output.stats.num_copied_prompt_tokens for output in outputs]
    assert found["triton"] == found["sdpa"]
    assert copied == {"sdpa": [0, 0], "triton": [16, 24]}


def test_filters_of_a_hot_law_take_the_eager_step(plain_kernels):
    eager, other = (generate(name, **HOT) for name in ("sdpa", "triton"))
    assert other.token_ids == eager.token_ids


def test_broken_logits_are_refused(plain_kernels):
    broken = copy.deepcopy(kernel_model("qwen2"))
    engine = stand.wrap(broken, backend="triton", fuse=False)
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="finite best logit"):
        engine.generate(input_ids=PROMPTS, max_new_tokens=4, seed=0)


@pytest.mark.slow  # make test-ptx does the same with compiled kernels
def test_real_kernels_in_a_whole_generation():
    """A few steps in Triton's interpreter, fused modules included."""
    settings = {"input_ids": [[3, 4, 5, 3, 4]], "max_new_tokens": 3, "temperature": 0.6, "top_p": 0.9, "seed": 2}
    outputs = []
    for name in ("sdpa", "triton"):
        engine = stand.wrap(kernel_model("qwen3"), backend=name, drafter=BlendedDrafter(budget=4))
        outputs.append(engine.generate(**settings, learn=False).token_ids)
    assert outputs[0] == outputs[1]


def test_the_choice_is_visible_and_can_be_made():
    engine = stand.wrap(kernel_model("qwen2"))
    assert str(engine.backend) == "sdpa" and "kernels are for CUDA" in engine.backend.reason
    with pytest.raises(ValueError, match="must be one of auto, sdpa, triton"):
        stand.wrap(kernel_model("qwen2"), backend="flash")
    with pytest.raises(ValueError, match="rule 'rrs' offers no device rule of its own"):
        stand.wrap(kernel_model("qwen2"), backend="triton", verifier="rrs")


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    ],
)
def test_tf32_is_an_obstacle_however_it_was_asked_for(ask):
    ask()
    try:
        with pytest.raises(ValueError, match="TF32 is on"):
            stand.wrap(kernel_model("qwen2"), backend="triton")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.get_float32_matmul_precision() == "highest"


class Reranked(stand.Drafter):
    """Keeps what it likes of what it drew, and says so."""

    def draft(self, request):
        batch = DraftBatch.pending([history[-1] for history in request.histories])
        return dataclasses.replace(batch, adapted=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_the_rule_refuses_is_refused(plain_kernels, temperature):
    settings = {"max_new_tokens": 4, "temperature": temperature, "seed": 0}
    for backend in ("sdpa", "triton"):
        model = kernel_model("qwen2")
        engine = stand.wrap(model, drafter=Reranked(), verifier="traversal", backend=backend, fuse=False)
        with pytest.raises(ValueError, match="must get an adapted draft"):
            engine.generate(input_ids=PROMPTS, **settings)
        assert str(engine.backend) == backend
        engine = stand.wrap(model, drafter=Reranked(), verifier="match", backend=backend, fuse=False)
        engine.generate(input_ids=PROMPTS, **settings)  # keeps the law whatever the draft


def test_a_rule_derived_from_another_is_not_taken_for_it():
    class Sevens(MatchVerifier):
        lossless = False

        def verify(self, batch, target, noise):
            verdicts = super().verify(batch, target, noise)
            verdicts.next_tokens[:] = 7
            return verdicts

    with pytest.raises(ValueError, match="rule 'match' offers no device rule of its own"):
        stand.wrap(kernel_model("qwen2"), backend="triton", verifier=Sevens())
    assert rule_like(MatchVerifier()) is not None


@pytest.fixture
def waiting_experts(monkeypatch):
    """A model's own products of experts make the host wait, which no graph can hold."""

    def recorded(model, *arguments, **asked):
        if "forward" not in vars(model.model.layers[0].mlp.experts):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("stand.gpu.self_check.kernel_failure", recorded)


def test_a_mixture_is_recorded_fused_where_its_own_products_make_the_host_wait(waiting_experts):
    engine = stand.wrap(kernel_model("qwen3_moe"), drafter=BlendedDrafter(budget=8), backend="triton")
    assert "mixture of experts" in {swap.kind for swap in engine.backend.fusion.report if swap.is_kept}
    assert engine.backend.reason == "asked for"


def test_a_mixture_that_is_neither_recorded_fused_nor_as_it_is_says_both(waiting_experts, monkeypatch):
    monkeypatch.setattr("stand.fusion.fusion.fuse", failing_after(0, None, ValueError("no fusion today")))
    with pytest.raises(ValueError, match="stream is capturing; not fused, because of ValueError: no fusion today"):
        stand.wrap(kernel_model("qwen3_moe"), drafter=BlendedDrafter(budget=8), backend="triton")
    with pytest.raises(ValueError, match="when stream is capturing; use"):
        stand.wrap(kernel_model("qwen3_moe"), drafter=BlendedDrafter(budget=8), backend="triton", fuse=False)


def test_a_fusion_that_is_wrong_as_a_whole_is_undone(monkeypatch):
    from stand.gpu import self_check

    answers = iter([None, "the logits differ"])
    monkeypatch.setattr(self_check, "kernel_failure", lambda *arguments, **options: next(answers))
    engine = stand.wrap(kernel_model("qwen2"), backend="triton")
    assert engine.backend.fusion is None and "not fused, because the logits differ" in engine.backend.reason


def test_a_fusion_that_fails_as_a_whole_is_undone(monkeypatch, caplog):
    from stand.gpu import self_check

    fails = failing_after(1, lambda *arguments, **options: None, RuntimeError("illegal address"))
    monkeypatch.setattr(self_check, "kernel_failure", fails)
    engine = stand.wrap(kernel_model("qwen2"), backend="triton")
    assert engine.backend.fusion is None and "because a step with kernels ends in RuntimeError" in engine.backend.reason
    assert caplog.records[-1].exc_info[1].args == ("illegal address",)
