"""Keys and their numbers, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class NumberedKeys:
    """Keys are numbered as they come. The latest `most` are remembered; one that comes again after so many others has a
    new number, which no other key has."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()  # the latest key last
        self._num_given = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._numbers

    def of(self, key: Hashable) -> int:
        if key not in self._numbers:
            self._numbers[key] = self._num_given
            self._num_given += 1
            if len(self._numbers) > self._most:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(key)
        return self._numbers[key]
