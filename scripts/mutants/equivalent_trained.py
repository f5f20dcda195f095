"""Changes of trained drafters that leave every draft as it is: by file, (line, change) and why."""

from __future__ import annotations

_LAYERS = "self.layers = nn.ModuleList([type(decoder.layers[0])(self.config, layer_idx=0)])"
_CHUNK = "end = min(start + PROMPT_CHUNK, length - 1)"
_ONE_MORE = "one pair more is computed, whose keys the next run overwrites"

OF_TRAINED: dict[str, dict[tuple[str | int, ...], str]] = {
    "eagle/head.py": {
        (_LAYERS, "0 -> 1"): "all layers of a served target are of one class",
        (_LAYERS, "0 -> 1 #2"): "a cache gives a layer's number the next place, whatever it is",
    },
    "eagle/followed_rows.py": {(_CHUNK, "Sub -> Add"): _ONE_MORE, (_CHUNK, "1 -> 0"): _ONE_MORE},
    "streams/rider.py": {
        (
            "while len(self._laws) > max(MOST_HELD, len(live.histories)):",
            "Gt -> GtE",
        ): "laws that are held for texts that may come back, one less of thousands",
    },
}
