"""What is swapped in a model, and the verdicts of its trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stand.fusion.forwards.attention import AttentionSettings
from stand.fusion.forwards.experts import ExpertForm
from stand.fusion.forwards.layer import PARTS
from stand.fusion.forwards.router import RouterForm


@dataclass(frozen=True, slots=True)
class Swap:
    """Modules of one class that shared a verdict.

    max_error: largest difference relative to the largest value of its row; None where nothing was tried.
    reason: why the swap was not kept, empty where it was.
    """

    kind: str
    module_class: str
    count: int
    is_kept: bool
    max_error: float | None
    reason: str = ""

    def __str__(self) -> str:
        verdict = "kept" if self.is_kept else f"left alone: {self.reason}"
        error = "" if self.max_error is None else f", error {self.max_error:.1e}"
        return f"{self.kind}, {self.count} x {self.module_class}{error}, {verdict}"


@dataclass
class Recipe:
    """What is swapped, by module name: all that is needed to build the same forwards for a model of the same shape."""

    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # owner: names of its parts
    norms: dict[str, int] = field(default_factory=dict)  # rule
    gated_norms: dict[str, int] = field(default_factory=dict)  # order
    delta_layers: dict[str, float] = field(default_factory=dict)  # scale of rates
    mlps: dict[str, int] = field(default_factory=dict)  # activation
    experts: dict[str, ExpertForm] = field(default_factory=dict)
    routers: dict[str, RouterForm] = field(default_factory=dict)
    attentions: dict[str, AttentionSettings] = field(default_factory=dict)
    layers: dict[str, str | None] = field(default_factory=dict)  # the norm behind the layer, by name
    latent_rotations: list[str] = field(default_factory=list)
    singles: list[str] = field(default_factory=list)  # linear layers that are not merged and have a chosen product

    def of_layer(self, layer: str, name: str, is_like: Callable[[str, str], bool]) -> Recipe:
        """What is swapped in `layer`, for one that is called `name`: where `is_like(module, its counterpart)`."""

        def moved(swaps: dict[str, object]) -> dict:
            names = {old: name + old.removeprefix(layer) for old in swaps if f"{old}.".startswith(f"{layer}.")}
            return {new: swaps[old] for old, new in names.items() if is_like(old, new)}

        norms = moved(self.norms)
        layers = dict.fromkeys(moved(self.layers)) if f"{name}.{PARTS[1]}" in norms else {}  # no norm behind
        gated, delta = moved(self.gated_norms), moved(self.delta_layers)
        latent = list(moved(dict.fromkeys(self.latent_rotations)))
        blocks = moved(self.mlps), moved(self.experts), moved(self.routers), moved(self.attentions)
        return Recipe(moved(self.merged), norms, gated, delta, *blocks, layers, latent)
