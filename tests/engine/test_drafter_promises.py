"""What drafters promise beside their drafts: room, what they learn, numbers of calls, and where the last check ends."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from tiny_models import VOCABULARY_SIZE, tiny_model

import stand
from stand.drafters.check import check_batch, check_most_nodes, check_within
from stand.drafters.costs.step_cost import CostTable, StepCost
from stand.drafters.drafter import Drafter, LookupDrafter, teach_two_ways
from stand.trees import BlendedLookup, DraftBatch, DraftTree, LookupTree, TreeShape

COSTS = CostTable((StepCost(2, 32, tokens=(2, 8, 40), seconds=(1.0, 1.0, 1.1)),))
TWO_LEVELS = TreeShape.from_branching([2, 1])
PROMPT = np.array([5, 9, 11, 4], dtype=np.int32)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: stand.BlendedDrafter(budget=12), 12),
        (lambda: stand.BlendedDrafter(costs=COSTS), 40 - 3),
        (lambda: stand.BlendedDrafter(costs=COSTS, budget=9), 9),
        (lambda: stand.BlendedDrafter(costs=COSTS, budget=90), 40 - 3),
        (lambda: stand.FixedShapeDrafter(shape=TWO_LEVELS), 3 * 4),
        (lambda: stand.TokenRecyclingDrafter(TWO_LEVELS), 3 * 4),
        (lambda: stand.PromptLookupDrafter(gamma=5), 3 * 5),
        (lambda: stand.ModelDrafter(tiny_model("llama"), gamma=2), 3 * 2),
    ],
)
def test_the_room_that_is_kept_free(make, expected):
    assert make().most_nodes(3) == expected


@pytest.mark.parametrize(("most", "drafted"), [(9, 9), (9, None), (None, 10)])
def test_drafts_may_fill_what_steps_hold(most, drafted):
    drafter = types.SimpleNamespace(most_nodes=lambda num_rows: drafted)
    check_most_nodes(drafter, 3, types.SimpleNamespace(most_drafted=most, name="this kind"))


def test_drafts_of_more_nodes_than_steps_hold_are_refused():
    drafter = stand.BlendedDrafter(budget=10)
    with pytest.raises(ValueError, match="at most 9 nodes in steps of this kind, got BlendedDrafter with 10 for 3"):
        check_most_nodes(drafter, 3, types.SimpleNamespace(most_drafted=9, name="this kind"))


def test_a_rider_takes_room_beside_the_nodes():
    """The most that it takes, however the nodes fall to the rows: here two slots per node, roots included."""
    rider = types.SimpleNamespace(num_slots=lambda sizes: 2 * sizes)
    drafter = stand.BlendedDrafter(budget=5)
    assert drafter.most_slots(3) == 5
    drafter.rider = rider
    assert drafter.most_slots(3) == 5 + 2 * (5 + 3)
    unknown = stand.TokenRecyclingDrafter(TWO_LEVELS)
    unknown.most_nodes, unknown.rider = lambda num_rows: None, rider
    assert unknown.most_slots(3) is None


def test_more_rows_than_were_timed_draft_nothing():
    lookup = BlendedLookup()
    lookup.learn([], np.tile(np.arange(41, dtype=np.int32), 5))
    drafter = stand.BlendedDrafter(lookup, costs=COSTS)
    assert drafter.most_nodes(41) == 0
    histories = [np.array([token], dtype=np.int32) for token in range(41)]
    assert drafter.draft(draft_request(histories)).num_nodes == 41


def test_costs_are_those_of_the_mean_length():
    """Nodes are free behind short contexts here and never pay behind long ones."""
    near = StepCost(4, 8, tokens=(4, 40), seconds=(1.0, 1.0001))
    far = StepCost(4, 100, tokens=(4, 40), seconds=(1.0, 900.0))
    lookup = BlendedLookup()
    lookup.learn([], np.tile(np.arange(20, dtype=np.int32), 50))
    drafter = stand.BlendedDrafter(lookup, costs=CostTable((near, far)))
    counts = {}
    for length in (8, 100):
        histories = [np.arange(length, dtype=np.int32) % 20] * 4
        counts[length] = drafter.draft(draft_request(histories)).num_nodes
    assert counts[8] > 10 and counts[100] == 4


def known_after(lookup, context):
    """Every token that may follow, with its probability."""
    if isinstance(lookup, BlendedLookup):
        token_ids, probabilities = lookup.predict(context)
        return dict(zip(token_ids.tolist(), probabilities.tolist(), strict=True))
    place = {"seed": 0, "rows": np.zeros(1, int), "steps": np.zeros(1, int)}
    batch = lookup.draft([context], TreeShape.from_branching([4]), kind="sampled", **place)
    return dict(zip(batch.support_ids[0].tolist(), batch.law[1].tolist(), strict=True)) if batch.num_nodes > 1 else {}


@pytest.mark.parametrize("drafter", [stand.BlendedDrafter(budget=4), stand.FixedShapeDrafter(shape=TWO_LEVELS)])
def test_a_prompt_is_learned_from_its_first_token_on(drafter):
    """As the whole prompt learned by hand: the first token is a context and not learned itself."""
    drafter.attach(tiny_model("llama"), b"")
    drafter.learn_prompt(PROMPT, problem=0)
    by_hand = type(drafter.lookup)()
    by_hand.learn(PROMPT[:1], PROMPT[1:])
    for length in range(1, len(PROMPT) + 1):
        assert known_after(drafter.lookup, PROMPT[:length]) == known_after(by_hand, PROMPT[:length])
    first = known_after(by_hand, PROMPT[:1])
    assert max(first, key=first.get) == PROMPT[1] and PROMPT[0] not in first


@pytest.mark.parametrize("lookup", [BlendedLookup(), LookupTree()])
def test_a_lesson_is_learned_behind_its_history(lookup):
    """Without the pending token, which is the draft's root."""
    if isinstance(lookup, LookupTree):
        drafter, scopes = stand.FixedShapeDrafter(lookup, TWO_LEVELS), {}
    else:
        drafter, scopes = stand.BlendedDrafter(lookup, budget=4), {"scopes": [0, 1]}
    request = draft_request([PROMPT, PROMPT[::-1].copy()])
    batch = drafter.draft(request)
    top_ids = np.array([[20 + node] for node in range(batch.num_nodes)], dtype=np.int32)
    top_probs = np.ones(top_ids.shape, dtype=np.float32)
    accepted = [np.zeros(0, np.int32)] * 2
    drafter.learn(stand.Lesson(request, batch, accepted, np.array([20, 21]), top_ids, top_probs))
    by_hand = type(lookup)()
    by_hand.learn_batch(batch, [history[:-1] for history in request.histories], top_ids, top_probs, **scopes)
    for length in (1, 2, 3, 4):  # of the context that leads to what followed
        found = known_after(lookup, PROMPT[len(PROMPT) - length :])
        assert found == known_after(by_hand, PROMPT[len(PROMPT) - length :]) and max(found, key=found.get) == 20


