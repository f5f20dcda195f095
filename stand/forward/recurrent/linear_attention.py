"""Linear attention over trees of tokens: what layers with a recurrent state compute, without a state per token.

A head's state is a matrix S [K, V]. After token i, whose predecessor on its path is p, it is

    S_i = exp(g_i) S_p + k_i u_i'        and the token's output is S_i' q_i

with a log decay g <= 0 and an update u, which the rules below define. Put in for S_p again and again, with G_i the sum
of g along the path to i and S the row's state before the tree:

    S_i' q_i = exp(G_i) S' q_i + sum over j, the ancestors of i and i itself: exp(G_i - G_j) (k_j . q_i) u_j

What lies beside the path does not occur, so siblings do not mix. Where the tree is a chain, this is the chunked form in
which libraries compute prompts.
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

    def move(self, states: torch.Tensor, ends: torch.Tensor) -> None:
        """Make `states` [A, H, K, V], contiguous, what they are once the path to token ends[a] of tree a is part of its
        row; ends int64 [A]."""
        trees = torch.arange(len(ends), device=ends.device)
        last = self.sums[trees, :, ends]  # [A, H]
        seen = self.seen[trees, :, ends]  # [A, 1, T]
        weights = _exp_where(seen, last[..., None] - self.sums)  # [A, H, T]
        states.mul_(torch.exp(last)[..., None, None])
        turned, weighted = self.keys.transpose(2, 3).flatten(0, 1), (weights[..., None] * self.updates).flatten(0, 1)
        states.view(-1, *states.shape[2:]).baddbmm_(turned, weighted)


def gated_delta_rule(
    query: torch.Tensor,  # [A, H, T, K] float32
    key: torch.Tensor,  # [A, H, T, K]
    value: torch.Tensor,  # [A, H, T, V]
    log_decay: torch.Tensor,  # [A, H, T]: g
    beta: torch.Tensor,  # [A, H, T], 0 at places without a token
    *,
    states: torch.Tensor,  # [A, H, K, V] before the trees
    seen: torch.Tensor,  # [A, 1, T, T] bool, ancestors before their descendants
) -> tuple[torch.Tensor, TreeChanges]:
    """Outputs [A, H, T, V], and what the tokens would change: u_i = beta_i (v_i - exp(g_i) S_p' k_i), arXiv 2412.06464,
    equation 10. Queries and keys are brought to unit length first, and queries scaled by K ** -0.5.

    With the sum above for S_p, u solves a triangular system.
    """
    query, key = _unit(query) * query.shape[3] ** -0.5, _unit(key)
    sums, decays = _decays(log_decay, seen)
    both = torch.cat([query, key], dim=2)  # states are large: they are read once
    of_states, of_keys = (both @ other for other in (states, key.transpose(2, 3)))
    fresh, num_tokens = torch.exp(sums)[..., None], query.shape[2]
    rest = beta[..., None] * (value - fresh * of_states[:, :, num_tokens:])
    system = beta[..., None] * (of_keys[:, :, num_tokens:] * decays)  # the diagonal is not read: it counts as 1
    updates = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    output = fresh * of_states[:, :, :num_tokens] + (of_keys[:, :, :num_tokens] * decays) @ updates
    return output, TreeChanges(key, updates, sums, seen)


def state_space(
    query: torch.Tensor,  # [A, H, T, K] float32
    key: torch.Tensor,  # [A, H, T, K]
    value: torch.Tensor,  # [A, H, T, V], 0 at places without a token
    log_decay: torch.Tensor,  # [A, H, T]: g
    *,
    states: torch.Tensor,  # [A, H, K, V] before the trees
    seen: torch.Tensor,  # [A, 1, T, T] bool, ancestors before their descendants
) -> tuple[torch.Tensor, TreeChanges]:
    """Outputs [A, H, T, V], and what the tokens would change: u_i = v_i, arXiv 2405.21060 (Mamba-2), equation 16."""
    sums, decays = _decays(log_decay, seen)
    scores = (query @ key.transpose(2, 3)) * decays
    return torch.exp(sums)[..., None] * (query @ states) + scores @ value, TreeChanges(key, value, sums, seen)


def _decays(log_decay: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """G [A, H, T], and exp(G_i - G_j) [A, H, T, T] where token i sees token j, else 0."""
    sums = (seen.to(log_decay.dtype) @ log_decay[..., None])[..., 0]
    return sums, _exp_where(seen, sums[..., :, None] - sums[..., None, :])


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + NORM_EPSILON)


def _exp_where(mask: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """exp where the mask is True, else 0: elsewhere exponents may be large."""
    return exponents.masked_fill(~mask, float("-inf")).exp()
