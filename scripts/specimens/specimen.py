"""A kernel with argument types: what ahead-of-time compilation needs to check it without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Specimen:
    """One specialisation of a Triton kernel as it is launched in practice.

    `signature` maps every run-time argument to a Triton type ("*bf16", "i32", ...; "i32:16" promises a multiple of 16),
    `constants` the constexpr ones to their values.
    """

    name: str
    kernel: Any  # triton.JITFunction
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