def test_rows_that_end_alike_are_told_apart():
    """What follows the same pending token depends on what came before it."""
    drafter = stand.FixedShapeDrafter(LookupTree(), TWO_LEVELS)
    histories = [np.array(tokens, dtype=np.int32) for tokens in ([5, 9, 7], [6, 8, 7])]
    request = draft_request(histories)
    batch = drafter.draft(request)
    top_ids = np.array([[20], [30]], dtype=np.int32)
    accepted = [np.zeros(0, np.int32)] * 2
    drafter.learn(stand.Lesson(request, batch, accepted, np.array([20, 30]), top_ids, np.ones((2, 1), np.float32)))
    for history, expected in zip(histories, (20, 30), strict=True):
        assert drafter.draft(draft_request([history[1:]])).token_ids[1] == expected


def test_shapes_end_at_the_depth_that_is_left():
    lookup = LookupTree()
    lookup.learn([], np.tile(np.array([5, 9, 11, 4, 6], dtype=np.int32), 9))
    drafter = stand.FixedShapeDrafter(lookup, TWO_LEVELS)
    deepest = {depth: int(drafter.draft(draft_request([PROMPT], max_depth=depth)).depths.max()) for depth in range(4)}
    assert deepest == {0: 0, 1: 1, 2: 2, 3: 2}


