"""Processes that name one folder learn from each other, while they run."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from hashlib import blake2b
from multiprocessing.util import Finalize
from pathlib import Path

from stand.seeds import call_seed
from stand.sharing.news import News, news_of
from stand.sharing.own_files import FILE_NAME, MOST_RECORD, SUFFIX, OwnFiles, machine_word
from stand.sharing.peer_file import PeerFile
from stand.trees import BlendedLookup
from stand.trees.fork_safety import lock_at_forks
from stand.trees.locked_files import remove_abandoned
from stand.trees.lookups import MAX_SCOPE

LOGGER = logging.getLogger("stand")
PAUSE = 1.0  # seconds between two looks for new files
MOST_LEARNED = 2048  # after so many nodes or tokens no further piece of news is begun: some milliseconds


class Exchange:
    """A lookup's place in a folder: it tells what the lookup learns here, and teaches it what others learn.

    Every process appends to files of its own and reads those of the others, so none waits for another. Files go with
    their process; those of one that was killed go when the next one comes. Of a file at most its last part is read.

    What another process drew may shape this one's drafts. So the random numbers that samples are drawn with here must
    not be those of another process. Calls of this project's engine take numbers of their own (`start_call`); a fork
    takes part from its next call on. Serving engines draw theirs from a seed: `numbers`, in [1, 2**64), names them, and
    news of a process that has the same ones is refused. 0: from `start_call`.

    vocabulary_size: news with other ids is refused. Nothing that happens to files ends a call. What is damaged or
    refused is read no further, and a process that cannot write tells nothing more; the log of `stand` has a warning.

    Raises ValueError where the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike, lookup: BlendedLookup, *, vocabulary_size: int, numbers: int = 0):
        self.folder = checked_folder(folder)
        self.lookup = lookup
        self.vocabulary_size, self.numbers = vocabulary_size, numbers
        self.num_sent = self.num_received = 0  # nodes and tokens
        self._turn = threading.RLock()  # again where a signal's handler forks
        self._peers: deque[PeerFile] = deque()
        self._known: set[str] = set()  # names of others' files that are read, or not to be read
        self._next_look = 0.0
        self._num_taught = 0  # calls that learn
        self._join()
        lock_at_forks(self, uses_lookups=True)

    @property
    def num_peers(self) -> int:
        """Files of others that are read now; a process has one or two."""
        return len(self._peers)

    def __str__(self) -> str:
        return (
            f"shared in {self.folder}: {self.num_sent} nodes and tokens told, {self.num_received} learned of others, "
            f"{self.num_peers} files open"
        )

    def start_call(self, start: int, *, learns: bool) -> int:
        """The number of a call, from the lookup's `start` and this process's own number: no other process has it, and
        no other call that learns. `start` alone begins anew where the lookup is cleared, while others remember.
        """
        with self._turn:
            if os.getpid() != self._process:
                self._follow_fork()
            self._num_taught += learns
            return call_seed(call_seed(start, self._num_taught), self._own_number)

    def send(self, news: News) -> None:
        """Tell the others."""
        if news.num_learned == 0:
            return
        data = news.to_bytes()
        with self._turn:
            if self._own is None or os.getpid() != self._process:
                return
            if len(data) > MOST_RECORD:
                LOGGER.warning("STAND: a step's news of %d bytes is too long to be told", len(data))
                return
            try:
                self._own.write(data)
                self.num_sent += news.num_learned
            except OSError as error:
                self._fall_silent(error)

    def receive(self) -> None:
        """Teach the lookup what others have told since."""
        with self._turn:
            if os.getpid() != self._process:
                return
            if time.monotonic() >= self._next_look:
                self._look_for_files()
            num_learned = 0
            for _ in range(len(self._peers)):
                if num_learned >= MOST_LEARNED:
                    return  # who was not asked is first in line
                peer = self._peers[0]  # it stays where this is interrupted
                is_over, was_full = peer.is_removed, peer.is_full  # of a removed one the rest came too long ago
                try:
                    num_learned += self._learn_from(peer, MOST_LEARNED - num_learned)
                except (OSError, ValueError) as error:
                    is_over = True
                    _warn_of(peer.path, error)
                if peer.is_full and not was_full:
                    self._next_look = 0.0
                self._peers.rotate(-1)
                if is_over:
                    self._peers.pop().close()

    def _lock(self) -> None:
        self._turn.acquire()

    def _unlock(self) -> None:
        self._turn.release()

    def _join(self) -> None:
        self._process, self._own_number = os.getpid(), secrets.randbits(63)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            ours = (path for path in self.folder.glob(f"{machine_word()}-*") if FILE_NAME.fullmatch(path.name))
            remove_abandoned(path for path in ours if path.is_file())
            self._own: OwnFiles | None = OwnFiles(self.folder, self.lookup.fingerprint, self.numbers)
        except OSError as error:
            raise ValueError(
                f"share must name a folder that can be written to, got {self.folder} ({error.strerror}); name another"
            ) from error
        Finalize(self, _finish, (self._own, self._process), exitpriority=0)

    def _follow_fork(self) -> None:
        """Take a place of the fork's own. Its lookup has learned what its parent had told when it was forked."""
        if self._own is not None:
            newest, size = self._own.paths[-1], self._own.size
            self._known |= self._own.names
            self._own.abandon()
            with contextlib.suppress(OSError, ValueError):  # the parent may have ended
                self._peers.append(PeerFile(newest, start=size))
        try:
            self._join()
        except ValueError as error:
            self._own = None
            LOGGER.warning("STAND: a fork tells nothing: %s", error)

    def _look_for_files(self) -> None:
        self._next_look = time.monotonic() + PAUSE
        if self._own is not None and not all(path.exists() for path in self._own.paths):
            self._fall_silent("a file of this process was removed")
        own = set() if self._own is None else self._own.names
        try:
            found = {path.name for path in self.folder.glob(f"*{SUFFIX}") if FILE_NAME.fullmatch(path.name)} - own
        except OSError:  # too many files are open, say
            return
        for name in sorted(found - self._known):
            try:
                self._peers.append(self._opened(name))
            except FileNotFoundError:  # its process has ended meanwhile
                continue
            except (PermissionError, ValueError) as error:
                _warn_of(self.folder / name, error)
            except OSError:
                found.remove(name)  # to be tried again
        self._known = found
        for peer in self._peers:
            peer.is_removed = peer.path.name not in found

    def _opened(self, name: str) -> PeerFile:
        """Raises OSError, and ValueError where nothing may be learned of this file."""
        peer = PeerFile(self.folder / name)
        theirs, ours = peer.fingerprint, self.lookup.fingerprint
        if theirs and ours and theirs != ours:
            raise ValueError(
                f"a folder must be of one tokenizer (vocabulary {ours.hex()[:12]}), got {theirs.hex()[:12]}; give "
                "every model a folder of its own, and every engine the tokenizer"
            )
        if self.numbers and peer.numbers == self.numbers:
            raise ValueError(
                f"servers that share must draw other random numbers, got those of this one ({self.numbers:016x}); "
                "start every server with a seed of its own"
            )
        return peer

    def _fall_silent(self, reason: object) -> None:
        self._known |= self._own.names  # where they cannot be removed
        self._own.close()
        self._own = None
        LOGGER.warning("STAND: this process tells nothing more in %s: %s; start it again to share", self.folder, reason)

    def _learn_from(self, peer: PeerFile, room: int) -> int:
        """Learn from one peer until `room` is filled, the last piece of news as a whole. Returns how many nodes and
        tokens were learned."""
        num_learned = 0
        for data in peer.records():
            news = news_of(data)
            if news.largest_id >= self.vocabulary_size:
                raise ValueError(
                    f"tokens must be in [0, {self.vocabulary_size}), got {news.largest_id}; give every model a folder "
                    "of its own"
                )
            news.teach(self.lookup, scope=MAX_SCOPE)
            self.num_received += news.num_learned
            num_learned += news.num_learned
            if num_learned >= room:
                break
        return num_learned


