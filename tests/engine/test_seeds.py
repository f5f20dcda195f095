"""One seed in many calls: the second call's law is the target's too, though its drafts depend on the first outcome.

The production drafter, rules, noise and seeds, around a target that is a small Markov chain, so that thousands of pairs
of calls take seconds.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from markov_calls import EXPECTED, SIZE, one_call
from measuring.setup import REASONER
from pearson import p_value
from small_law import continuation_law, p_of_continuations, small_model
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, LogitsProcessorList

import stand
from stand.seeds import call_seed, checked_seed, prompt_word, seed_with_prompt
from stand.trees import BlendedLookup, LookupTree, TreeShape
from stand.verifiers import VerifierNoise, get_verifier

NUM_SEEDS = 600


def p_of_second_calls(make_drafter, verifier: str, *, starts: str, num_seeds: int = NUM_SEEDS) -> float:
    """Of the law of a second call with the first one's seed, over many seeds; chi-square against the target's.

    starts: "apart", "together" (both have started before either goes on) or "alike" (both from one number).
    """
    rule, counts = get_verifier(verifier), dict.fromkeys(EXPECTED, 0)
    for seed in range(num_seeds):
        drafter = make_drafter()
        second = 0
        if starts == "together":
            first, second = (drafter.start_call(learns=True) for _ in range(2))
        else:
            first = drafter.start_call(learns=True)
        one_call(drafter, rule, seed=seed, own_seed=call_seed(seed, first))
        if starts == "apart":
            second = drafter.start_call(learns=True)
        counts[one_call(drafter, rule, seed=seed, own_seed=call_seed(seed, second))] += 1
    return p_value(list(counts.values()), [num_seeds * share for share in EXPECTED.values()])


def blended(kind: str):
    return lambda: stand.BlendedDrafter(BlendedLookup(num_candidates=SIZE), budget=5, kind=kind)


def shaped(kind: str, branching=(2, 1, 1)):
    shape = TreeShape.from_branching(list(branching))
    return lambda: stand.FixedShapeDrafter(LookupTree(num_candidates=SIZE), shape, kind=kind)


def chained(kind: str):
    return shaped(kind, (1, 1, 1))


KINDS = ("sampled", "mixed", "deterministic")
DRAFTERS = {f"{make.__name__} {kind}": make(kind) for make in (blended, shaped, chained) for kind in KINDS}
DRAFTERS["shaped independent"] = shaped("independent")
RATIO_RULES = {
    "blended": ("traversal", "rrs"),
    "shaped": ("traversal", "rrs", "ranked_traversal", "ot_traversal"),
    "chained": ("token", "block"),
    "shaped independent": ("specinfer", "spectr", "traversal", "rrs"),
}


@pytest.mark.parametrize(
    ("name", "verifier", "starts"),
    [
        ("blended deterministic", "traversal", "apart"),
        ("shaped deterministic", "traversal", "apart"),
        ("blended mixed", "traversal", "together"),
    ],
)
def test_a_second_call_with_the_same_seed_follows_the_target(name, verifier, starts):
    """One of each; all kinds, rules and starts are among the slow tests."""
    assert p_of_second_calls(DRAFTERS[name], verifier, starts=starts) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("starts", ["apart", "together"])
@pytest.mark.parametrize(
    ("name", "verifier"),
    [(name, verifier) for name in DRAFTERS for verifier in RATIO_RULES.get(name, RATIO_RULES[name.split()[0]])],
)
def test_second_calls_of_every_kind_and_rule(name, verifier, starts):
    """20,000 seeds each, a minute."""
    p_value = p_of_second_calls(DRAFTERS[name], verifier, starts=starts, num_seeds=20_000)
    print(f"{name}, {verifier}, {starts}: p {p_value:.2g}")
    assert p_value > 1e-3


def test_calls_that_share_their_numbers_are_seen():
    """The negative control: what the engine did before calls had streams of their own."""
    assert p_of_second_calls(DRAFTERS["blended mixed"], "traversal", starts="alike") < 1e-6


@pytest.mark.long
def test_a_rule_that_never_looks_at_drafts_may_share_its_numbers():
    assert p_of_second_calls(DRAFTERS["blended mixed"], "match", starts="alike") > 1e-3


def engine_of(lookup=None, **settings) -> stand.Engine:
    drafter = stand.BlendedDrafter(lookup, budget=12, kind="deterministic")
    return stand.wrap(tiny_model("qwen2"), drafter=drafter, **settings)


def p_of_two_turns(make_engine, **settings) -> float:
    """Of the joint law of a token and of the one that a second call draws, with the same seed, after prompt and token;
    chi-square against the target's, over rows."""
    model, prompt, num_rows = small_model(7), [3, 5, 1, 3], 600
    engine, more = make_engine(model), {"seed": 11, "max_new_tokens": 1, "temperature": 1.0, "top_k": 0}
    first = engine.generate(input_ids=prompt, num_return_sequences=num_rows, stop_token_ids=[], **more, **settings)
    prompts = [[*prompt, *tokens] for tokens in first.token_ids]
    second = make_engine(model).generate(input_ids=prompts, stop_token_ids=[], **more, **settings)
    pairs = Counter((one[-1], two[0]) for one, two in zip(prompts, second.token_ids, strict=True))
    with torch.inference_mode():
        one = model(input_ids=torch.tensor([prompt])).logits[0, -1].double().softmax(0)
        two = model(input_ids=torch.tensor([[*prompt, token] for token in range(7)])).logits[:, -1].double().softmax(1)
    law = (one[:, None] * two).tolist()
    return p_of_continuations(pairs, {(i, j): law[i][j] for i in range(7) for j in range(7)})


