"""Changes of layers with a recurrent state, and of what a model stores, that leave the behaviour as it is."""

from __future__ import annotations

_ONE_INPUT = "inputs = several[0] if len(several) == 1 else torch.cat(several, dim=1)"
_GROUP = 'weight, group = self.module.weight, getattr(self.module, "group_size", hidden_states.shape[-1])'

OF_RECURRENT: dict[tuple[str | int, ...], str] = {
    ("stand/fusion/delta_layer.py", _ONE_INPUT, "1 -> 0 #2"): "one tensor is copied",
    ("stand/fusion/gated_norm.py", _GROUP, "drop USub"): "states have two dimensions",
    ("stand/gpu/kernel_scan.py", "kept = RecurrentStates(1)", "1 -> 0"): "nobody asks a chain for its number of rows",
    ("stand/forward/key_shape.py", "_STATES[model] = cache.recurrent.like(0)", "0 -> 1"): "only shapes are read",
}
