"""Verification inside a captured step keeps and draws what the rules of `stand.verifiers` do."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from drafted_cases import agreeing_case
from exact import EX2, EX3, pack, shaped, with_replacement
from page_tables import one_page_each
from random_drafts import random_drafts
from verdicts import blank_verdict

from stand.gpu.device_rule import CoupledRule, GreedyRule, MatchRule, TraversalRule
from stand.gpu.packets.step_packet import StepPacket
from stand.gpu.packets.step_size import StepSize
from stand.gpu.packets.work_list import Splitting, Tiling
from stand.step_compiled import kept_paths
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import TargetRows, VerifierNoise, get_verifier
from stand.verifiers.schedule import packed_parents

RULES = {"match": MatchRule, "coupled": CoupledRule, "traversal": TraversalRule}
CPU = torch.device("cpu")


def keyed(num_rows, seed=5):
    rows = np.arange(num_rows)
    return VerifierNoise(seed=seed, rows=rows + 3, steps=rows + 1, positions=rows * 7 + 11)


def decide(rule, batch, probs, noise, *, spare_rows=2, spare_tokens=True, support_size=16):
    """(accepted paths, next tokens) by the device rule on a padded packet."""
    lengths = np.arange(len(batch), dtype=np.int64) + 20
    count = batch.num_nodes + (3 if spare_tokens else 0)
    size = StepSize(count, len(batch) + spare_rows, (Tiling(8, Splitting(1)),), (128,), support_size)
    table = one_page_each(len(batch) + spare_rows)
    packet = StepPacket(size, CPU, table=table, more=rule.fields(size))
    packet.fill(batch, lengths, np.arange(len(batch), dtype=np.int64), table)
    rule.fill(packet.host, batch, noise)
    packet.upload()
    padded = torch.full((count, probs.shape[1]), 1.0 / probs.shape[1], dtype=probs.dtype)
    padded[: batch.num_nodes] = probs
    verdict = blank_verdict(packet.size.num_rows, 64 * packet.size.num_words)
    rule.decide(padded, padded, packet.device, verdict)
    assert (verdict.path[len(batch) :] == -1).all() and not verdict.is_broken.any()
    kept = [row[row >= 0].tolist() for row in verdict.path[: len(batch)]]
    paths = [path.tolist() for path in kept_paths(verdict.stops[: len(batch)].numpy(), batch.parents, batch.offsets)]
    assert kept == paths  # the stops say the same
    return kept, verdict.next_tokens[: len(batch)].tolist()


def expect(name, batch, probs, noise):
    verdicts = get_verifier(name).verify(batch, TargetRows(probs), noise)
    return [path.tolist() for path in verdicts.accepted], verdicts.next_tokens.tolist()


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("name", RULES)
def test_verdicts_equal_the_rules(name, kind):
    depths = []
    for seed in range(3):
        batch, probs, _ = agreeing_case(seed, kind)
        favoured = batch.ranks == 0
        favoured[batch.offsets[:-1]] = False
        probs[packed_parents(batch)[favoured], batch.token_ids[favoured]] += 1.0
        probs /= probs.sum(1, keepdim=True)
        noise = keyed(len(batch), seed)
        kept, tokens = decide(RULES[name](), batch, probs.float(), noise)
        assert (kept, tokens) == expect(name, batch, probs.float(), noise)
        depths += [len(path) for path in kept]
    assert sum(depths) > 5  # the cases decide something


@pytest.mark.parametrize("name", ["match", "coupled"])
def test_equal_siblings_are_followed_as_on_the_host(name):
    for world in (EX2, EX3):
        batch = pack(world, random_drafts(world, shaped(with_replacement, 3, 2), 12))
        size = int(batch.support_ids.max()) + 1
        probs = torch.tensor(np.random.default_rng(1).dirichlet(np.ones(size), batch.num_nodes), dtype=torch.float64)
        noise = keyed(len(batch))
        assert decide(RULES[name](), batch, probs, noise) == expect(name, batch, probs, noise)


def test_greedy_follows_the_best_tokens_lowest_id_first():
    batch = DraftBatch.concatenate([DraftTree.chain([9, 4, 2, 7])])
    scores = torch.zeros(4, 12)
    scores[0, [4, 6]] = 3.0  # a tie: 4 wins
    scores[1, 2] = 1.0
    scores[2, 11] = 1.0  # not 7
    assert decide(GreedyRule(), batch, scores, keyed(1)) == ([[1, 2]], [11])


def test_a_shifted_draw_is_noticed():
    """Control: the packet's noise matters, so equality above is not by chance."""
    batch, probs, _ = agreeing_case(0, "sampled")
    for name in RULES:
        outcomes = {str(decide(RULES[name](), batch, probs.float(), keyed(len(batch), seed))) for seed in range(2)}
        assert len(outcomes) == 2


def test_noise_of_all_nodes_equals_the_level_wise_one():
    batch, probs, _ = agreeing_case(1, "sampled")
    noise = keyed(len(batch))
    row_of = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))
    expected = [noise.target(np.array([row]), int(depth))[0] for row, depth in zip(row_of, batch.depths, strict=True)]
    keys = [noise.step_keys(np.array([row]), int(depth))[0] for row, depth in zip(row_of, batch.depths, strict=True)]
    assert noise.target_at_nodes(batch).tolist() == expected
    assert noise.keys_at_nodes(batch).view(np.uint64).tolist() == keys


def test_a_wide_law_takes_a_wide_packet():
    ids = np.arange(17, dtype=np.int32)[None].repeat(2, axis=0)
    law = np.zeros((2, 17), dtype=np.float32)
    law[1] = np.arange(1, 18) / np.arange(1, 18).sum()
    tree = DraftTree(np.array([0, 16], dtype=np.int32), np.array([-1, 0], dtype=np.int32), ids, law)
    batch, probs = DraftBatch.concatenate([tree]), torch.full((2, 20), 0.05)
    rule = RULES["traversal"]()
    assert rule.support_size(17) == 32 and RULES["match"]().support_size(17) == 16
    kept = set()
    for seed in range(20):
        found = decide(rule, batch, probs, keyed(1, seed), support_size=32)
        assert found == expect("traversal", batch, probs, keyed(1, seed))
        kept.add(len(found[0][0]))
    assert kept == {0, 1}
    with pytest.raises(ValueError, match="at most 64 candidates, got 65"):
        rule.support_size(65)
    with pytest.raises(ValueError, match="must fit the packet, got one for 16"):
        decide(rule, batch, probs, keyed(1))