TURNS = {
    "without drafts": (lambda model: stand.wrap(model), {"draft": False}),
    "an engine per turn": (lambda model: stand.wrap(model, drafter=stand.BlendedDrafter(budget=8)), {}),
    "nothing learned": (lambda model: stand.wrap(model, drafter=stand.PromptLookupDrafter()), {}),
    "match": (lambda model: stand.wrap(model, verifier="match"), {"draft": False}),
}


@pytest.mark.parametrize("turns", TURNS)
def test_a_turn_draws_anew_though_the_seed_is_the_same(turns):
    make_engine, settings = TURNS[turns]
    assert p_of_two_turns(make_engine, **settings) > 1e-3


def test_turns_that_share_their_numbers_are_seen(monkeypatch):
    """The negative control: numbers that do not follow from the prompt."""
    monkeypatch.setattr("stand.scheduling.scheduler.prompt_word", lambda prompt, shown: 0)
    make_engine, settings = TURNS["without drafts"]
    assert p_of_two_turns(make_engine, **settings) < 1e-6


def test_rows_of_one_prompt_never_share_a_key():
    prompt, rows = np.array([3, 1, 4], dtype=np.int32), np.array([*range(1000), 2**32 - 1])
    keys = [VerifierNoise(7, rows, rows, rows, prompt_words=prompt_word(each)).keys for each in (prompt, prompt[:2])]
    assert len(set(keys[0].tolist())) == 1001 and keys[0].min() >= 0 and keys[0].max() < 2**32
    assert not set(keys[0].tolist()) & set(keys[1].tolist())


SETTINGS = {"input_ids": [[3, 4, 5, 3, 4]], "num_return_sequences": 3, "max_new_tokens": 24, "temperature": 1.0}


def test_own_seeds_differ_whenever_something_was_learned(monkeypatch):
    """Over calls, engines that share a lookup, and files; they do not where nothing was learned."""
    seeds = []
    monkeypatch.setattr("stand.engine.call_seed", lambda *words: seeds.append(call_seed(*words)) or seeds[-1])
    first = engine_of()
    for learn in (True, False, False, True):
        first.generate(**SETTINGS, seed=7, learn=learn)
    assert seeds[0] == 7 and seeds[1] == seeds[2] and len(set(seeds)) == 3
    engine_of(first.lookup).generate(**SETTINGS, seed=7)
    assert len(set(seeds)) == 4
    first.generate(**SETTINGS, seed=7, draft=False)
    assert len(seeds) == 5  # the numbers of a call without drafts follow from the seed alone


class NoLaws(stand.LawSource):
    def laws(self, request, plan):
        return None


class OneSource:
    """A source that every call gets in a drafter of its own, as after another `wrap`."""

    def __init__(self):
        self.source = NoLaws()

    def start_call(self, *, learns):
        return stand.BlendedDrafter(BlendedLookup(), source=self.source).start_call(learns=learns)


