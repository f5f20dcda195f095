"""Processes that name one folder learn from each other, while they run."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from hashlib import blake2b
from multiprocessing.util import Finalize
from pathlib import Path

from stand.seeds import call_seed
from stand.sharing.news import News, news_of
from stand.sharing.own_files import FILE_NAME, MOST_RECORD, SUFFIX, OwnFiles, machine_word
from stand.sharing.peer_file import PeerFile
from stand.trees import BlendedLookup
from stand.trees.blended.lookup import MAX_SCOPE
from stand.trees.fork_safety import lock_at_forks
from stand.trees.locked_files import remove_abandoned

LOGGER = logging.getLogger("stand")
PAUSE = 1.0  # seconds between two looks for new files
MOST_LEARNED = 2048  # after so many nodes or tokens no further piece of news is begun: some milliseconds


class Exchange:
    """A lookup's place in a folder: it tells what the lookup learns here, and teaches it what others learn.

    Every process appends to files of its own and reads those of the others, so none waits for another. Files go with
    their process; those of one that was killed go when the next one comes. Of a file at most the last megabyte is read.

    What another process drew may shape this one's drafts. So the random numbers that samples are drawn with here must
    not be those of another process. Calls of this project's engine take numbers of their own (`start_call`). Serving
    engines draw theirs from a seed: `numbers`, in [1, 2**64), names them, and news of a process that has the same ones
    is refused. 0: from `start_call`.

    Nothing that happens to files ends a call. A file that is damaged, or of another vocabulary, is read no further, and
    a process that cannot write tells nothing more; the log of `stand` has a warning.

    Raises ValueError where the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike, lookup: BlendedLookup, *, numbers: int = 0):
        self.folder = checked_folder(folder)
        self.numbers = numbers
        self.num_sent = self.num_received = 0  # nodes and tokens
        self.lookup = lookup
        self._turn = threading.Lock()
        self._peers: deque[PeerFile] = deque()
        self._known: set[str] = set()  # names of others' files that are read, or not to be read
        self._next_look = 0.0
        self._num_taught = 0  # calls that learn
        self._join()
        lock_at_forks(self)

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
            self._follow_fork()
            self._num_taught += learns
            return call_seed(call_seed(start, self._num_taught), self._own_number)

    def send(self, news: News) -> None:
        """Tell the others."""
        if news.num_learned == 0:
            return
        data = news.to_bytes()
        with self._turn:
            self._follow_fork()
            if self._own is None or len(data) > MOST_RECORD:
                return
            try:
                self._own.write(data)
                self.num_sent += news.num_learned
            except OSError as error:
                self._fall_silent(error)

    def receive(self) -> None:
        """Teach the lookup what others have told since."""
        with self._turn:
            self._follow_fork()
            if time.monotonic() >= self._next_look:
                self._look_for_files()
            num_learned = 0
            for _ in range(len(self._peers)):
                if num_learned >= MOST_LEARNED:
                    return  # who was not asked is first in line
                peer = self._peers.popleft()
                try:
                    num_learned += self._learn_from(peer, MOST_LEARNED - num_learned)
                    if peer.is_removed:  # what is left of it, if anything, came too long ago
                        peer.close()
                    else:
                        self._peers.append(peer)
                except (OSError, ValueError) as error:
                    peer.close()
                    _warn_of(peer.path, error)

    def _lock(self) -> None:
        self._turn.acquire()

    def _unlock(self) -> None:
        self._turn.release()

    def _join(self) -> None:
        self._process, self._own_number = os.getpid(), secrets.randbits(63)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            word = machine_word()
            remove_abandoned(path for path in self.folder.glob(f"{word}*") if FILE_NAME.fullmatch(path.name))
            self._own: OwnFiles | None = OwnFiles(self.folder, self.lookup.fingerprint, self.numbers)
        except OSError as error:
            raise ValueError(
                f"share must name a folder that can be written to, got {self.folder} ({error.strerror}); name another"
            ) from error
        Finalize(self, _finish, (self._own, self._process), exitpriority=0)

    def _follow_fork(self) -> None:
        """A fork has a place of its own: it must not write to its parent's files, nor use its numbers."""
        if os.getpid() != self._process:
            if self._own is not None:
                self._own.abandon()
            self._join()

    def _look_for_files(self) -> None:
        self._next_look = time.monotonic() + PAUSE
        found = {path.name for path in self.folder.glob(f"*{SUFFIX}") if FILE_NAME.fullmatch(path.name)}
        own = set() if self._own is None else self._own.names
        if not own <= found:
            self._fall_silent("a file of this process was removed")
        found -= own
        for name in sorted(found - self._known):
            try:
                peer = PeerFile(self.folder / name)
                self._check(peer)
                self._peers.append(peer)
            except FileNotFoundError:  # its process has ended meanwhile
                continue
            except (OSError, ValueError) as error:
                _warn_of(self.folder / name, error)
        self._known = found
        for peer in self._peers:
            peer.is_removed = peer.path.name not in found

    def _fall_silent(self, reason: object) -> None:
        self._own.close()
        self._own = None
        LOGGER.warning("STAND: this process tells nothing more in %s: %s; start it again to share", self.folder, reason)

    def _check(self, peer: PeerFile) -> None:
        """Raise ValueError where nothing may be learned of a peer."""
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

    def _learn_from(self, peer: PeerFile, room: int) -> int:
        """Learn from one peer until `room` is filled, the last piece of news as a whole. Returns how many nodes and
        tokens were learned."""
        num_learned = 0
        for data in peer.records():
            news = news_of(data)
            news.teach(self.lookup, scope=MAX_SCOPE)
            self.num_received += news.num_learned
            num_learned += news.num_learned
            if num_learned >= room:
                break
        return num_learned


def checked_folder(folder: object) -> Path:
    """The folder as an absolute path, since a harness may change the working folder. Raises ValueError where it is no
    path."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder) or "\0" in str(folder):
        raise ValueError(f"share must be the path of a folder, got {folder!r}; leave it out to share nothing")
    return Path(folder).absolute()


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