_PLACES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of lookups: their exchanges by folder


def exchange_of(folder: str | os.PathLike, lookup: BlendedLookup, **settings: int) -> Exchange:
    """The lookup's place in a folder: the one that it has, or a new one. In two places it would learn all twice."""
    places = _PLACES.setdefault(lookup, weakref.WeakValueDictionary())
    path = checked_folder(folder)
    exchange = places.get(path)
    if exchange is None:
        exchange = places[path] = Exchange(path, lookup, **settings)
    return exchange


def checked_folder(folder: object) -> Path:
    """The folder as an absolute path, since a harness may change the working folder. Raises ValueError where it is no
    path."""
    path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else ""
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"share must be the path of a folder, got {folder!r}; leave it out to share nothing")
    return Path(path).absolute()


def numbers_of(seed: int | None, index: int = 0) -> int:
    """A name in [1, 2**64) of the random numbers that torch draws from a seed; 0 for None, where nobody has set one.

    index: of a process, where an engine mixes that in."""
    if seed is None:
        return 0
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little") | 1


def _finish(own: OwnFiles, process: int) -> None:
    if os.getpid() == process:
        own.close()


def _warn_of(path: Path, error: Exception) -> None:
    LOGGER.warning("STAND: nothing more is learned from %s: %s; the others are still read", path, error)