class Counted(stand.FixedShapeDrafter):
    """A drafter whose memory does not count the calls."""

    start_call = stand.Drafter.start_call


@pytest.mark.parametrize("memory", [BlendedLookup, LookupTree, Counted, OneSource])
def test_no_call_shares_a_start_with_one_that_teaches(memory):
    """Calls that teach or not, begun before any has taught, and by many threads at once."""
    shared = memory() if memory is not Counted else Counted(LookupTree(), TreeShape.from_branching([1]))
    assert shared.start_call(learns=True) == 0
    asked = [(False, True, True, False)[place % 4] for place in range(64)]
    with ThreadPoolExecutor(8) as threads:
        starts = list(threads.map(lambda learns: shared.start_call(learns=learns), asked))
    teaching = [start for start, learns in zip(starts, asked, strict=True) if learns]
    assert len({0, *teaching}) == 33 and not {0, *teaching} & set(starts[::4] + starts[3::4])
    assert shared.start_call(learns=False) == shared.start_call(learns=False)


@torch.inference_mode()
def test_two_engines_that_begin_on_one_lookup_before_either_teaches_have_other_seeds():
    engines = [engine_of()]
    engines.append(engine_of(engines[0].lookup))
    calls = [engine._new_call(None, None, **SETTINGS, seed=7)[0] for engine in engines for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        seeds = list(threads.map(lambda call: call._new_own_seed(), calls))
    assert len(set(seeds)) == 4


@torch.inference_mode()
def test_calls_that_are_made_early_take_their_seed_when_they_begin():
    """The second of two calls that were made before either ran depends on what the first one taught."""
    engine = engine_of()
    calls = [engine._new_call(None, None, **SETTINGS, seed=7)[0] for _ in range(2)]
    for call in calls:
        call.run()
    first = seed_with_prompt(7, np.array(SETTINGS["input_ids"][0], dtype=np.int32))
    assert calls[0]._own_seed == first not in (7, calls[1]._own_seed)


@pytest.mark.parametrize("drafter", [stand.BlendedDrafter, stand.FixedShapeDrafter])
def test_a_prompt_gives_its_batch_mates_other_numbers(drafter, monkeypatch):
    """It may hold what a call with the same seed drew from a lookup that was cleared since, that was not taught, or
    without drafts: with the numbers of that call the first row would be drafted for and tested by what had decided the
    drafts."""
    engine, seeds, draft = stand.wrap(tiny_model("qwen2"), drafter=drafter()), [], drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda self, request: seeds[-1].add(request.seed) or draft(self, request))
    one = SETTINGS["input_ids"]
    two = [*one, [*one[0], 9]]
    for prompts, learn in ((one, True), (two, True), (two, True), (two, False), (two, False), (one, False)):
        engine.lookup.clear()
        seeds.append(set())
        engine.generate(**{**SETTINGS, "input_ids": prompts}, seed=7, learn=learn)
    assert seeds[1] == seeds[2] and seeds[3] == seeds[4] and all(len(each) == 1 for each in seeds)
    assert len(set.union({7}, *seeds)) == (4 if drafter.rows_apart else 5)  # 7: without drafts


