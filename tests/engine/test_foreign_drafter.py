"""Drafters of other people: docs/architecture.md's example runs, and wrong answers are refused before the forward."""

import dataclasses
import re
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from letter_tokenizer import letter_tokenizer
from tiny_models import VOCABULARY_SIZE, tiny_model

import stand
from stand.trees import DraftBatch, DraftTree

ARCHITECTURE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
ARRAYS = ("token_ids", "parents", "support_ids", "law")
PROMPTS = [[5, 9, 11, 4, 5, 9], [7]]


@pytest.mark.skipif(not ARCHITECTURE.exists(), reason="docs are not part of the wheel's tests")
@pytest.mark.parametrize("name", ["RepeatDrafter", "BestNextDrafter"])
def test_the_examples_of_the_docs_run(name):
    """The smallest drafters and the smallest verifier, as printed; greedy tokens stay what they are."""
    blocks = re.findall(r"```python\n(.*?)```", ARCHITECTURE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)
    model = tiny_model("qwen2")
    engine = stand.wrap(model, drafter=namespace[name](), verifier=namespace["AgreeVerifier"]())
    plain = stand.wrap(model, drafter=stand.BlendedDrafter(budget=0))
    settings = {"input_ids": PROMPTS, "max_new_tokens": 30, "temperature": 0.0}
    drafted = engine.generate(**settings)
    assert drafted.token_ids == plain.generate(**settings).token_ids
    assert drafted.stats.num_draft_tokens > 0 and drafted.stats.mean_acceptance_length > 1


class Noting(stand.Drafter):
    """Drafts nothing and notes the seeds of the numbers that it is given."""

    def __init__(self):
        self.seeds: list[int] = []

    def draft(self, request):
        self.seeds.append(request.seed)
        return DraftBatch.pending([history[-1] for history in request.histories])


class Forgetful(Noting):
    remembers = False


class Hopeful(Noting):
    def learn(self, lesson):
        raise AssertionError


class Learning(Hopeful):
    num_candidates = 2

    def learn(self, lesson):
        assert lesson.top_ids.shape == (1, 2)


@pytest.mark.parametrize(("kind", "num_seeds"), [(Noting, 2), (Forgetful, 1), (Learning, 2)])
def test_calls_with_one_seed_share_numbers_only_where_nothing_is_remembered(kind, num_seeds):
    drafter = kind()
    engine = stand.wrap(tiny_model("qwen2"), drafter=drafter)
    for _ in range(2):
        engine.generate(input_ids=[[3, 4]], max_new_tokens=2, temperature=1.0, seed=5)
    assert len(set(drafter.seeds)) == num_seeds


def test_a_learn_that_is_never_called_is_told():
    with pytest.warns(UserWarning, match="Hopeful.learn is called only where num_candidates is above 0, got 0; set"):
        stand.wrap(tiny_model("qwen2"), drafter=Hopeful())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for drafter in (Learning(), Noting(), stand.BlendedDrafter(), stand.TokenRecyclingDrafter()):
            stand.wrap(tiny_model("qwen2"), drafter=drafter)


class Answer(stand.Drafter):
    """Gives the same answer to every request."""

    def __init__(self, *drafts: DraftTree):
        self.batch = DraftBatch.concatenate(drafts)

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        return self.batch


def pair(root: int, token: int, *, mass: float = 1.0) -> DraftTree:
    """A root and one child whose law has this mass."""
    return DraftTree(
        np.array([root, token], dtype=np.int32),
        np.array([-1, 0], dtype=np.int32),
        np.array([[token], [-1]], dtype=np.int32),
        np.array([[0.0], [mass]], dtype=np.float32),
    )


