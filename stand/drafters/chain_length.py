"""How long a drafted chain should be: expected tokens per step and wall-time factor from two measured numbers.

Leviathan et al. (arXiv 2211.17192): alpha is the chance that a drafted token is kept, given that all before it were; c
is the cost of one drafting step in units of one forward of the target. The formulas take alpha as the same at every
depth and a verification forward as dear as a forward of one token (true on an idle GPU, less so on a CPU).
"""

from __future__ import annotations

from dataclasses import dataclass

from stand.stats import Stats

LONGEST_GAMMA = 64


@dataclass(frozen=True, slots=True)
class ChainLength:
    """What a chain of `gamma` drafted tokens is expected to give."""

    gamma: int
    expected_tokens: float  # per step, bonus token included
    walltime_factor: float  # tokens per second against decoding without drafts


def expected_tokens(alpha: float, gamma: int) -> float:
    """(1 - alpha^(gamma + 1)) / (1 - alpha), and gamma + 1 at alpha = 1: tokens per step, bonus included (eq. 1)."""
    _check(alpha=alpha, gamma=gamma)
    return float(sum(alpha**depth for depth in range(gamma + 1)))


def walltime_factor(alpha: float, gamma: int, cost: float) -> float:
    """(1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)) (theorem 3.8)."""
    _check(alpha=alpha, gamma=gamma, cost=cost)
    return expected_tokens(alpha, gamma) / (gamma * cost + 1.0)


def best_gamma(alpha: float, cost: float, *, longest: int = LONGEST_GAMMA) -> ChainLength:
    """The chain length in 0 .. `longest` with the largest wall-time factor; of equal ones the shorter.

    0 means that drafting does not pay: it needs alpha > cost (corollary 3.9). Raises ValueError for alpha outside
    [0, 1] and for a cost that is negative or not finite.
    """
    _check(alpha=alpha, gamma=longest, cost=cost)
    gamma = max(range(longest + 1), key=lambda length: (walltime_factor(alpha, length, cost), -length))
    return ChainLength(gamma, expected_tokens(alpha, gamma), walltime_factor(alpha, gamma, cost))


def estimate_alpha(stats: Stats, gamma: int) -> float:
    """Kept / tested drafted tokens of chains of `gamma`: the maximum-likelihood alpha under token verification.

    A step tests its kept tokens and, unless all gamma were kept, one more. Steps that a length limit or an end token
    cut short count as rejections, so that short outputs make it a little too small.
    """
    _check_stats(stats, gamma)
    by_depth = stats.accepted_by_depth
    complete = int(by_depth[gamma - 1]) if len(by_depth) >= gamma else 0
    tested = stats.num_accepted_draft_tokens + stats.num_steps - complete
    return stats.num_accepted_draft_tokens / tested


def estimate_cost(stats: Stats, gamma: int) -> float:
    """Seconds of one drafting step over seconds of one verification forward, for chains of `gamma`."""
    _check_stats(stats, gamma)
    if not stats.seconds["forward"] > 0:
        raise ValueError("stats must have measured forward passes, got 0 seconds; generate something first")
    return stats.seconds["draft"] / gamma / stats.seconds["forward"]


def _check(*, alpha: float, gamma: int, cost: float = 0.0) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}; it is the share of tested tokens that are kept")
    if gamma < 0:
        raise ValueError(f"a chain must have at least 0 tokens, got {gamma}; 0 is decoding without drafts")
    if not 0.0 <= cost < float("inf"):
        raise ValueError(f"cost must be finite and not negative, got {cost}; it is a ratio of times")


def _check_stats(stats: Stats, gamma: int) -> None:
    if gamma < 1 or stats.num_steps == 0:
        raise ValueError(
            f"gamma must be at least 1 and stats hold at least one step, got {gamma} and {stats.num_steps} steps; "
            "pass the drafter's gamma and the stats of a finished generation"
        )
