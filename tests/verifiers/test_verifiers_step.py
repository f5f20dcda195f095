"""The random step: walks, draws, noise, and what comes out of `verify`."""

import dataclasses
from collections import Counter
from functools import lru_cache

import exact_rules
import numpy as np
import pytest
import torch
from draft_worlds import KINDS, dense_world, drafts, random_world
from exact import (
    WORLDS,
    Draft,
    check,
    enumerate_drafts,
    full_laws,
    pack,
    production_report,
    stop_probabilities,
    target_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from waitless_draws import draw_residuals_at

from stand.forward.rider import path_ends
from stand.trees import DraftBatch, DraftTree
from stand.trees.noise import uniforms
from stand.verifiers import TargetRows, VerifierNoise, draw_tokens, fitting_names, get_verifier, verifier_names
from stand.verifiers.draw import BLOCK_SIZE, draw_residuals
from stand.verifiers.noise import uniforms_on_device
from stand.verifiers.registry import fitted
from stand.verifiers.rules.greedy_block import pay
from stand.verifiers.target import Debt

LARGEST = np.nextafter(1.0, 0.0)
LOSSLESS_TREE_RULES = ["match", "coupled", "rrs", "traversal", "ranked_traversal", "ot_traversal"]


@dataclasses.dataclass
class GivenNoise:
    """Uniforms chosen by the test."""

    accepts: np.ndarray
    resamples: np.ndarray

    def accept(self, batch):
        return self.accepts

    def resample(self):
        return self.resamples


def keyed(num_rows: int, *, seed: int = 11, step: int = 0) -> VerifierNoise:
    return VerifierNoise(
        seed,
        rows=np.arange(num_rows),
        steps=np.full(num_rows, step),
        positions=np.full(num_rows, 40 + step),
    )


# Drawing one token.


@pytest.mark.parametrize("size", [1, 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 7])
def test_inverse_cdf(size):
    """A grid of uniforms hits each token as often as its weight says, in ascending order."""
    generator = np.random.default_rng(size)
    weights = generator.random(size) * (generator.random(size) < 0.7) + 1e-9 * (np.arange(size) == size // 2)
    weights[0] = 0.0 if size > 1 else 1.0
    grid = (np.arange(4000) + 0.5) / 4000
    rows = torch.from_numpy(np.tile(weights, (4000, 1)))
    tokens = draw_tokens(rows, grid)
    expected = np.searchsorted(np.cumsum(weights), grid * weights.sum(), side="right")
    assert np.mean(tokens == expected) > 0.999  # sums in another order: a point on an edge may fall to either side
    assert np.all(np.diff(tokens) >= 0)
    assert np.all(weights[tokens] > 0)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.1, 1.0]), min_size=1, max_size=600).filter(any),
    st.sampled_from([0.0, 5e-324, 1e-17, 0.3, 0.5, LARGEST]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_weight_of_zero_is_never_drawn(weights, uniform, dtype):
    rows = torch.tensor([weights], dtype=dtype)
    assert rows[0, draw_tokens(rows, np.array([uniform]))[0]] > 0


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-8, 0.1, 1.0]), min_size=4, max_size=300).filter(any),
    st.lists(st.sampled_from([0.0, 1e-20, 0.2]), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.5, 7.0]),
    st.sampled_from([0.0, 1e-17, 0.3, 0.6, LARGEST]),
    st.booleans(),
)
def test_residual_draws_have_weight(weights, mass, scale, uniform, padded):
    support = [2, 0, -1] if padded else [2, 0, 3]
    mass = [*mass[:2], 0.0] if padded else mass
    token = draw_residuals(
        torch.tensor([weights]),
        support_ids=np.array([support], dtype=np.int32),
        mass=torch.tensor([mass]),
        scale=torch.tensor([scale]),
        uniforms=np.array([uniform]),
    )[0]
    full = scale * np.array(weights, dtype=np.float32)
    full[support[: 2 if padded else 3]] = mass[: 2 if padded else 3]
    assert (full if full.sum() > 0 else weights)[token] > 0


@pytest.mark.parametrize("support", [[0, -1], [2, 0], [0, 2], [-1, 0]])
def test_token_zero_may_stand_in_a_support(support):
    """It is no padding: what the rows hold there gives way to its mass."""
    for mass_of_zero in (0.0, 0.5):
        mass = [[mass_of_zero if token == 0 else 0.0 for token in support]]
        count = 40
        tokens = draw_residuals(
            torch.tensor([[0.6, 0.3, 0.1]]).repeat(count, 1),
            support_ids=np.array([support] * count, dtype=np.int32),
            mass=torch.tensor(mass * count),
            scale=torch.ones(count),
            uniforms=(np.arange(count) + 0.5) / count,
        )
        left = 0.3 if 2 in support else 0.4
        assert np.mean(tokens == 0) == pytest.approx(mass_of_zero / (mass_of_zero + left), abs=1.5 / count)
        assert 2 not in support or 2 not in tokens


