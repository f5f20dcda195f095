"""One token per row by inverse CDF, in float64, from laws that are never copied to [M, V].

Both draws sum a row in blocks and accumulate inside one block only: a row is read once, and a token of
weight zero cannot be drawn, whatever the uniform.
"""

from __future__ import annotations

import numpy as np
import torch

from stand.verifiers.doubles import where_doubles_are

BLOCK_SIZE = 256


def draw_tokens(rows: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """[B] int64: token ids drawn from weights `rows` [B, V] (not negative) with one uniform in [0, 1) per
    row.

    The token is a function of its row and its uniform alone: ids in ascending order, the first whose
    cumulated weight exceeds uniform x total.
    """
    rows = where_doubles_are(rows)
    tokens, totals = tokens_at(rows, torch.from_numpy(uniforms).to(rows.device))
    tokens = tokens.cpu().numpy()
    refuse_empty_rows(totals.cpu().numpy())
    return tokens


def draw_residuals(
    rows: torch.Tensor,
    *,
    support_ids: np.ndarray,
    mass: torch.Tensor,
    scale: torch.Tensor,
    uniforms: np.ndarray,
) -> np.ndarray:
    """[B] int64: token ids drawn from weights {mass on the support, scale x rows elsewhere}.

    rows: [B, V], a copy that is written to; support_ids: [B, S] int32, negative is padding; mass: [B, S] float;
    scale: [B] float; uniforms: [B] float64 in [0, 1). A row whose weights are all zero (they underflowed: such a
    node is where a row stops with a probability within rounding of zero) is drawn from its target law.
    """
    cells, erased = erase(rows, torch.from_numpy(support_ids).to(rows.device, torch.int64))
    points = torch.from_numpy(uniforms).to(rows.device)
    tokens, weights = residuals_at(rows, cells, mass.double(), scale.double(), points)
    tokens = tokens.cpu().numpy()
    empty = np.flatnonzero(~(weights.cpu().numpy() > 0))
    if len(empty):
        tokens[empty] = draw_tokens(rows.scatter_(1, cells, erased)[empty], uniforms[empty])
    return tokens


def tokens_at(rows: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_tokens` without a wait for the device: (token ids [B], row sums [B] float64, to be checked > 0)."""
    sums, totals = _block_sums(rows)
    return _token_at(rows, sums, uniforms * totals), totals


def residuals_at(
    rows: torch.Tensor, cells: torch.Tensor, mass: torch.Tensor, scale: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] and total weights [B] of laws whose supports were erased from `rows`."""
    sums, totals = _block_sums(rows)
    support_cdf = mass.cumsum(1)
    on_support = support_cdf[:, -1]
    weights = on_support + scale * totals
    points = _below(uniforms * weights, weights)
    columns = torch.searchsorted(support_cdf, points[:, None], right=True).clip(max=cells.shape[1] - 1)
    from_support = cells.gather(1, columns)[:, 0]
    from_rows = _token_at(rows, sums, (points - on_support) / torch.where(scale > 0, scale, 1.0))
    return torch.where(points < on_support, from_support, from_rows), weights


def erase(rows: torch.Tensor, support_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write zeros into rows [B, V] at support_ids [B, S]; returns the cells [B, S] and what stood there.

    Padding repeats a cell of its row that is erased anyway; a row of padding alone rewrites its token 0.
    """
    largest = support_ids.amax(dim=1, keepdim=True)
    cells = torch.where(support_ids < 0, largest.clip(min=0), support_ids)
    erased = rows.gather(1, cells)
    rows.scatter_(1, cells, torch.where(largest < 0, erased, 0.0))
    return cells, erased


def _block_sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block sums cumulated [B, ceil(V / BLOCK_SIZE)] and totals [B], both float64."""
    num_full = rows.shape[1] // BLOCK_SIZE
    full = rows[:, : num_full * BLOCK_SIZE].unflatten(1, (num_full, BLOCK_SIZE)).sum(2, dtype=torch.float64)
    rest = rows[:, num_full * BLOCK_SIZE :].sum(1, keepdim=True, dtype=torch.float64)
    sums = torch.cat([full, rest], dim=1).cumsum(1)
    return sums, sums[:, -1]


def _token_at(rows: torch.Tensor, sums: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """[B]: the first token whose cumulated weight exceeds points [B]."""
    points = _below(points, sums[:, -1])[:, None]
    blocks = torch.searchsorted(sums, points, right=True).clip(max=sums.shape[1] - 1)
    before = torch.where(blocks > 0, sums.gather(1, (blocks - 1).clip(min=0)), 0.0)
    ids = blocks * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=rows.device)
    inside = ids < rows.shape[1]
    ids = ids.clip(max=rows.shape[1] - 1)
    cdf = torch.where(inside, rows.gather(1, ids).double(), 0.0).cumsum(1)
    within = torch.searchsorted(cdf, _below(points - before, cdf[:, -1:]), right=True)
    return ids.gather(1, within.clip(max=BLOCK_SIZE - 1))[:, 0]


def _below(points: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Points moved below the total, to which the products and differences above may round up."""
    return torch.minimum(points, torch.nextafter(totals, torch.zeros_like(totals)))


def refuse_empty_rows(totals: np.ndarray) -> None:
    """Raise ValueError unless every target row has a weight; totals [B]: sums of rows, or their largest."""
    if not np.all(totals > 0):
        raise ValueError(
            f"every target row must have a positive sum, got {totals.min()}; look for NaN or -inf-only logits"
        )
