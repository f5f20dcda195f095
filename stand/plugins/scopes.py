"""Numbers of scopes for problems that are known by a key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from stand.trees.blended.lookup import MAX_SCOPE

TEXTS = MAX_SCOPE  # the scope of texts that are no problem, such as corpora


class Scopes:
    """Problems are numbered as they come; after 254 the numbers begin again. The latest keys are remembered."""

    MOST_KEYS = 4096

    def __init__(self):
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._num_given = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._numbers

    def of(self, key: Hashable) -> int:
        """The scope of a problem, in [0, 254)."""
        if key not in self._numbers:
            self._numbers[key] = self._num_given % TEXTS
            self._num_given += 1
            if len(self._numbers) > self.MOST_KEYS:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(key)
        return self._numbers[key]