def test_the_largest_uniform_stays_inside_the_weights():
    """Differences and quotients of sums round up past the end here and there; a token of weight 0 must not come out."""
    generator, count = np.random.default_rng(4), 4000
    for size in (5, BLOCK_SIZE + 40):
        rows = generator.random((count, size)) * generator.choice([1e-9, 1.0, 1e5], (count, 1))
        rows[:, size // 2 :] = 0.0
        support = np.tile(np.array([[0, size - 1]], dtype=np.int32), (count, 1))
        mass = np.stack([generator.random(count), np.zeros(count)], axis=1)
        tokens = draw_residuals(
            torch.from_numpy(rows.copy()),
            support_ids=support,
            mass=torch.from_numpy(mass),
            scale=torch.from_numpy(generator.random(count)),
            uniforms=np.full(count, LARGEST),
        )
        assert np.all((tokens > 0) & (tokens < size // 2))
        assert np.all(draw_tokens(torch.from_numpy(rows), np.full(count, LARGEST)) < size // 2)


def test_residual_draws_without_a_wait_are_the_same():
    """Tensors throughout, rows whose weights are all zero among them."""
    generator, count = np.random.default_rng(6), 300
    rows = torch.from_numpy(generator.dirichlet(np.full(30, 0.2), count))
    support = np.stack([generator.permutation(30)[:4] for _ in range(count)]).astype(np.int32)
    mass = torch.from_numpy(generator.random((count, 4)) * generator.integers(0, 2, (count, 4)))
    scale = torch.from_numpy(generator.integers(0, 3, count) / 2.0)
    uniforms = generator.random(count)
    mass[::7], scale[::7] = 0.0, 0.0
    waited = draw_residuals(rows.clone(), support_ids=support, mass=mass, scale=scale, uniforms=uniforms)
    drawn = draw_residuals_at(rows.clone(), torch.from_numpy(support), mass, scale, torch.from_numpy(uniforms))
    assert drawn.tolist() == waited.tolist()


def test_a_vocabulary_of_one_token():
    """Nothing drafted at the stopping node: the only token is drawn, whatever its support's padding."""
    token = draw_residuals(
        torch.ones((1, 1)),
        support_ids=np.array([[-1]], dtype=np.int32),
        mass=torch.zeros((1, 1)),
        scale=torch.ones(1),
        uniforms=np.array([0.5]),
    )
    assert token.tolist() == [0]


def test_residual_draws_follow_their_law():
    generator = np.random.default_rng(5)
    size, count = 2 * BLOCK_SIZE + 9, 20000
    weights = generator.dirichlet(np.full(size, 0.05))
    support = np.array([[7, 300, 2, -1]], dtype=np.int32)
    mass, scale = np.array([[0.1, 0.0, 0.4, 0.0]]), np.array([0.8])
    tokens = draw_residuals(
        torch.from_numpy(np.tile(weights, (count, 1))),
        support_ids=np.tile(support, (count, 1)),
        mass=torch.from_numpy(np.tile(mass, (count, 1))),
        scale=torch.from_numpy(np.tile(scale, count)),
        uniforms=(np.arange(count) + 0.5) / count,
    )
    law = 0.8 * weights
    law[[7, 300, 2]] = [0.1, 0.0, 0.4]
    law /= law.sum()
    assert np.abs(np.bincount(tokens, minlength=size) / count - law).max() < 2 / count


@pytest.mark.parametrize("rule", ["traversal", "rrs", "block", "token"])
@pytest.mark.parametrize("broken", [0, 1])
def test_no_draft_is_kept_by_a_row_that_is_no_law(rule, broken):
    """A chain of two whose target rows are sure of it but for one. What is drawn from that one is refused."""
    support = np.array([[1, -1], [1, -1], [-1, -1]], dtype=np.int32)
    law = np.array([[0, 0], [1, 0], [1, 0]], dtype=np.float32)
    tree = DraftTree(np.array([1, 1, 1], dtype=np.int32), np.array([-1, 0, 1], dtype=np.int32), support, law)
    rows = torch.tensor([[0.0, 1.0, 0.0]] * 3)
    rows[broken] = float("nan")
    for seed in range(20):
        try:
            verdicts = get_verifier(rule).verify(DraftBatch.concatenate([tree]), TargetRows(rows), keyed(1, seed=seed))
        except ValueError as error:
            assert "positive sum" in str(error)
        else:
            assert broken == 1 and len(verdicts.accepted[0]) == 0


def test_rows_without_mass_are_refused():
    for row in ([0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="positive sum.*NaN or -inf-only logits"):
            draw_tokens(torch.tensor([row]), np.array([0.5]))
        for rule in ("match", "traversal", "coupled"):
            with pytest.raises(ValueError, match="positive sum.*NaN or -inf-only logits"):
                get_verifier(rule).verify(
                    DraftBatch.concatenate([DraftTree.pending(1)]), TargetRows(torch.tensor([row])), keyed(1)
                )


# From uniforms to the stopping node and the next token.


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("rrs", "without replacement (2,2)"),
        ("traversal", "without replacement (2,2)"),
        ("traversal", "mixed (2,2), sampled first"),
        ("traversal", "with replacement (2,1)"),
        ("ranked_traversal", "without replacement (2,2)"),
        ("ot_traversal", "without replacement (2,1)"),
        ("token", "chain3"),
        ("block", "chain3"),
        ("specinfer", "with replacement (2,1)"),
        ("spectr", "with replacement (2,1)"),
    ],
)
def test_verify_follows_its_thresholds(rule, kind):
    """Uniforms on a lattice: the node where a draft stops is hit as often as the thresholds say."""
    verifier, world = get_verifier(rule), WORLDS["EX2"]
    _, draft = drafts("EX2", kind)[-1]
    points = {2: 12, 3: 12, 4: 10, 5: 6, 7: 4}[len(draft)]
    lattice = np.stack(np.meshgrid(*[np.arange(points)] * (len(draft) - 1), indexing="ij"), axis=-1)
    lattice = lattice.reshape(-1, len(draft) - 1)
    single, row = pack(world, [draft]), target_rows(world, [draft])
    thresholds, mass, scale = verifier.thresholds(single, row)
    # Move each threshold to the lattice, so that a lattice of uniforms measures it exactly.
    cells = np.rint(thresholds * points).astype(int)
    accepts = np.concatenate([np.full((len(lattice), 1), 0.5), (lattice + 0.5) / points], axis=1)
    above = accepts - cells / points  # how far each uniform lies above its threshold
    uniforms = np.clip(np.where(above >= 0, thresholds + 1e-9 + above / 9, thresholds * accepts), 0, LARGEST)
    uniforms = np.where((above >= 0) & (thresholds >= 1), LARGEST, uniforms)
    batch = pack(world, [draft] * len(lattice))
    verdicts = verifier.verify(
        batch,
        target_rows(world, [draft] * len(lattice)),
        GivenNoise(uniforms.reshape(-1), (np.arange(len(lattice)) + 0.5) / len(lattice)),
    )
    order = np.argsort(verifier.test_order(single, row))
    snapped = np.where(thresholds >= 1, 1.0, cells / points)
    expected = stop_probabilities(verifier, draft, snapped.tolist(), order.tolist())
    counts = Counter(int(path[-1]) if len(path) else 0 for path in verdicts.accepted)
    assert [counts[node] / len(lattice) for node in range(len(draft))] == pytest.approx(expected, abs=1e-12)
    laws = full_laws(single, row, mass=mass, scale=scale)
    assert (path_ends(batch, verdicts.accepted) - batch.offsets[:-1]).tolist() == [
        path[-1] if len(path) else 0 for path in map(np.ndarray.tolist, verdicts.accepted)
    ]
    for path, token in zip(verdicts.accepted, verdicts.next_tokens, strict=True):
        node = int(path[-1]) if len(path) else 0
        assert laws[node][token] > 0
        assert [draft.node(step).token for step in path.tolist()] == list(draft.context(node))


@pytest.mark.parametrize("rule", ["rrs", "traversal"])
def test_next_token_follows_the_law_of_the_stopping_node(rule):
    verifier, world, count = get_verifier(rule), WORLDS["EX3"], 4000
    _, draft = drafts("EX3", "without replacement (2,2)")[3]
    single, row = pack(world, [draft]), target_rows(world, [draft])
    thresholds, mass, scale = verifier.thresholds(single, row)
    laws = full_laws(single, row, mass=mass, scale=scale)
    batch, rows = pack(world, [draft] * count), target_rows(world, [draft] * count)
    accepts = np.full((count, len(draft)), LARGEST)
    verdicts = verifier.verify(batch, rows, GivenNoise(accepts.reshape(-1), (np.arange(count) + 0.5) / count))
    node = path_ends(batch, verdicts.accepted) - batch.offsets[:-1]
    assert len(set(node.tolist())) == 1
    frequencies = np.bincount(verdicts.next_tokens, minlength=4) / count
    assert np.abs(frequencies - laws[int(node[0])]).max() < 2 / count


def test_a_uniform_of_zero_passes_no_threshold_of_zero():
    draft = DraftTree.chain([0, 1])
    batch, target = DraftBatch.concatenate([draft]), TargetRows(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    for rule in ("token", "block", "rrs", "traversal", "spectr", "specinfer"):
        verdicts = get_verifier(rule).verify(batch, target, GivenNoise(np.zeros(2), np.zeros(1)))
        assert verdicts.num_accepted.tolist() == [0]
        assert verdicts.next_tokens.tolist() == [0]


SAMPLED_CASES = [
    ("match", "without replacement (2,2)"),
    ("coupled", "without replacement (2,2)"),
    ("rrs", "without replacement (2,2)"),
    ("traversal", "without replacement (2,2)"),
    ("traversal", "mixed (2,2), sampled first"),
    ("ranked_traversal", "without replacement (2,2)"),
    ("ot_traversal", "without replacement (2,1)"),
    ("token", "chain3"),
    ("block", "chain3"),
    ("specinfer", "with replacement (2,1)"),
    ("spectr", "with replacement (2,1)"),
]


@lru_cache
def sampled_drafts(kind: str, count: int):
    """`count` rows with drafts drawn at random, and the laws [N, V] at their nodes."""
    world, listed = WORLDS["EX2"], drafts("EX2", kind)
    weights = np.array([float(weight) for weight, _ in listed])
    picks = np.random.default_rng(17).choice(len(listed), size=count, p=weights / weights.sum())
    chosen = [listed[pick][1] for pick in picks]
    batch = pack(world, chosen)
    return batch, target_rows(world, chosen, torch.float32).rows(np.arange(batch.num_nodes))


@lru_cache
def sampled_step(rule: str, kind: str, count: int):
    """Drafts that are verified with the shipped noise: the batch, and its verdicts."""
    batch, laws = sampled_drafts(kind, count)
    return batch, get_verifier(rule).verify(batch, TargetRows(laws.clone()), keyed(count))


@pytest.mark.parametrize(("rule", "kind"), SAMPLED_CASES)
def test_first_two_tokens_follow_the_target(rule, kind):
    """Chi-square on (first, second token) of some thousand rows, fixed seed: false alarms 1 in 10,000 per case."""
    count, world = 1500 if rule == "ot_traversal" else 6000, WORLDS["EX2"]
    batch, verdicts = sampled_step(rule, kind, count)
    generator = np.random.default_rng(3)
    seen = np.zeros((3, 3))
    for tokens in verdicts.gained(batch):
        second = tokens[1] if len(tokens) > 1 else generator.choice(3, p=[float(x) for x in world.p((tokens[0],))])
        seen[tokens[0], second] += 1
    expected = count * np.array([[float(a * b) for b in world.p((x,))] for x, a in enumerate(world.p(()))])
    assert ((seen - expected) ** 2 / expected).sum() < 31.8  # 8 degrees of freedom, upper 1e-4


@pytest.mark.parametrize("rule", ["match", "rrs", "traversal", "token", "block"])
def test_mean_kept_is_the_enumerated_one(rule):
    kind = "chain3" if get_verifier(rule).requires.chain else "without replacement (2,2)"
    _, verdicts = sampled_step(rule, kind, 6000)
    expected = float(check(WORLDS["EX2"], drafts("EX2", kind), getattr(exact_rules, rule)).expected)
    assert verdicts.num_accepted.mean() == pytest.approx(expected, abs=4.5 * verdicts.num_accepted.std() / 6000**0.5)


# Rows, empty drafts, temperature 0.


def one_hot_rows(world, chosen):
    rows = target_rows(world, chosen).rows(np.arange(sum(len(draft) for draft in chosen)))
    return torch.nn.functional.one_hot(rows.argmax(dim=1), rows.shape[1]).float()


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(kind, rule) for kind, (_, rules) in KINDS.items() for rule in dict.fromkeys(["match", "coupled", *rules])]
    + [("without replacement (2,2)", "typical"), ("chain3", "typical"), ("deterministic (2,2)", "kl_threshold")],
)
def test_temperature_zero_is_greedy(kind, rule):
    """With one-hot targets every rule keeps the longest greedy path and continues greedily."""
    verifier = get_verifier(rule, allow_lossy=True)
    policy, _ = KINDS[kind]
    for world in (WORLDS["EX2"], WORLDS["EX3"], random_world(4)):
        chosen = [draft for _, draft in enumerate_drafts(world, policy)][:60]
        batch, rows = pack(world, chosen), one_hot_rows(world, chosen)
        verdicts = verifier.verify(batch, TargetRows(rows), keyed(len(chosen)))
        best = rows.argmax(dim=1).numpy()
        for row, draft in enumerate(chosen):
            node, path = 0, []
            while True:
                token = best[batch.offsets[row] + node]
                following = [child for child in draft.children_of(node) if draft.node(child).token == token]
                if not following:
                    break
                node = following[0]
                path.append(node)
            assert verdicts.next_tokens[row] == token, (rule, row)
            assert len(verdicts.accepted[row]) == len(path), (rule, row)


@pytest.mark.parametrize("rule", [name for name in verifier_names() if name != "greedy_block"])
def test_empty_drafts_are_plain_sampling(rule):
    count = 3000
    law = torch.tensor([0.5, 0.0, 0.3, 0.2])
    batch = DraftBatch.concatenate([DraftTree.pending(1)] * count)
    verdicts = get_verifier(rule, allow_lossy=True).verify(batch, TargetRows(law.repeat(count, 1)), keyed(count))
    frequencies = np.bincount(verdicts.next_tokens, minlength=4) / count
    assert verdicts.num_accepted.sum() == 0
    assert np.abs(frequencies - law.numpy()).max() < 4.5 * 0.5 / count**0.5


@pytest.mark.parametrize("rule", LOSSLESS_TREE_RULES)
def test_a_row_does_not_depend_on_its_batch_mates(rule):
    verifier, world = get_verifier(rule), WORLDS["EX2"]
    chosen = [draft for _, draft in drafts("EX2", "without replacement (2,2)")][:40:3]
    noise = keyed(len(chosen))
    together = verifier.verify(pack(world, chosen), target_rows(world, chosen), noise)
    for row, draft in enumerate(chosen):
        own = VerifierNoise(noise.seed, noise.rows[[row]], noise.steps[[row]], noise.positions[[row]])
        alone = verifier.verify(pack(world, [draft]), target_rows(world, [draft]), own)
        assert alone.accepted[0].tolist() == together.accepted[row].tolist()
        assert alone.next_tokens[0] == together.next_tokens[row]


def test_named_rules_are_checked_against_the_draft():
    sampled = pack(WORLDS["EX2"], [drafts("EX2", "without replacement (2,1)")[0][1]])
    chain = pack(WORLDS["EX2"], [drafts("EX2", "chain2")[0][1]])
    assert fitting_names(sampled) == ["traversal", "match", "coupled", "rrs", "ranked_traversal", "ot_traversal"]
    assert set(verifier_names()) - set(fitting_names(chain)) == {"greedy_block", "typical", "kl_threshold"}
    assert fitting_names(dataclasses.replace(sampled, adapted=False)) == ["match", "coupled"]
    for name in fitting_names(sampled):
        assert fitted(get_verifier(name), sampled).name == name
    with pytest.raises(ValueError, match="must get chains.*rules that fit: traversal, match, coupled, rrs, ranked_tr"):
        fitted(get_verifier("block"), sampled)
    with pytest.raises(ValueError, match="adapted=False.*rules that fit: match, coupled$"):
        fitted(get_verifier("block"), dataclasses.replace(chain, adapted=False))
    with pytest.raises(ValueError, match="changes the output distribution"):
        get_verifier("typical")
    assert get_verifier("typical", allow_lossy=True).name == "typical"


# Noise.


def test_streams_differ_and_repeat():
    batch = DraftBatch.concatenate([DraftTree.chain([0, 1, 2])] * 2)
    noise = keyed(2)
    streams = [noise.accept(batch), noise.resample(), noise.target(np.array([0, 1]), 0)]
    numbers = np.concatenate(streams)
    assert len(set(numbers.tolist())) == len(numbers)
    assert np.all((numbers >= 0) & (numbers < 1))
    assert np.array_equal(streams[0], keyed(2).accept(batch))
    assert not np.array_equal(streams[0], keyed(2, step=1).accept(batch))
    assert not np.array_equal(streams[0], keyed(2, seed=12).accept(batch))


def test_target_noise_follows_the_position():
    early, late = keyed(2, step=0), keyed(2, step=3)
    rows = np.array([1, 0])
    assert np.array_equal(early.target(rows, 3), late.target(rows, 0))
    assert np.array_equal(
        early.exponentials(rows, 3, vocabulary_size=5, device=torch.device("cpu")),
        late.exponentials(rows, 0, vocabulary_size=5, device=torch.device("cpu")),
    )


def test_device_noise_is_the_host_noise():
    noise = VerifierNoise(2**63 + 5, np.array([0, 3, 2**31]), np.zeros(3, dtype=int), np.array([7, 2**20, 2**31]))
    rows = np.arange(3)
    host = noise.exponentials(rows, 2, vocabulary_size=70, device=torch.device("cpu")).numpy()
    made = noise.device_exponentials(rows, 2, vocabulary_size=70, device=torch.device("cpu")).numpy()
    np.testing.assert_allclose(made, host, rtol=1e-15)
    keys = noise.step_keys(rows, 2)
    grid = uniforms(noise.seed, 4, noise.rows[:, None], noise.positions[:, None] + 2, np.arange(70)[None, :])
    assert np.array_equal(uniforms_on_device(keys, 70, device=torch.device("cpu")).numpy(), grid)


def test_noise_is_made_where_the_rows_lie():
    noise, meta = keyed(2), torch.device("meta")
    assert noise.exponentials(np.arange(2), 0, vocabulary_size=5, device=meta).device == meta


def test_noise_of_all_nodes_is_that_of_every_row():
    """The packed forms: after a node of depth d comes the token at positions[row] + d."""
    listed = [draft for _, draft in drafts("EX2", "without replacement (2,2)")][:7]
    batch = pack(WORLDS["EX2"], listed)
    noise = VerifierNoise(2**63 + 11, np.arange(7) * 2**29, np.arange(7), np.arange(7) * 2**27 + 3)
    drawn, keys = noise.target_at_nodes(batch), noise.keys_at_nodes(batch)
    for row in range(7):
        for node in range(batch.offsets[row], batch.offsets[row + 1]):
            depth, rows = int(batch.depths[node]), np.array([row])
            assert drawn[node] == noise.target(rows, depth)[0]
            assert int(keys[node]) % 2**64 == noise.step_keys(rows, depth)[0]


# Output equal to plain sampling: match and coupled.


def decode(rule: str, kind: str, *, rows: int, length: int, world, seed: int) -> list[list[int]]:
    """Generate with random drafts of a kind (None: without), in a tiny world; contexts are cut to 2 tokens."""
    verifier, generator = get_verifier(rule), np.random.default_rng(seed)
    histories = [[] for _ in range(rows)]
    step = 0
    while min(map(len, histories)) < length:
        chosen, laws = [], []
        for history in histories:
            listed = drafts("EX2", kind) if kind else [(1, Draft())]
            draft = listed[generator.integers(len(listed))][1]
            chosen.append(draft)
            laws += [
                [float(x) for x in world.p(tuple((history + list(draft.context(node)))[-2:]))]
                for node in range(len(draft))
            ]
        noise = VerifierNoise(
            9, np.arange(rows), np.full(rows, step), np.array([len(history) for history in histories])
        )
        batch = pack(WORLDS["EX2"], chosen)
        verdicts = verifier.verify(batch, TargetRows(torch.tensor(laws, dtype=torch.float32)), noise)
        for history, tokens in zip(histories, verdicts.gained(batch), strict=True):
            history += tokens
        step += 1
    return [history[:length] for history in histories]


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("kind", ["without replacement (2,2)", "mixed (2,2), sampled last", "with replacement (2,1)"])
def test_output_is_that_of_plain_sampling(rule, kind):
    world = random_world(8)
    plain = decode(rule, None, rows=12, length=25, world=world, seed=0)
    assert decode(rule, kind, rows=12, length=25, world=world, seed=1) == plain


@pytest.mark.parametrize(("widths", "world", "expected"), [((1, 1), "EX1", 10 / 9), ((2, 1), "EX2", 1.568857)])
def test_coupled_keeps_what_shared_noise_gives(widths, world, expected):
    """Drafts ranked by q / E with the verifier's own E; known mean, 6000 rows, fixed seed, 4.5 standard errors."""
    laws, count = WORLDS[world], 6000
    noise = keyed(count)
    size = laws.vocabulary_size
    races = [noise.exponentials(np.arange(count), depth, vocabulary_size=size, device=torch.device("cpu")).numpy()
             for depth in range(len(widths))]  # fmt: skip
    chosen = []
    for row in range(count):
        draft = Draft()
        for node in range(sum(np.cumprod(widths)) + 1):
            context = draft.context(node) if node < len(draft) else (None,) * len(widths)
            if len(context) < len(widths):
                q = [float(mass) for mass in laws.q(context)]
                keys = [mass / races[len(context)][row][token] for token, mass in enumerate(q)]
                for token in sorted(range(size), key=lambda token: -keys[token])[: widths[len(context)]]:
                    if q[token] > 0:
                        draft = draft.grown(node, token, laws.q(context))
        chosen.append(draft)
    verdicts = get_verifier("coupled").verify(pack(laws, chosen), target_rows(laws, chosen), noise)
    error = verdicts.num_accepted.std() / count**0.5
    assert verdicts.num_accepted.mean() == pytest.approx(expected, abs=4.5 * error)


# Greedy block verification over several steps.


def chains(world, context, length):
    """[(probability, tokens)] of chains drawn from the world's proposal after `context`."""
    listed = [(1.0, ())]
    for _ in range(length):
        listed = [
            (weight * float(mass), (*tokens, token))
            for weight, tokens in listed
            for token, mass in enumerate(world.q((*context, *tokens)))
            if mass > 0
        ]
    return listed


def chain_draft(world, context, tokens):
    size = world.vocabulary_size
    laws = [[0.0] * size] + [[float(x) for x in world.q((*context, *tokens[:depth]))] for depth in range(len(tokens))]
    support = np.tile(np.arange(size, dtype=np.int32), (len(tokens) + 1, 1))
    return DraftTree(
        token_ids=np.array([0, *tokens], dtype=np.int32),
        parents=np.arange(-1, len(tokens), dtype=np.int32),
        support_ids=support,
        law=np.array(laws),
    )


def decoded_law(world, *, length: int, gamma: int, carry_debts: bool) -> dict:
    """Exact law of the first `length` tokens under repeated greedy block verification."""
    open_states, done = {((), ()): 1.0}, Counter()
    while open_states:
        (context, debts), mass = open_states.popitem()
        if len(context) >= length:
            done[context[:length]] += mass
            continue
        for share, tokens, owed in greedy_block_step(world, context, debts, gamma):
            owed = tuple(Debt(round(debt.ratio, 12), debt.positions) for debt in owed) if carry_debts else ()
            state = ((*context, *tokens), owed)
            open_states[state] = open_states.get(state, 0.0) + mass * share
    return done


def greedy_block_step(world, context, debts, gamma):
    """(probability, tokens gained, debts owed) of one step after `context`: all its drafts, in one batch."""
    listed = chains(world, context, gamma)
    drafts = [chain_draft(world, context, tokens) for _, tokens in listed]
    contexts = [(*context, *tokens[:depth]) for _, tokens in listed for depth in range(gamma + 1)]
    laws = [[float(x) for x in world.p(reached)] for reached in contexts]
    rows = torch.tensor(laws, dtype=torch.float64)
    ledgers = [pay(draft, part, debts) for draft, part in zip(drafts, rows.split(gamma + 1), strict=True)]
    batch, target = DraftBatch.concatenate(drafts), TargetRows(rows)
    thresholds, masses, scales = get_verifier("greedy_block").thresholds(batch, target)
    next_laws = full_laws(batch, target, mass=masses, scale=scales)
    for row, ((weight, tokens), ledger) in enumerate(zip(listed, ledgers, strict=True)):
        reach = weight
        for node in range(gamma, -1, -1):
            place = batch.offsets[row] + node
            for token, share in enumerate(next_laws[place]):
                if share > 0 and reach * thresholds[place] > 0:
                    yield reach * thresholds[place] * share, (*tokens[:node], token), ledger.after(node, token)
            reach *= 1 - thresholds[place]


@pytest.mark.parametrize(
    ("gamma", "length", "size", "seed"),
    [(2, 4, 2, 1), (2, 4, 3, 1), (3, 3, 2, 5), (3, 4, 2, 2), (3, 4, 2, 7), (3, 4, 3, 1), (3, 4, 3, 4), (4, 4, 2, 1)],
)
def test_greedy_block_is_lossless_over_steps(gamma, length, size, seed):
    """Up to three steps that pay: at gamma 3 a debt of two positions alters two laws, by its ratio at each."""
    world = dense_world(seed, size=size, depth=length + gamma - 1)
    truth = {(): 1.0}
    for _ in range(length):
        truth = {
            (*context, token): mass * float(share)
            for context, mass in truth.items()
            for token, share in enumerate(world.p(context))
        }

    def distance(law):
        return sum(abs(mass - law[context]) for context, mass in truth.items()) / 2

    assert distance(decoded_law(world, length=length, gamma=gamma, carry_debts=True)) < 1e-12
    assert distance(decoded_law(world, length=length, gamma=gamma, carry_debts=False)) > 1e-3


def test_greedy_block_asks_for_its_debts():
    verifier, law = get_verifier("greedy_block"), torch.tensor([[0.2, 0.8]])
    batch = DraftBatch.concatenate([DraftTree.chain([0, 1, 1])])
    with pytest.raises(ValueError, match="one tuple of debts per row, got None; pass TargetRows"):
        verifier.verify(batch, TargetRows(law.repeat(3, 1)), keyed(1))
    with pytest.raises(ValueError, match="owes 3 positions must get a draft at least as deep, got depth 2"):
        verifier.verify(batch, TargetRows(law.repeat(3, 1), debts=[(Debt(1.5, 3),)]), keyed(1))
    verdicts = verifier.verify(batch, TargetRows(law.repeat(3, 1), debts=[()]), keyed(1))
    assert len(verdicts.debts) == 1


def test_greedy_block_owes_as_long_as_its_draft_was_deep():
    """No debt on an empty draft; one as deep as the draft is paid; what is paid off is not handed on."""
    verifier, law = get_verifier("greedy_block"), torch.tensor([[0.2, 0.8]])
    empty = DraftBatch.concatenate([DraftTree.pending(1)])
    assert verifier.verify(empty, TargetRows(law, debts=[()]), keyed(1)).debts == [()]
    batch = DraftBatch.concatenate([DraftTree.chain([0, 1, 1])])
    target = TargetRows(law.repeat(3, 1), debts=[(Debt(1.5, 2),)])
    for seed in range(30):
        verdicts = verifier.verify(batch, target, keyed(1, seed=seed))
        left = 2 - verdicts.num_accepted[0] - 1
        assert all(debt.positions == left > 0 for debt in verdicts.debts[0])


def test_greedy_block_hands_no_paid_debt_on():
    """A debt of one position, and a token after it that the drafter could have proposed."""
    verifier, both = get_verifier("greedy_block"), np.tile(np.array([0, 1], np.int32), (3, 1))
    draft = DraftTree(np.zeros(3, np.int32), np.arange(-1, 2, dtype=np.int32), both, np.full((3, 2), 0.5))
    target = TargetRows(torch.tensor([[0.2, 0.8]]).repeat(3, 1), debts=[(Debt(1.5, 1),)])
    lengths = set()
    for seed in range(30):
        verdicts = verifier.verify(DraftBatch.concatenate([draft]), target, keyed(1, seed=seed))
        lengths.add(int(verdicts.num_accepted[0]))
        assert all(debt.positions > 0 for debt in verdicts.debts[0])
    assert 0 in lengths


def test_greedy_block_owes_nothing_for_a_token_that_was_never_proposed():
    """Its ratio would be infinite, and (R p - q)+ the law itself."""
    verifier, laws = get_verifier("greedy_block"), torch.tensor([[0.0, 0.5, 0.5]]).repeat(3, 1)
    batch = DraftBatch.concatenate([DraftTree.chain([2, 0, 0])])  # token 0 cannot come: another does, and q has none
    verdicts = verifier.verify(batch, TargetRows(laws, debts=[(Debt(1.5, 2),)]), keyed(1))
    assert verdicts.num_accepted[0] == 0 and verdicts.debts[0] == ()


def test_greedy_block_survives_ratios_without_bound():
    """A chain of tokens that the target is sure of and the drafter all but ruled out."""
    depth, tiny = 10, 1e-38
    support = np.tile(np.array([0, 1], np.int32), (depth + 1, 1))
    law = np.tile(np.array([tiny, 1.0]), (depth + 1, 1))
    draft = DraftTree(np.zeros(depth + 1, np.int32), np.arange(-1, depth, dtype=np.int32), support, law)
    batch, target = DraftBatch.concatenate([draft]), TargetRows(torch.tensor([[1.0, 0.0]]).repeat(depth + 1, 1))
    thresholds, mass, scale = get_verifier("greedy_block").thresholds(batch, target)
    assert np.isfinite(mass).all() and np.isfinite(scale).all()
    np.testing.assert_array_equal(thresholds, 1.0)


@pytest.mark.parametrize("rule", ["greedy_block", "block"])
def test_what_lies_outside_the_support_counts(rule):
    """h of inner nodes against sums over the whole vocabulary (Sun et al., equation 5 and Algorithm 4)."""
    generator = np.random.default_rng(12)
    for _ in range(20):
        p = generator.dirichlet(np.ones(6), 4)
        tokens, q, support = np.zeros(4, np.int32), np.zeros((4, 6)), np.full((4, 3), -1, np.int32)
        for depth in range(3):
            support[depth] = generator.permutation(6)[:3]
            q[depth, support[depth]] = generator.dirichlet(np.ones(3))
            tokens[depth + 1] = generator.choice(support[depth])
        law = np.vstack([np.zeros(3), *(q[depth, support[depth]] for depth in range(3))])
        draft = DraftTree(tokens, np.arange(-1, 3, dtype=np.int32), support, law)
        batch, target = DraftBatch.concatenate([draft]), TargetRows(torch.from_numpy(p))
        thresholds, _, _ = get_verifier(rule).thresholds(batch, target)
        ratio = 1.0
        for node in (1, 2):
            ratio *= p[node - 1, tokens[node]] / q[node - 1, tokens[node]]
            ratio = ratio if rule == "greedy_block" else min(1.0, ratio)
            rest = np.maximum(ratio * p[node] - q[node], 0).sum()
            missing = np.maximum(q[node] - ratio * p[node], 0).sum()
            if rule == "greedy_block":
                expected = min(1.0, rest / missing) if missing > 0 else 1.0
            else:
                expected = rest / (rest + 1 - ratio)
            assert thresholds[node] == pytest.approx(expected)


def test_greedy_block_serves_every_row_as_if_it_were_alone():
    verifier, world, debts = get_verifier("greedy_block"), WORLDS["EX2"], [(), (Debt(1.4, 1),), (Debt(0.7, 2),)]
    chosen = [draft for _, draft in drafts("EX2", "chain2")][:9:4]
    rows, noise = target_rows(world, chosen).rows(np.arange(9)), keyed(3)
    together = verifier.verify(pack(world, chosen), TargetRows(rows, debts=debts), noise)
    for row, draft in enumerate(chosen):
        own = VerifierNoise(noise.seed, noise.rows[[row]], noise.steps[[row]], noise.positions[[row]])
        target = TargetRows(target_rows(world, [draft]).rows(np.arange(3)), debts=[debts[row]])
        alone = verifier.verify(pack(world, [draft]), target, own)
        assert alone.accepted[0].tolist() == together.accepted[row].tolist()
        assert alone.next_tokens[0] == together.next_tokens[row] and alone.debts[0] == together.debts[row]


def test_greedy_block_keeps_the_known_mean():
    world, listed = WORLDS["EX2"], drafts("EX2", "chain2")
    report = production_report(world, listed, get_verifier("greedy_block"))
    assert report.expected == pytest.approx(199 / 144)
    assert report.distance == pytest.approx(1 / 72)  # one step alone, before its debt is paid


def test_a_rule_may_compute_in_single_precision():
    """Its masses are not what the compiled draw takes; the array form draws the same tokens."""

    class Single(type(get_verifier("block"))):
        def thresholds(self, batch, target, dtype=np.float64):
            return super().thresholds(batch, target, np.float32)

    chosen = [draft for _, draft in drafts("EX2", "chain2")]
    batch, target = pack(WORLDS["EX2"], chosen), target_rows(WORLDS["EX2"], chosen)
    noise = keyed(len(chosen))
    single, double = Single().verify(batch, target, noise), get_verifier("block").verify(batch, target, noise)
    assert single.next_tokens.tolist() == double.next_tokens.tolist()


# Lossy rules do what they say.


def test_typical_keeps_plausible_tokens():
    law = torch.tensor([[0.7, 0.2, 0.1, 0.0]])
    entropy = -(law[law > 0] * law[law > 0].log()).sum().item()
    draft = DraftTree.chain([0, 1, 0, 2])
    batch = DraftBatch.concatenate([draft])
    bar = 0.3 * np.exp(-entropy)
    assert 0.09 < bar < 0.2
    verifier = get_verifier("typical", allow_lossy=True)
    verdicts = verifier.verify(batch, TargetRows(law.repeat(4, 1)), keyed(1))
    assert verdicts.num_accepted.tolist() == [3]  # 0.1 > epsilon = 0.09, the smaller of the two bars
    strict = type(verifier)(epsilon=0.15, delta=0.3).verify(batch, TargetRows(law.repeat(4, 1)), keyed(1))
    assert strict.num_accepted.tolist() == [2]
    flat = torch.full((1, 4), 0.25)  # entropy log 4: the bar is at most 0.99 / 4
    rows = torch.cat([flat, law, law, law])
    for epsilon, kept in ((0.3, 2), (0.07, 3)):
        verdicts = type(verifier)(epsilon=epsilon, delta=0.99).verify(batch, TargetRows(rows), keyed(1))
        assert verdicts.num_accepted.tolist() == [kept], epsilon
    quarters = TargetRows(torch.full((4, 4), 0.25))  # the bar itself is not passed
    assert type(verifier)(epsilon=0.25, delta=9.0).verify(batch, quarters, keyed(1)).num_accepted.tolist() == [0]
    with pytest.raises(ValueError, match="epsilon must be in"):
        type(verifier)(epsilon=0.0)
    with pytest.raises(ValueError, match="delta positive"):
        type(verifier)(delta=0.0)


def test_kl_threshold_compares_laws():
    verifier = get_verifier("kl_threshold", allow_lossy=True)
    draft = DraftTree(
        token_ids=np.array([0, 1, 0], dtype=np.int32),
        parents=np.array([-1, 0, 1], dtype=np.int32),
        support_ids=np.array([[0, 1], [0, 1], [-1, -1]], dtype=np.int32),
        law=np.array([[0, 0], [0.5, 0.5], [0.9, 0.1]], dtype=np.float32),
    )
    batch = DraftBatch.concatenate([draft])
    rows = torch.tensor([[0.4, 0.6], [0.5, 0.5], [0.5, 0.5]])
    first = 0.5 * np.log(0.5 / 0.4) + 0.5 * np.log(0.5 / 0.6)
    second = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    for limit, kept in ((first * 0.99, 0), (first * 1.01, 1), (second * 0.99, 1), (second * 1.01, 2)):
        verdicts = type(verifier)(limit=limit).verify(batch, TargetRows(rows), keyed(1))
        assert verdicts.num_accepted.tolist() == [kept]
    certain = DraftBatch.concatenate([DraftTree.chain([0, 1])])  # KL = -log p(1), log 2 to the last bit
    halves = TargetRows(torch.full((2, 2), 0.5, dtype=torch.float64))
    assert type(verifier)(limit=float(np.log(2.0))).verify(certain, halves, keyed(1)).num_accepted.tolist() == [1]
    impossible = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    assert type(verifier)(limit=100.0).verify(batch, TargetRows(impossible), keyed(1)).num_accepted.tolist() == [0]
    with pytest.raises(ValueError, match="limit must be positive"):
        type(verifier)(limit=0.0)


def test_the_longest_passing_path_is_taken():
    """Two branches pass: the deeper one counts, of equal ones the first."""
    law = torch.full((6, 3), 1 / 3)
    shape = np.array([-1, 0, 0, 2, 1, 3], dtype=np.int32)
    tokens = np.array([0, 0, 1, 0, 1, 2], dtype=np.int32)
    support = np.tile(np.arange(3, dtype=np.int32), (6, 1))
    laws = np.eye(3, dtype=np.float32)[tokens]
    batch = DraftBatch.concatenate([DraftTree(tokens, shape, support, laws)])
    verdicts = get_verifier("typical", allow_lossy=True).verify(batch, TargetRows(law), keyed(1))
    assert verdicts.accepted[0].tolist() == [2, 3, 5]
    shallow = DraftBatch.concatenate([DraftTree(tokens[:5], shape[:5], support[:5], laws[:5])])
    verdicts = get_verifier("typical", allow_lossy=True).verify(shallow, TargetRows(law[:5]), keyed(1))
    assert verdicts.accepted[0].tolist() == [1, 4]