def wide_pair(root: int, support: list[int], law: list[float]) -> DraftTree:
    """A root and one child, the first of its support."""
    return DraftTree(
        np.array([root, support[0]], dtype=np.int32),
        np.array([-1, 0], dtype=np.int32),
        np.array([support, [-1] * len(support)], dtype=np.int32),
        np.array([[0.0] * len(support), law], dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([pair(9, 3)], "one draft per row, got 1 for 2"),
        ([pair(9, 3), pair(8, 3)], "must be its row's pending token 7, got 8 in row 1"),
        ([pair(9, 3), pair(7, VOCABULARY_SIZE)], rf"must be in \[0, {VOCABULARY_SIZE}\), got {VOCABULARY_SIZE}"),
        ([pair(9, 3), pair(7, 3, mass=0.7)], "must sum to 1, got 0.7"),
        ([pair(9, 3), wide_pair(7, [5, 5, 1], [1 / 3] * 3)], "must hold distinct token ids"),
        ([pair(9, 3), wide_pair(7, [5, 1, -1], [1 / 3] * 3)], "padding"),
    ],
)
def test_a_wrong_answer_is_refused_before_the_forward(drafts, message):
    engine = stand.wrap(tiny_model("qwen2"), drafter=Answer(*drafts))
    forwards = []
    handle = engine.model.register_forward_pre_hook(lambda *arguments: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            engine.generate(input_ids=PROMPTS, max_new_tokens=5, seed=0)
    finally:
        handle.remove()
    assert len(forwards) == 1  # the first prompt's; the second one is a single token


@pytest.mark.parametrize(("row", "depths"), [(0, [0, 2]), (1, [0, 0]), (1, [1, 2])])
def test_depths_that_do_not_follow_from_parents_are_refused(row, depths):
    """Random numbers are named by depth: with others a rule would not keep its law."""
    drafter = Answer(pair(9, 3), pair(7, 3))
    drafter.batch.depths[2 * row : 2 * row + 2] = depths
    engine = stand.wrap(tiny_model("qwen2"), drafter=drafter)
    with pytest.raises(ValueError, match="depths and ranks must follow from parents"):
        engine.generate(input_ids=PROMPTS, max_new_tokens=5, seed=0)


def test_a_right_answer_is_not_refused():
    for second in (pair(7, 3), wide_pair(7, [5, 21, 1], [0.2, 0.3, 0.5]), wide_pair(7, [5, -1, -1], [1.0, 0.0, 0.0])):
        first = pair(9, 3)
        first = wide_pair(9, [3, -1, -1], [1.0, 0.0, 0.0]) if second.law.shape[1] > 1 else first
        engine = stand.wrap(tiny_model("qwen2"), drafter=Answer(first, second))
        assert len(engine.generate(input_ids=PROMPTS, max_new_tokens=1, seed=0)) == 2


@pytest.mark.parametrize("rule", ["traversal", "match", "rrs"])
@pytest.mark.parametrize("law", [np.float64, np.float16, np.int64])
def test_numbers_as_numpy_makes_them_are_taken(rule, law):
    """int64, and laws in float64, or as a model in half precision and one-hots are."""
    drafts = [pair(9, 3), pair(7, 3)]
    wide = [DraftTree(*(np.array(getattr(draft, name).tolist()) for name in ARRAYS)) for draft in drafts]
    wide = [dataclasses.replace(draft, law=draft.law.astype(law)) for draft in wide]
    assert {array.dtype for draft in wide for array in (draft.token_ids, draft.support_ids)} == {np.dtype(np.int64)}
    settings = {"input_ids": PROMPTS, "max_new_tokens": 1, "temperature": 1.0, "seed": 0}
    engines = [stand.wrap(tiny_model("qwen2"), drafter=Answer(*given), verifier=rule) for given in (drafts, wide)]
    assert engines[0].generate(**settings).token_ids == engines[1].generate(**settings).token_ids


def test_numbers_that_are_not_whole_are_refused():
    for name in ARRAYS[:3]:
        half = dataclasses.replace(pair(9, 3), **{name: getattr(pair(9, 3), name) + 0.5})
        with pytest.raises(ValueError, match=f"{name} must hold whole numbers"):
            DraftBatch.concatenate([half])


def test_a_second_thread_waits_for_its_turn():
    """Two calls at the same time would switch the attention under each other."""
    model = tiny_model("llama")
    inside, go_on, ended = threading.Event(), threading.Event(), []

    class Waiting(stand.Drafter):
        def draft(self, request: stand.DraftRequest) -> DraftBatch:
            inside.set()
            assert go_on.wait(60)
            return DraftBatch.concatenate([DraftTree.pending(int(history[-1])) for history in request.histories])

    first, second = stand.wrap(model, drafter=Waiting()), stand.wrap(model, drafter=stand.BlendedDrafter(budget=4))
    calls = {
        "first": lambda: first.generate(input_ids=[[3, 4]], max_new_tokens=2),
        "second": lambda: second.generate(input_ids=[[3, 4]], max_new_tokens=2),
        "stream": lambda: second.run([[3, 4]], max_new_tokens=2),
        "wrap": lambda: stand.wrap(model),
    }
    threads = [threading.Thread(target=lambda name=name: (calls[name](), ended.append(name))) for name in calls]
    threads[0].start()
    try:
        assert inside.wait(60)
        for thread in threads[1:]:
            thread.start()
        threads[1].join(0.2)
        assert not ended
    finally:
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert sorted(ended) == sorted(calls)


def test_streams_of_two_threads_take_turns_step_by_step():
    model, texts, order = tiny_model("llama"), {}, []
    engine = stand.wrap(model, letter_tokenizer(), drafter=stand.BlendedDrafter(budget=4), verifier="match")

    def read(name, stream):
        for _, piece in stream:
            order.append(name)
            texts[name] = texts.get(name, "") + piece

    settings = {"max_new_tokens": 60, "temperature": 1.0, "stop_token_ids": []}
    streams = {seed: engine.stream([3, 4, seed], seed=seed, **settings) for seed in (5, 6)}
    threads = [threading.Thread(target=read, args=item) for item in streams.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in (5, 6):
        assert texts[seed] == engine.generate([3, 4, seed], seed=seed, **settings).texts[0]
    assert sum(one != other for one, other in zip(order, order[1:], strict=False)) > 10


@pytest.mark.parametrize("form", [list, np.array, tuple])
def test_a_rule_may_answer_kept_nodes_as_python_makes_them(form, monkeypatch):
    """Also where it keeps none, of which numpy makes an array of floats."""
    settings = {"input_ids": PROMPTS, "max_new_tokens": 30, "seed": 3, "temperature": 0.5}
    verify, texts = stand.verifiers.get_verifier("traversal").verify, []

    def answer(self, batch, target, noise):
        verdicts = verify(batch, target, noise)
        return dataclasses.replace(verdicts, accepted=[form(path.tolist()) for path in verdicts.accepted])

    for _ in range(2):
        drafter = stand.BlendedDrafter(budget=16, source=stand.NeighbourLaws())
        texts.append(stand.wrap(tiny_model("qwen2"), drafter=drafter).generate(**settings).token_ids)
        monkeypatch.setattr(type(stand.verifiers.get_verifier("traversal")), "verify", answer)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("token", [-1, 61, 2**40])
def test_a_rule_that_answers_no_token_of_the_vocabulary_is_named(token, monkeypatch):
    engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=4), verifier="match")
    verify = type(engine.verifier).verify

    def answer(self, batch, target, noise):
        verdicts = verify(self, batch, target, noise)
        return dataclasses.replace(verdicts, next_tokens=np.full(len(batch), token))

    monkeypatch.setattr(type(engine.verifier), "verify", answer)
    with pytest.raises(ValueError, match=rf"rule 'match' must answer next tokens in \[0, 61\), got {token}"):
        engine.generate(input_ids=PROMPTS, max_new_tokens=3, temperature=1.0)


@pytest.mark.parametrize("answer", [None, []])
def test_an_answer_that_is_no_draft_is_named(answer):
    class Silent(stand.Drafter):
        def draft(self, request: stand.DraftRequest) -> object:
            return answer

    with pytest.raises(ValueError, match=f"must answer a DraftBatch, got {type(answer).__name__}; return DraftBatch"):
        stand.wrap(tiny_model("qwen2"), drafter=Silent()).generate(input_ids=PROMPTS, max_new_tokens=2)