def test_coupled_drafts_follow_the_targets_seed():
    lookup = LookupTree()
    lookup.learn([], np.random.default_rng(1).integers(0, 9, 900).astype(np.int32))
    drafter = stand.FixedShapeDrafter(lookup, TreeShape.from_branching([2, 2]), kind="coupled")
    request = draft_request([np.array([token], dtype=np.int32) for token in range(9)], seed=1)

    def tokens(**seeds):
        return drafter.draft(replace(request, **seeds)).token_ids.tolist()

    assert tokens(target_seed=2) != tokens() == tokens(seed=2)


class Source(stand.LawSource):
    """A source of laws that says nothing and remembers what it was asked."""

    requires_features = True

    def __init__(self):
        self.asked = []

    def attach(self, model):
        self.asked.append("attach")

    def laws(self, request, grow):
        self.asked.append("laws")

    def follow_prompt(self, token_ids, features):
        self.asked.append("follow_prompt")

    def follow(self, lesson):
        self.asked.append("follow")


@pytest.mark.parametrize(("budget", "expected"), [(0, []), (1, ["laws"]), (5, ["laws"])])
def test_a_source_is_asked_where_something_may_be_drafted(budget, expected):
    source = Source()
    stand.BlendedDrafter(BlendedLookup(), budget=budget, source=source).draft(draft_request([PROMPT]))
    assert source.asked == expected


def test_a_source_follows_the_target():
    source, plain = Source(), stand.BlendedDrafter(BlendedLookup(), budget=4)
    drafter = stand.BlendedDrafter(BlendedLookup(), budget=4, source=source)
    for one in (drafter, plain):
        one.follow_prompt(PROMPT, None)
        one.follow(None)
    assert source.asked == ["follow_prompt", "follow"]
    assert drafter.requires_features and not plain.requires_features


def test_the_room_of_costs_that_are_followed():
    drafter = stand.BlendedDrafter(BlendedLookup())
    drafter._known = types.SimpleNamespace(most_tokens=lambda num_rows: 10)
    assert [drafter.most_nodes(num_rows) for num_rows in (3, 10, 12)] == [7, 0, 0]


def test_the_table_of_successors_is_written_soundly():
    drafter = stand.TokenRecyclingDrafter(TreeShape.from_branching([2, 2]), num_successors=2)
    request = draft_request([PROMPT])
    root = DraftBatch.concatenate([DraftTree.pending(int(PROMPT[-1]))])
    top = np.array([[8, 3]], dtype=np.int32)
    drafter.learn(stand.Lesson(request, root, [np.zeros(0, np.int32)], np.array([8]), top, np.ones((1, 2), np.float32)))
    batch = drafter.draft(request)
    batch.check()
    assert batch.token_ids.tolist() == [4, 8, 3] and not batch.law[0].any() and (batch.support_ids[2] == -1).all()


class Filling(stand.ModelDrafter):
    """Counts how often rows of its cache are filled anew."""

    num_fills = 0

    def _fill(self, histories, places):
        self.num_fills += bool(places)
        super()._fill(histories, places)


def test_a_draft_model_reads_a_prompt_once():
    """Whether nothing is rejected (a draft model like its target) or nearly everything."""
    for small in ("qwen2", "llama"):
        drafter = Filling(tiny_model(small), gamma=3)
        engine = stand.wrap(tiny_model("qwen2"), drafter=drafter, verifier="match")
        engine.generate(input_ids=[PROMPT.tolist()] * 2, max_new_tokens=24, temperature=1.0, seed=1, stop_token_ids=[])
        assert drafter.num_fills == 1, small


@pytest.mark.parametrize("max_depth", [0, 1, 2, 5])
def test_a_draft_model_keeps_to_the_depth(max_depth):
    drafter = stand.ModelDrafter(tiny_model("llama"), gamma=3)
    batch = drafter.draft(draft_request([PROMPT, PROMPT[:2]], max_depth=max_depth))
    assert batch.sizes.tolist() == [1 + min(max_depth, 3)] * 2


