"""Numbers of scopes for problems that are known by a key."""

from __future__ import annotations

from collections.abc import Hashable

from stand.numbered_keys import NumberedKeys
from stand.trees.lookups import MAX_SCOPE

TEXTS = MAX_SCOPE  # the scope of texts that are no problem, such as corpora


class Scopes(NumberedKeys):
    """Problems are numbered as they come; after 254 the numbers begin again."""

    def __init__(self) -> None:
        super().__init__(most=4096)

    def of(self, key: Hashable) -> int:
        """The scope of a problem, in [0, 254)."""
        return super().of(key) % TEXTS
