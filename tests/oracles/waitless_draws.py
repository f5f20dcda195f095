"""Residual draws that never wait for the device: what the kernels of a captured step must do."""

import torch

from stand.verifiers.draw import erase, residuals_at, tokens_at


def draw_residuals_at(
    rows: torch.Tensor, support_ids: torch.Tensor, mass: torch.Tensor, scale: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """`stand.verifiers.draw.draw_residuals` without a wait for the device; rows are left erased."""
    from_law, _ = tokens_at(rows, uniforms)
    cells, _ = erase(rows, support_ids.to(torch.int64))
    tokens, weights = residuals_at(rows, cells, mass.double(), scale.double(), uniforms)
    return torch.where(weights > 0, tokens, from_law)