def test_prompts_that_begin_alike_are_told_apart():
    """By a draft model: what it drafts for both together is what it drafts for each alone."""
    histories = [np.array(tokens, dtype=np.int32) for tokens in ([5, 9, 11, 4], [5, 8, 2, 4], [5, 9, 11, 4])]
    model = tiny_model("llama")
    together = stand.ModelDrafter(model, gamma=2).draft(draft_request(histories))
    for row, history in enumerate(histories):
        alone = stand.ModelDrafter(model, gamma=2).draft(draft_request([history], first_row=row))
        assert together[row].token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(together[row].law, alone.law, atol=1e-5)


class Counting(Drafter):
    """Remembers something, says the engine's interface, and counts its calls itself."""

    def __init__(self, num_candidates):
        self.num_candidates = num_candidates

    def draft(self, request):
        raise NotImplementedError


def test_numbers_of_calls():
    drafter, silent, forgetful = Counting(4), Counting(0), Counting(0)
    forgetful.remembers = False
    numbers = [drafter.start_call(learns=learns) for learns in (True, True, False, True, False, False)]
    assert numbers == [0, 2, 5, 4, 7, 7]  # calls that do not teach may share theirs
    assert [silent.start_call(learns=learns) for learns in (True, False, False)] == [0, 2, 4]  # who knows what it keeps
    assert [forgetful.start_call(learns=learns) for learns in (True, False)] == [0, 0]


def test_a_lookup_drafter_without_a_lookup_has_seen_nothing():
    drafter = stand.BlendedDrafter()
    assert isinstance(drafter, LookupDrafter)
    assert drafter.num_candidates == 0 and drafter.start_call(learns=True) == 0
    drafter.lookup = BlendedLookup(num_candidates=7)
    assert drafter.num_candidates == 7
    assert drafter.start_call(learns=True) != drafter.start_call(learns=True)


def test_two_ways_are_taught():
    lookup = BlendedLookup()
    context = teach_two_ways(lookup)
    known = known_after(lookup, context)
    assert context.tolist() == [3] * 5 and min(known.get(1, 0), known.get(2, 0)) > 0.02
    drafted = stand.BlendedDrafter(budget=4).typical_draft()
    assert drafted.num_nodes > 2


def checked(*drafts):
    histories = [np.array([3, int(draft.token_ids[0])], dtype=np.int32) for draft in drafts]
    check_batch(DraftBatch.concatenate(drafts), draft_request(histories), vocabulary_size=VOCABULARY_SIZE)


def draft_of(token, mass, *, support=None):
    return DraftTree(
        np.array([1, token], dtype=np.int32),
        np.array([-1, 0], dtype=np.int32),
        np.array([[token if support is None else support], [-1]], dtype=np.int32),
        np.array([[0.0], [mass]], dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (draft_of(2, 1.3), "must sum to 1, got 1.3"),
        (draft_of(2, 0.0), "must sum to 1, got 0"),
        (draft_of(-3, 1.0), "got -3"),
        (draft_of(2, 1.0, support=VOCABULARY_SIZE + 4), f"got {VOCABULARY_SIZE + 4}"),
    ],
)
def test_the_fault_is_named(draft, message):
    with pytest.raises(ValueError, match=message):
        checked(DraftTree.pending(7), draft)


def batch_of(**changes):
    """Two rows, [3, 4, 5] and [6, 7]; changed."""
    batch = DraftBatch.concatenate([DraftTree.chain([3, 4, 5]), DraftTree.chain([6, 7])])
    return replace(batch, **{name: np.array(values, getattr(batch, name).dtype) for name, values in changes.items()})