@pytest.mark.long
@pytest.mark.parametrize("is_control", [False, True])
def test_a_row_keeps_its_law_beside_a_prompt_that_holds_what_its_seed_drew(is_control, monkeypatch):
    """Nothing is learned, and a node goes to the row or to its mate, by the mate's last token. With the numbers that
    drew this token (the negative control) the row would be tested where it has come to pass, and only there."""
    if is_control:
        monkeypatch.setattr("stand.call.seed_with_prompt", lambda seed, prompt: seed)
    model, prompt, count = small_model(4), [3, 1, 3], 150
    law = continuation_law(model, prompt, LogitsProcessorList(), end=-1, tokens=1)
    lookup = BlendedLookup(num_candidates=4)
    best = np.array(sorted(range(4), key=lambda token: -law[token,]), dtype=np.int32)[None]
    laws = np.array([[law[token,] for token in best[0].tolist()], [0.25] * 4], dtype=np.float32)
    for _ in range(30):
        lookup.learn(prompt, [best[0, 0]], top_ids=best, top_probs=laws[:1])
        for sure, unsure in ((0, 1), (2, 3)):
            lookup.learn([*prompt, sure], [1])
            lookup.learn([*prompt, unsure], [best[0, 0]], top_ids=best, top_probs=laws[1:])
    one, two = (stand.wrap(model, drafter=stand.BlendedDrafter(lookup, budget=budget)) for budget in (count, 1))
    settings = {"max_new_tokens": 2, "temperature": 1.0, "top_k": 0, "stop_token_ids": [], "seed": 5, "learn": False}
    drawn = one.generate(input_ids=prompt, num_return_sequences=count, **settings).token_ids
    counts, num_drafted = Counter(), 0
    for row, tokens in enumerate(drawn):
        mates = [stand.Request(prompt, rows=[row]), stand.Request([*prompt, tokens[0]], rows=[count + row])]
        (found,) = (end for end in two.run(mates, **settings) if end.row == row)
        counts[tuple(found.token_ids[:1])] += 1
        num_drafted += found.num_draft_tokens
    assert 0.2 < num_drafted / count < 0.8
    p_value = p_of_continuations(counts, law)
    assert p_value < 1e-4 if is_control else p_value > 1e-3


def test_a_loaded_lookup_has_another_digest_than_an_empty_one(tmp_path):
    engine = engine_of()
    engine.generate(**SETTINGS, seed=7)
    engine.lookup.save(tmp_path / "lookup")
    loaded = [BlendedLookup.load(tmp_path / "lookup") for _ in range(2)]
    assert loaded[0].digest == loaded[1].digest != 0
    outputs = [engine_of(lookup).generate(**SETTINGS, seed=7) for lookup in loaded]
    assert outputs[0].token_ids == outputs[1].token_ids
    loaded[0].clear()
    assert loaded[0].digest == 0 and BlendedLookup().digest == LookupTree().digest == 0
    shaped_lookup = LookupTree()
    shaped_lookup.learn([1], [2, 3])
    assert shaped_lookup.copy().digest == shaped_lookup.digest != 0


def test_fresh_engines_repeat_two_calls_exactly():
    runs = []
    for _ in range(2):
        engine = engine_of()
        runs.append([engine.generate(**SETTINGS, seed=7).token_ids for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_a_drafter_whose_memory_does_not_count_does_it_itself():
    engine = stand.wrap(tiny_model("qwen2"), drafter=Counted(LookupTree(), TreeShape.from_branching([2, 1])))
    outputs = [engine.generate(**SETTINGS, seed=7).token_ids for _ in range(2)]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("laws", [stand.EagleLaws, stand.StreamLaws])
def test_a_call_that_teaches_nothing_repeats_itself(laws):
    """Also where a trained part runs as often as pays: such a call leaves that alone."""
    part = {stand.EagleLaws: "eagle", stand.StreamLaws: "streams"}[laws]
    model, source = AutoModelForCausalLM.from_pretrained(REASONER), laws(REASONER.parent / "drafters" / part)
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=16, source=source))
    settings = {"input_ids": list(range(5, 15)), "num_return_sequences": 2, "max_new_tokens": 60, "temperature": 1.0}
    engine.generate(**settings, top_k=0, seed=7)
    one, two, three = (engine.generate(**settings, top_k=0, seed=7, learn=False) for _ in range(3))
    assert one.token_ids == two.token_ids == three.token_ids
    assert one.stats.num_steps == two.stats.num_steps == three.stats.num_steps


@pytest.mark.parametrize("source", [None, NoLaws()])
def test_a_cleared_lookup_begins_anew_unless_a_source_remembers(source):
    """How often a trained part pays follows from earlier calls, and no lookup knows of it."""
    drafter = stand.BlendedDrafter(BlendedLookup(), source=source)
    starts = []
    for _ in range(2):
        drafter.lookup.learn([1], [2, 3])
        starts += [drafter.start_call(learns=learns) for learns in (False, False, True, True)]
        drafter.lookup.clear()
    assert starts[0] == starts[1] and starts[4] == starts[5]
    assert len(set(starts)) == (3 if source is None else 6)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7", True])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be an integer"):
        checked_seed(seed)
    assert checked_seed(np.int64(5)) == 5
