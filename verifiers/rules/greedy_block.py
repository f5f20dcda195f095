"""Greedy block verification: keeps more than block verification now, and pays by following another law for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from stand.trees import DraftBatch, DraftTree
from stand.verifiers.noise import VerifierNoise
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import Debt, RowDebts, TargetRows
from stand.verifiers.verifier import ThresholdVerifier, Verdicts
from stand.verifiers.walk import first_in_post_order

LARGEST_RATIO = {np.dtype(np.float64): 1e100, np.dtype(np.float32): 1e30}


class GreedyBlockVerifier(ThresholdVerifier):
    """Sun et al. (arXiv 2403.10444 Algorithms 4 to 6):

        R_0 = 1;  tau = 0
        for i = 1 .. gamma:
            R_i = R_{i-1} p(X_i | X^{i-1}) / q(X_i | X^{i-1})                                        not capped
            h_i = min(1, sum_x (R_i p - q)+ / sum_x (q - R_i p)+) for i < gamma, min(1, R_gamma) for i = gamma
            if u_i < h_i: tau = i
        y ~ p if tau = gamma, else (R_tau p - q)+ normalised
        positions tau + 2 .. gamma then follow (R p - q)+ normalised, R continued along the tokens that came out

    Without that last line it is lossy. The modification is a debt (`Verdicts.debts`), to be handed to the next step's
    `TargetRows`; it needs q along the next draft, so the drafter must be one fixed function of the context and
    the next draft at least as deep as the debt. Debts nest: a later one alters the law that the earlier ones left.
    """

    name = "greedy_block"
    requires = Requirements(chain=True, carries_debts=True)
    walk = first_in_post_order

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        """See `ThresholdVerifier.thresholds`; `target` holds the laws after debts."""
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_depth_and_rank(batch))
        module, largest = operands.module, LARGEST_RATIO[np.dtype(dtype)]
        prefix, missing = operands.ones(), operands.ones()  # R_i; sum (q - R p)+
        mass = operands.fresh_mass()
        for depth in range(len(operands.schedule.levels)):
            for children, parents in operands.steps(depth):
                reached = prefix[parents] * operands.token_mass(operands.target, children)
                divisor = module.where(operands.token_law[children] > 0, operands.token_law[children], math.inf)
                prefix[children] = (reached / divisor).clip(max=largest)
                owed = prefix[parents][:, None] * operands.target[parents]
                mass[parents] = (owed - operands.law[children]).clip(min=0.0)
                missing[parents] = (operands.law[children] - owed).clip(min=0.0).sum(axis=1)
        rest = mass.sum(axis=1) + prefix * operands.tail
        ratio = module.where(missing > 0, operands.ratio(rest, missing), 1.0)
        threshold = module.where(operands.leaves, prefix.clip(max=1.0), ratio)
        threshold[operands.roots] = 1.0
        return threshold, mass, module.where(operands.leaves, 1.0, prefix)

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        """See `Verifier.verify`; `target.debts` must be given, and the answer's `debts` handed on."""
        if target.debts is None or len(target.debts) != len(batch):
            raise ValueError(
                f"verifier {self.name!r} must get one tuple of debts per row, got {target.debts}; pass "
                "TargetRows(probs, debts=...) with the last Verdicts.debts, or use verifier 'block'"
            )
        self.check_draft(batch)
        target.check(batch)
        rows = target.rows(np.arange(batch.num_nodes)).double()
        ledgers = [
            pay(batch[row], rows[batch.offsets[row] : batch.offsets[row + 1]], debts)
            for row, debts in enumerate(target.debts)
        ]
        verdicts = super().verify(batch, TargetRows(rows), noise)
        debts = [
            ledger.after(len(path), token)
            for ledger, path, token in zip(ledgers, verdicts.accepted, verdicts.next_tokens.tolist(), strict=True)
        ]
        return Verdicts(accepted=verdicts.accepted, next_tokens=verdicts.next_tokens, debts=debts)


@dataclass(frozen=True, slots=True)
class Ledger:
    """One row's chain of N nodes: what each debt has come to there. The last debt is this step's own."""

    positions: list[int]  # per debt: it alters the laws of nodes below this
    ratios: list[list[float]]  # [N][debts] R at the node
    bases: list[list[np.ndarray]]  # [N][debts] [V]: the law that the debt's ratio multiplies there
    proposals: list[np.ndarray]  # [N - 1] [V]: q of the node's child

    def after(self, num_accepted: int, token: int) -> RowDebts:
        """What the row owes once its first `num_accepted` drafted tokens and `token` came out."""
        debts = []
        for index, positions in enumerate(self.positions):
            left = positions - num_accepted - 1
            if left > 0 and self.proposals[num_accepted][token] > 0:  # else R is infinite: (R p - q)+ is p again
                step = self.bases[num_accepted][index][token] / self.proposals[num_accepted][token]
                debts.append(Debt(float(self.ratios[num_accepted][index] * step), left))
        return tuple(debts)


def pay(draft: DraftTree, rows: torch.Tensor, debts: RowDebts) -> Ledger:
    """Alter one row's laws [N, V] float64 in place, by each debt in turn."""
    depth = draft.num_nodes - 1
    deepest = max((debt.positions for debt in debts), default=0)
    if deepest > depth:
        raise ValueError(
            f"a row that owes {deepest} positions must get a draft at least as deep, got depth {depth}; "
            "draft as many tokens as before"
        )
    ledger = Ledger(positions=[debt.positions for debt in debts] + [depth], ratios=[], bases=[], proposals=[])
    ratios = [debt.ratio for debt in debts] + [1.0]
    for node in range(draft.num_nodes):
        law = rows[node].cpu().numpy().copy()  # bases outlive what is written to `rows` below
        bases = [law]
        proposal = _proposal(draft, node, len(law))
        for debt, ratio in zip(debts, ratios[:-1], strict=True):
            if debt.positions > node:
                excess = np.maximum(ratio * law - proposal, 0.0)
                law = excess / excess.sum() if excess.any() else law  # all 0: R <= 1, the law never leads here
            bases.append(law)
        rows[node] = torch.from_numpy(law)
        ledger.ratios.append(ratios)
        ledger.bases.append(bases)
        if node < depth:
            ledger.proposals.append(proposal)
            token = draft.token_ids[node + 1]
            ratios = [ratio * base[token] / proposal[token] for ratio, base in zip(ratios, bases, strict=True)]
    return ledger


def _proposal(draft: DraftTree, node: int, vocabulary_size: int) -> np.ndarray:
    """[V] float64: the law of the node's child; zeros at the end of the chain."""
    law = np.zeros(vocabulary_size)
    if node + 1 < draft.num_nodes:
        real = draft.support_ids[node] >= 0
        law[draft.support_ids[node][real]] = draft.law[node + 1][real]
    return law