def check_two_rows(batch):
    histories = [np.array([9, 3], np.int32), np.array([9, 6], np.int32)]
    check_batch(batch, draft_request(histories), vocabulary_size=VOCABULARY_SIZE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"law": [[0], [np.nan], [1], [0], [1]]}, "must sum to 1, got nan"),
        (
            {
                "law": [[0, 0], [2, -1], [1, 0], [0, 0], [1, 0]],
                "support_ids": [[4, 9], [5, -1], [-1, -1], [7, -1], [-1, -1]],
            },
            "law must be finite and not negative, got -1",
        ),
        ({"support_ids": [[8], [5], [-1], [7], [-1]]}, "give its own token 4 positive mass"),
        ({"law": [[0], [1], [1], [0]]}, "law must have one entry per node, 5, got 4"),
        ({"law": [[0], [1]], "support_ids": [[4], [5]]}, "support_ids must have one entry per node, 5, got 2"),
        ({"parents": [-1, 0, 1]}, "parents must have one entry per node, 5, got 3"),
        ({"parents": [-1, 0, 1, -1, 3]}, r"parents\[1\] = 3; .* count from the draft's own root"),
        ({"parents": [-1, 0, 10**8, -1, 0]}, r"parents\[2\] = 100000000"),
        ({"parents": [-1, 0, 1, 0, 0]}, "must sum to 1, got 0"),
        ({"parents": [-1, -1, 1, -1, 0]}, r"parents\[1\] = -1"),
        ({"offsets": [0, 3, 4]}, r"offsets must rise from 0 to the number of nodes, 5, got \[0, 3, 4\]"),
        ({"offsets": [0, 10**7, 5]}, "offsets must rise"),
        ({"offsets": [0, -3, 5]}, "offsets must rise"),
        ({"offsets": [0, 0, 5]}, "offsets must rise"),
        ({"offsets": [[0], [3], [5]]}, "offsets must rise"),
        ({"depths": [[0], [1], [2], [0], [1]]}, "depths must have 1 dimensions, got 2; build the batch by concatenate"),
        ({"token_ids": [[3], [4], [5], [6], [7]]}, "token_ids must have 1 dimensions, got 2"),
        ({"law": [0, 1, 1, 0, 1]}, "law must have 2 dimensions, got 1"),
        ({"ranks": [0, 0]}, "ranks must have one entry per node, 5, got 2"),
        ({"ranks": [0, 0, 1, 0, 0]}, "depths and ranks must follow from parents"),
        ({"ranks": [1, 0, 0, 0, 0]}, "depths and ranks must follow from parents"),
    ],
)
def test_what_no_draft_can_be_is_named(changes, message):
    check_two_rows(batch_of())
    with pytest.raises(ValueError, match=message):
        check_two_rows(batch_of(**changes))


@pytest.mark.parametrize("name", ["token_ids", "parents", "offsets", "support_ids", "depths", "ranks"])
def test_whole_numbers_of_another_kind_are_named(name):
    """A step takes arrays as they are: 2**32 + 5 would pass as 5."""
    batch = batch_of()
    for other in (np.int64, np.float64):
        with pytest.raises(
            ValueError, match=f"{name} of a drafter's answer must be an array of int32, got {other.__name__}"
        ):
            check_two_rows(replace(batch, **{name: getattr(batch, name).astype(other)}))
    for other in ([0, 3, 5], None):
        with pytest.raises(ValueError, match=f"got {type(other).__name__}; build the batch by concatenate"):
            check_two_rows(replace(batch, **{name: other}))


def test_laws_of_another_kind_are_named():
    batch = batch_of()
    check_two_rows(replace(batch, law=batch.law.astype(np.float64)))
    others = [batch.law.astype(kind) for kind in (np.int64, np.float16, object)] + [batch.law.tolist(), None]
    for law in [*others, torch.from_numpy(batch.law)]:
        with pytest.raises(ValueError, match="law of a drafter's answer must be an array of float32 or float64, got"):
            check_two_rows(replace(batch, law=law))


@pytest.mark.parametrize("name", ["token_ids", "parents", "offsets", "support_ids", "depths", "ranks", "law"])
def test_arrays_in_pieces_are_named(name):
    batch = batch_of()
    pieces = np.repeat(getattr(batch, name), 2, axis=0)[::2]
    with pytest.raises(ValueError, match=f"{name} of a drafter's answer must lie in one piece, .* strides"):
        check_two_rows(replace(batch, **{name: pieces}))


