"""Forks while other threads use a lookup: the child gets every lookup whole and unlocked.

A fork copies only the thread that forks. A lock that another thread holds would stay locked in the child for good, and
what it guards would stay half changed. So whoever forks takes all locks first.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Lockable(Protocol):
    def _lock(self) -> None:
        """Take the lock; other Python threads run meanwhile."""

    def _unlock(self) -> None: ...


_users: weakref.WeakSet[Lockable] = weakref.WeakSet()  # whose locks are held while a lookup's is taken
_lookups: weakref.WeakSet[Lockable] = weakref.WeakSet()
_one_at_a_time = threading.RLock()  # a fork, or a new lookup; again where a signal's handler forks
_locked: list[Lockable] = []


def lock_at_forks(lookup: Lockable, *, uses_lookups: bool = False) -> None:
    """From now on every `os.fork` of this process takes the lookup's lock. While one does, new lookups wait here.

    uses_lookups: it is no lookup, but takes lookups' locks while it holds its own."""
    with _one_at_a_time:
        (_users if uses_lookups else _lookups).add(lookup)


def _lock_all() -> None:
    _one_at_a_time.acquire()
    for lookup in [*_users, *_lookups]:  # in the order in which they are taken elsewhere
        lookup._lock()
        _locked.append(lookup)


def _unlock_all() -> None:
    while _locked:
        _locked.pop()._unlock()
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock_all, after_in_parent=_unlock_all, after_in_child=_unlock_all)
