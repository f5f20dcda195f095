"""The proposer for vLLM with the option `laws`, on a stage: which laws arrive, what they replace, what is refused."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang_stage import VOCABULARY, logits_after, plain_text
from vllm_proposer import proposer
from vllm_stage import ModelRunner, Stage

from stand.plugins.vllm import LookupProposer
from stand.plugins.vllm_laws import showing_scores

ENTRIES = 5
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5], [8, 9, 7, 9]]


class ShownRunner(ModelRunner):
    _sample = showing_scores(ModelRunner._sample, LookupProposer)


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """The runner of the stage is wrapped already, in place of vLLM's."""
    monkeypatch.setattr("stand.plugins.vllm.show_scores", lambda proposers: None)


def staged(*prompts: list[int], **options) -> Stage:
    stage = Stage(ShownRunner(proposer(laws=ENTRIES, **options)))
    for row, prompt in enumerate(prompts):
        stage.put(row, prompt)
    return stage


def check_laws(taught: list, temperatures: dict[tuple[int, ...], float]) -> None:
    """temperatures: by prompts' first three tokens."""
    for text, ids, probs, _ in taught:
        law = torch.softmax(torch.from_numpy(logits_after(text)) / temperatures[tuple(text[:3])], dim=-1).numpy()
        assert ids.tolist() == np.argsort(-law)[:ENTRIES].tolist()
        assert probs == pytest.approx(law[ids], abs=1e-6)


def test_greedy_texts_are_those_without_drafts(lessons):
    stage = staged(*PROMPTS)
    for number in range(32):
        stage.step()
        if number % 4 == 3:
            stage.swap(0, 2)
    for text in stage.texts():
        prompt = next(one for one in PROMPTS if text[: len(one)] == one)
        assert text[len(prompt) :] == plain_text(prompt, len(text) - len(prompt))
    assert stage.num_tokens / stage.num_row_steps > 1.5


def test_the_laws_are_the_models_at_every_node(lessons):
    """At the rows' temperatures, 1 where they are greedy; also where rows move, and others read their prompts."""
    stage, drawn = staged(*PROMPTS), []
    by_prompt = {tuple(prompt[:3]): temperature for prompt, temperature in zip(PROMPTS, [0.7, 0.0, 1.6], strict=True)}
    for number in range(15):
        drawn += [(text, draft) for text, draft in zip(stage.texts(), stage.drafts, strict=True)]
        stage.step([by_prompt[tuple(text[:3])] for text in stage.texts()], reading=(1,) if number < 4 else ())
        if number == 6:
            stage.swap(0, 1)
    check_laws(lessons["laws"], {prompt: temperature or 1.0 for prompt, temperature in by_prompt.items()})
    read = [(text, draft) for text, draft in drawn if text != PROMPTS[1]] + [(PROMPTS[1], [])]
    verified = [text + draft[:end] for text, draft in read for end in range(len(draft) + 1)]
    assert sorted(text for text, *_ in lessons["laws"]) == sorted(verified)  # refused ones, each once
    assert any(draft for _, draft in drawn) and any(not draft for _, draft in drawn)


def test_what_laws_have_taught_is_not_learned_as_tokens(lessons):
    stage = staged(*PROMPTS[:2])
    for _ in range(6):
        stage.step()
    assert not any(lessons["tokens"]) and lessons["laws"]
    assert sorted(tokens for tokens, _ in lessons["prompt"]) == sorted(PROMPTS[:2])
    scopes = {tuple(text[:3]): scope for text, _, _, scope in lessons["laws"]}
    assert len(set(scopes.values())) == 2


def test_the_tokens_of_a_step_without_a_call_are_learned_as_such(lessons):
    stage = staged(PROMPTS[0])
    stage.step()
    before = stage.texts()[0]
    stage.step(is_asked=False)
    missed = stage.texts()[0][len(before) :]
    stage.step()
    assert [tokens for tokens in lessons["tokens"] if tokens] == [missed]
    assert [text for text, *_ in lessons["laws"] if len(text) > len(PROMPTS[0])] == [[*before, *missed]]


