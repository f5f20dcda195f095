"""The gated delta rule over trees of tokens (arXiv 2412.06464, equation 10), without a state per token.

A head's state S [K, V] after token i, whose predecessor is p, is `exp(g_i) S_p + k_i u_i'`, where the token changes
`u_i = b_i (v_i - exp(g_i) S_p' k_i)`. Its output is `S_i' q_i`. Put in for S_p again and again, with G_i the sum of g
along the path to i:

    u_i = b_i (v_i - exp(G_i) S' k_i - sum over the ancestors j of i: exp(G_i - G_j) (k_j . k_i) u_j)

where S is the row's state before the tree. That is a triangular system, and the chunked form of the rule where the tree
is a chain. No ancestor of i lies beside its path, so siblings do not mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NORM_EPSILON = 1e-6  # as transformers has it


@dataclass(frozen=True, slots=True, eq=False)
class TreeChanges:
    """What A trees of T tokens would change of their rows' states; H heads."""

    keys: torch.Tensor  # [A, H, T, K]
    updates: torch.Tensor  # [A, H, T, V]: u
    sums: torch.Tensor  # [A, H, T]: G
    seen: torch.Tensor  # [A, 1, T, T] bool: token j is an ancestor of token i, or is it

    def states_after(self, states: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[A, H, K, V]: `states` once the path to token ends[a] of tree a is part of its row; ends int64 [A]."""
        trees = torch.arange(len(ends), device=ends.device)
        last = self.sums[trees, :, ends]  # [A, H]
        seen = self.seen[trees, :, ends]  # [A, 1, T]
        weights = _exp_where(seen, last[..., None] - self.sums)  # [A, H, T]
        changes = self.keys.transpose(2, 3) @ (weights[..., None] * self.updates)
        return torch.exp(last)[..., None, None] * states + changes


def tree_delta_rule(
    query: torch.Tensor,  # [A, H, T, K] float32
    key: torch.Tensor,  # [A, H, T, K]
    value: torch.Tensor,  # [A, H, T, V]
    *,
    log_decay: torch.Tensor,  # [A, H, T], not above 0: g
    beta: torch.Tensor,  # [A, H, T], 0 at places without a token
    states: torch.Tensor,  # [A, H, K, V] before the trees
    seen: torch.Tensor,  # [A, 1, T, T] bool, ancestors before their descendants
) -> tuple[torch.Tensor, TreeChanges]:
    """Outputs [A, H, T, V], and what the tokens would change. Queries and keys are brought to unit length first, and
    queries scaled by K ** -0.5."""
    query, key = _unit(query) * query.shape[3] ** -0.5, _unit(key)
    sums = (seen.to(log_decay.dtype) @ log_decay[..., None])[..., 0]
    decays = _exp_where(seen, sums[..., :, None] - sums[..., None, :])  # [A, H, T, T]
    fresh, turned = torch.exp(sums)[..., None], key.transpose(2, 3)
    rest = beta[..., None] * (value - fresh * (key @ states))
    system = beta[..., None] * ((key @ turned) * decays)  # what lies on the diagonal is not read: it counts as 1
    updates = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    output = fresh * (query @ states) + ((query @ turned) * decays) @ updates
    return output, TreeChanges(key, updates, sums, seen)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + NORM_EPSILON)


def _exp_where(mask: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """exp where the mask is True, else 0: elsewhere exponents may be large."""
    return exponents.masked_fill(~mask, float("-inf")).exp()