def test_a_batch_of_trees_that_lie_column_by_column_lies_row_by_row():
    """As a transposed table gives them; the rule that is usual takes no other."""
    law, ids = np.array([[0.0, 0.0], [0.5, 0.5]], dtype=np.float32), np.array([[4, 5], [-1, -1]], dtype=np.int32)
    tokens, parents = np.array([3, 4], dtype=np.int32), np.array([-1, 0], dtype=np.int32)
    tree = DraftTree(tokens, parents, np.asfortranarray(ids), np.asfortranarray(law))
    batch = DraftBatch.concatenate([tree, tree])
    assert batch.law.flags.c_contiguous and batch.support_ids.flags.c_contiguous
    histories = [np.array([9, 3], np.int32)] * 2
    check_batch(batch, draft_request(histories), vocabulary_size=VOCABULARY_SIZE)


@pytest.mark.parametrize("ranks", [[0, 0, 0, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 0, -1, 0]])
def test_ranks_that_do_not_count_siblings_are_refused(ranks):
    """Rules test siblings in their order, and see by them whether a draft is a chain."""
    law = np.array([[0, 0], [1, 0], [0, 1], [1, 0]], dtype=np.float32)
    tokens, parents = np.array([3, 4, 5, 6], dtype=np.int32), np.array([-1, 0, 0, 2], dtype=np.int32)
    support_ids = np.array([[4, 5], [-1, -1], [6, -1], [-1, -1]], dtype=np.int32)
    batch = DraftBatch.concatenate([DraftTree(tokens, parents, support_ids, law)])
    request = draft_request([np.array([9, 3], dtype=np.int32)])
    check_batch(batch, request, vocabulary_size=VOCABULARY_SIZE)
    with pytest.raises(ValueError, match="depths and ranks must follow from parents, got others; build the batch by"):
        check_batch(replace(batch, ranks=np.array(ranks, np.int32)), request, vocabulary_size=VOCABULARY_SIZE)


def test_a_fault_without_a_name_is_refused(monkeypatch):
    monkeypatch.setattr("stand.drafters.check.is_sound", lambda *arguments: False)
    with pytest.raises(ValueError, match="must answer sound drafts"):
        check_two_rows(batch_of())


def test_sound_drafts_pass():
    checked(draft_of(0, 1.0), draft_of(VOCABULARY_SIZE - 1, 1.0), DraftTree.pending(0))


@pytest.mark.parametrize("floor", [True, "0.5", -0.1, 1.1, None, np.nan])
def test_a_floor_is_a_probability(floor):
    with pytest.raises(ValueError, match="floor must be a probability"):
        stand.BlendedDrafter(floor=floor)


@pytest.mark.parametrize("floor", [0, 1, 0.5, np.float32(0.25)])
def test_floors_that_are_taken(floor):
    assert stand.BlendedDrafter(floor=floor).floor == floor


@pytest.mark.parametrize(("setting", "attribute"), [("gamma", "gamma"), ("num_candidates", "law_size")])
def test_one_is_enough_for_a_draft_model(setting, attribute):
    assert getattr(stand.ModelDrafter(tiny_model("llama"), **{setting: 1}), attribute) == 1


@pytest.mark.parametrize(
    ("lengths", "row"),
    [((5, 7), None), ((9, 5), None), ((10, 5), 0), ((9, 8), 1), ((5, 7, 6), None), ((5, 7, 7), 2), ((11, 20), None)],
)
def test_drafts_end_before_a_border(lengths, row):
    """Of depths 1, 3 and 4 behind so many tokens, or begin behind it."""
    batch = DraftBatch.concatenate([DraftTree.chain([3] * (1 + depth)) for depth in (1, 3, 4)[: len(lengths)]])
    request = draft_request([[3] * length for length in lengths])
    if row is None:
        check_within(10, batch, request)
    else:
        with pytest.raises(ValueError, match=f"must end within 10 tokens .* got {lengths[row]} tokens and"):
            check_within(10, batch, request)