def test_laws_that_are_not_finite_teach_nothing(lessons):
    stage = staged(*PROMPTS[:2])
    stage.step(spoilt=(0,))
    assert [text for text, *_ in lessons["laws"]] == [PROMPTS[1]]
    stage.step()
    check_laws(lessons["laws"], {tuple(prompt[:3]): 1.0 for prompt in PROMPTS})


def test_where_another_rank_has_the_scores_tokens_are_learned(lessons):
    made = proposer(laws=ENTRIES)
    tokens = np.array([[*PROMPTS[0], 7, 0, 0]], dtype=np.int32)
    made.see_scores(None, None, SimpleNamespace(temperature=None))
    made.propose([[7]], np.array([6], dtype=np.int32), tokens)
    assert [tokens for tokens in lessons["tokens"] if tokens] == [[7]] and lessons["laws"] == []


def test_a_text_of_no_tokens_learns_as_tokens(lessons):
    """Nothing lies before its first token, whose law has no place."""
    stage = staged([], PROMPTS[0])
    made = stage.runner.drafter
    made.see_scores(torch.zeros(2, VOCABULARY), None, SimpleNamespace(temperature=None))
    stage.tokens[0, 0], stage.tokens[1, 5] = 4, 6
    made.propose([[4], [6]], np.array([1, 6], dtype=np.int32), stage.tokens)
    assert [tokens for tokens in lessons["tokens"] if tokens] == [[4], [6]] and lessons["laws"] == []


def test_without_the_option_scores_teach_nothing(lessons):
    stage = Stage(ShownRunner(proposer()))
    stage.put(0, PROMPTS[0])
    stage.step()
    assert lessons["laws"] == [] and [tokens for tokens in lessons["tokens"] if tokens] == [stage.texts()[0][5:]]


def test_engines_with_another_drafter_or_none_are_left_alone():
    class Drafter:
        def propose(self, sampled, lengths, tokens):
            return [[] for _ in sampled]

    for stage in (Stage(ShownRunner(Drafter())), Stage(ShownRunner(None))):
        stage.put(0, PROMPTS[0])
        stage.step(is_asked=stage.runner.drafter is not None)
        assert stage.texts()[0][5:] == plain_text(PROMPTS[0], 1)
    del stage.runner.drafter
    stage.step(is_asked=False)
    assert stage.texts()[0][5:] == plain_text(PROMPTS[0], 2)


def test_servers_that_share_learn_laws_of_each_other(tmp_path, lessons):
    one, other = (staged(PROMPTS[0], share=str(tmp_path)) for _ in range(2))
    for _ in range(4):
        one.step()
    learned = [(text[-4:], ids.tolist()) for text, ids, *_ in lessons["laws"]]
    other.runner.drafter.exchange.receive()
    assert [(text[-4:], ids.tolist()) for text, ids, *_ in lessons["laws"][len(learned) :]] == learned


def test_a_runner_that_shows_no_scores_is_found_out():
    """Another platform's may sample by itself: then the option would be ignored."""
    stage = Stage(ModelRunner(proposer(laws=ENTRIES)))
    stage.put(0, PROMPTS[0])
    with pytest.raises(RuntimeError, match="shown no scores"):
        stage.step()


def test_a_runner_with_other_arguments_is_refused():
    def _sample(self, logits, drafts):
        return logits

    with pytest.raises(RuntimeError, match=r"takes self, logits, spec_decode_metadata.*got self, logits, dr"):
        showing_scores(_sample, LookupProposer)


def test_where_ranks_must_draft_alike_laws_are_refused():
    parallel = {"distributed_executor_backend": "external_launcher", "world_size": 2}
    with pytest.raises(ValueError, match="laws must be left out .* got 5"):
        proposer(laws=ENTRIES, parallel=parallel)


def test_the_model_runner_of_a_process_is_wrapped_once(monkeypatch):
    from stand.plugins import vllm_laws

    runner = type("GPUModelRunner", (ModelRunner,), {"_sample": ModelRunner._sample})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=runner))
    vllm_laws.show_scores.cache_clear()
    for _ in range(2):
        vllm_laws.show_scores(LookupProposer)
    assert runner._sample.__wrapped__ is ModelRunner._sample
    vllm_laws.show_scores.cache_clear()
