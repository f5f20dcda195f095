"""Saved lookups: what is written is read, and nothing else is."""

import errno
import fcntl
import hashlib
import os
import stat
import struct
import subprocess
import sys
import threading

import msgpack
import numpy as np
import pytest

from stand.trees import BlendedLookup, LookupFileError, LookupTree, TreeShape, vocabulary_fingerprint
from stand.trees.checked_file import CHECKSUM_BYTES, PREFIX
from stand.trees.longest_match.file import FORMAT_VERSION, MAGIC

FINGERPRINT = vocabulary_fingerprint({"a": 0, "b": 1})


def taught(num_tokens=60, **parameters):
    rng = np.random.default_rng(0)
    lookup = LookupTree(**({"orders": (1, 3), "num_candidates": 4, "fingerprint": FINGERPRINT} | parameters))
    tokens = rng.integers(0, 9, num_tokens)
    top_ids = np.array([rng.permutation(9)[:5] for _ in tokens], np.int32)
    top_probs = rng.dirichlet(np.ones(5), num_tokens).astype(np.float32)
    lookup.learn([], tokens, top_ids=top_ids, top_probs=top_probs)
    return lookup


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.lookup"
    taught().save(path)
    return path


def drafts(lookup):
    histories = [np.array([3, token], np.int32) for token in range(9)]
    return lookup.draft(histories, TreeShape.paper(), seed=1, rows=np.arange(9), steps=np.arange(9))


@pytest.mark.parametrize("lookup", [taught(), LookupTree(), taught(min_rate=0.0, orders=(2,), num_candidates=10)])
def test_round_trip(tmp_path, lookup):
    path = tmp_path / "run.lookup"
    lookup.save(path=path)
    again = LookupTree.load(path=path)
    for name in ("orders", "num_candidates", "min_rate", "fingerprint"):
        assert getattr(again, name) == getattr(lookup, name)
    assert len(again) == len(lookup)
    first, second = drafts(lookup), drafts(again)
    assert np.array_equal(first.token_ids, second.token_ids) and np.array_equal(first.law, second.law)
    again.save(tmp_path / "again.lookup")
    assert (tmp_path / "again.lookup").read_bytes() == path.read_bytes()


def test_a_loaded_lookup_learns_on(saved):
    lookup, again = taught(), LookupTree.load(saved)
    for one in (lookup, again):
        one.learn([1], [2, 3, 4, 5, 6])
    assert len(lookup) == len(again)
    assert np.array_equal(drafts(lookup).token_ids, drafts(again).token_ids)


def test_fingerprint_must_match_where_asked_for(saved):
    assert len(LookupTree.load(saved, fingerprint=FINGERPRINT)) == len(taught())
    other = vocabulary_fingerprint({"a": 1, "b": 0})
    with pytest.raises(LookupFileError, match=f"vocabulary.*{other.hex()}.*{FINGERPRINT.hex()}"):
        LookupTree.load(saved, fingerprint=other)


def test_fingerprints_tell_vocabularies_apart():
    base = {"a": 0, "b": 1, "\ud800": 2}
    assert len(FINGERPRINT) == 16
    assert vocabulary_fingerprint(base) == vocabulary_fingerprint(dict(reversed(base.items())))
    others = [{"a": 0, "b": 1}, base | {"c": 3}, base | {"a": 1, "b": 0}, {"a0": 0, "b": 1}, {"a": 0, "b1": 1}]
    assert len({vocabulary_fingerprint(vocabulary) for vocabulary in [base, *others]}) == 6
    with pytest.raises(ValueError, match="token_to_id"):
        vocabulary_fingerprint({})


def test_any_truncation_is_refused(saved):
    data = saved.read_bytes()
    for length in [*range(0, 120), *range(120, len(data), 97), len(data) - 1]:
        saved.write_bytes(data[:length])
        with pytest.raises(LookupFileError):
            LookupTree.load(saved)
    saved.write_bytes(data + b"\0")
    with pytest.raises(LookupFileError, match="bytes"):
        LookupTree.load(saved)


def test_any_flipped_bit_is_refused(saved):
    data = saved.read_bytes()
    rng = np.random.default_rng(1)
    positions = [*range(8 * 120), *rng.integers(0, 8 * len(data), 1500).tolist()]
    for bit in positions:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        saved.write_bytes(damaged)
        with pytest.raises(LookupFileError):
            LookupTree.load(saved)


def test_random_bytes_are_refused(tmp_path):
    rng = np.random.default_rng(2)
    path = tmp_path / "noise.lookup"
    for size in range(0, 300, 7):
        for start in (b"", MAGIC, PREFIX.pack(MAGIC, FORMAT_VERSION, 40)):
            path.write_bytes(start + rng.bytes(size))
            with pytest.raises(LookupFileError):
                LookupTree.load(path)


@pytest.mark.parametrize("kind", [BlendedLookup, LookupTree])
def test_a_subclass_loads_one_of_its_own(tmp_path, kind):
    own = type("Own", (kind,), {})
    kind().save(tmp_path / "x.lookup")
    assert type(own.load(tmp_path / "x.lookup")) is own and type(kind.load(tmp_path / "x.lookup")) is kind


@pytest.mark.parametrize(("saved", "loaded"), [(BlendedLookup, LookupTree), (LookupTree, BlendedLookup)])
def test_a_file_of_the_other_kind_is_named(tmp_path, saved, loaded):
    saved().save(tmp_path / "x.lookup")
    message = f"must hold a {loaded.__name__}, got a {saved.__name__}; load it with {saved.__name__}.load"
    with pytest.raises(LookupFileError, match=message):
        loaded.load(tmp_path / "x.lookup")


@pytest.mark.parametrize(
    ("magic", "version", "message"), [(b"PK\3\4abcd", 1, "start with"), (MAGIC, 2, "version 1, got 2")]
)
def test_other_files_and_newer_versions_are_named(saved, magic, version, message):
    _, _, header_size = PREFIX.unpack(saved.read_bytes()[: PREFIX.size])
    saved.write_bytes(PREFIX.pack(magic, version, header_size) + saved.read_bytes()[PREFIX.size :])
    with pytest.raises(LookupFileError, match=message):
        LookupTree.load(saved)


def forged(path, changes=None, tables=b""):
    """A file with a right checksum, whatever it holds."""
    header = {"orders": [1], "row_size": 2, "min_rate": 0.1, "fingerprint": b"", "num_contexts": [0]}
    packed = msgpack.packb(header | (changes or {}))
    body = PREFIX.pack(MAGIC, FORMAT_VERSION, len(packed)) + packed + tables
    path.write_bytes(body + hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest())


@pytest.mark.parametrize(
    "changes",
    [
        {"orders": [0]},
        {"orders": [17]},
        {"orders": []},
        {"orders": [2, 1], "num_contexts": [0, 0]},
        {"orders": [True]},
        {"orders": "1"},
        {"row_size": 0},
        {"row_size": 10**6},
        {"row_size": 2.0},
        {"min_rate": 7.0},
        {"min_rate": float("nan")},
        {"min_rate": "0.1"},
        {"fingerprint": "text"},
        {"num_contexts": [-1]},
        {"num_contexts": [2**40]},
        {"num_contexts": [2**31]},
        {"num_contexts": [1, 1]},
        {"surplus": 1},
    ],
)
def test_hostile_headers_are_refused_without_allocating(tmp_path, changes):
    path = tmp_path / "forged.lookup"
    forged(path)
    assert len(LookupTree.load(path)) == 0
    forged(path, changes)
    with pytest.raises(LookupFileError):
        LookupTree.load(path)


def table(keys, counts, ids, probs):
    return struct.pack(f"<{len(keys)}i{len(counts)}I{len(ids)}i{len(probs)}f", *keys, *counts, *ids, *probs)


SOUND = {"keys": [5, 6], "counts": [1, 2], "ids": [3, 4, 3, -1], "probs": [0.5, 0.5, 1.0, 0.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"keys": [5, 5]},
        {"keys": [5, -6]},
        {"counts": [1, 0]},
        {"ids": [3, 3, 3, -1]},
        {"ids": [-1, 4, 3, -1]},
        {"ids": [3, -2, 3, -1]},
        {"probs": [0.4, 0.5, 1.0, 0.0]},
        {"probs": [0.5, 0.5, 1.0, 0.5]},
        {"probs": [0.5, -0.5, 1.0, 0.0]},
        {"probs": [0.5, 0.0, 1.0, 0.0]},
        {"probs": [float("nan"), 0.5, 1.0, 0.0]},
        {"probs": [float("inf"), 0.5, 1.0, 0.0]},
    ],
)
def test_hostile_contexts_are_refused(tmp_path, change):
    path = tmp_path / "forged.lookup"
    forged(path, {"num_contexts": [2]}, table(**SOUND))
    assert len(LookupTree.load(path)) == 2
    forged(path, {"num_contexts": [2]}, table(**(SOUND | change)))
    with pytest.raises(LookupFileError, match="sound contexts"):
        LookupTree.load(path)


def test_deeply_nested_headers_are_refused(tmp_path):
    path = tmp_path / "nested.lookup"
    path.write_bytes(PREFIX.pack(MAGIC, FORMAT_VERSION, 4000) + b"\x91" * 4000 + bytes(CHECKSUM_BYTES))
    with pytest.raises(LookupFileError, match="header"):
        LookupTree.load(path)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    before = saved.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        taught(num_tokens=200).save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks_take_saves(saved, monkeypatch, number):
    def fail(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    larger = taught(num_tokens=200)
    larger.save(saved)
    assert len(LookupTree.load(saved)) == len(larger)
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("make", [BlendedLookup, LookupTree])
@pytest.mark.parametrize("fingerprint", ["abc", 7, bytes(65)])
def test_a_fingerprint_that_is_none_is_not_the_files_fault(tmp_path, make, fingerprint):
    make().save(tmp_path / "run.lookup")
    with pytest.raises(ValueError, match="fingerprint must") as raised:
        make.load(tmp_path / "run.lookup", fingerprint=fingerprint)
    assert not isinstance(raised.value, LookupFileError)


@pytest.mark.parametrize("max_bytes", [1000, 2**40, 1e9 + 0.5, "1GB"])
def test_a_cap_that_no_lookup_may_have_is_not_the_files_fault(tmp_path, max_bytes):
    BlendedLookup().save(tmp_path / "run.lookup")
    with pytest.raises(ValueError, match="max_bytes must") as raised:
        BlendedLookup.load(tmp_path / "run.lookup", max_bytes=max_bytes)
    assert not isinstance(raised.value, LookupFileError)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        LookupTree.load(tmp_path / "missing.lookup")
    with pytest.raises(FileNotFoundError):
        taught().save(tmp_path / "missing" / "run.lookup")


def test_a_save_goes_through_symbolic_links(saved, tmp_path):
    link = tmp_path / "links" / "latest.lookup"
    link.parent.mkdir()
    link.symlink_to(saved)
    larger = taught(num_tokens=200)
    larger.save(link)
    assert link.is_symlink() and not saved.is_symlink() and len(LookupTree.load(saved)) == len(larger)
    assert os.listdir(link.parent) == [link.name]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_an_existing_file_keeps_its_mode(saved, mode):
    saved.chmod(mode)
    taught(num_tokens=200).save(saved)
    assert saved.stat().st_mode & 0o777 == mode


SAVE_SLOWLY = """
import os, sys, time
from stand.trees import LookupTree
real = os.fsync
def wait(descriptor):
    print("writing", flush=True)
    time.sleep(60)
os.fsync = wait
LookupTree().save(sys.argv[1])
"""


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(saved):
    other = saved.with_name(".else.lookup.0123abcd.tmp")
    other.touch()
    writers = [
        subprocess.Popen([sys.executable, "-c", SAVE_SLOWLY, saved], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        assert [writer.stdout.readline() for writer in writers] == ["writing\n"] * 2
        left = set(os.listdir(saved.parent)) - {saved.name, other.name}
        writers[0].kill()
        writers[0].wait()
        taught().save(saved)
        kept = set(os.listdir(saved.parent)) - {saved.name, other.name}
        assert len(left) == 2 and len(kept) == 1 and kept < left and other.exists()
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


@pytest.mark.parametrize("name", ["l" * 255, "é" * 124 + ".lookup"])
def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path, name, monkeypatch):
    """It is cut between two characters: macOS refuses a name that ends within one."""
    assert len(name.encode()) == 255
    path, replace, unfinished = tmp_path / name, os.replace, []
    monkeypatch.setattr(os, "replace", lambda fresh, target: (unfinished.append(fresh.name), replace(fresh, target)))
    abandoned = tmp_path / f".{name.encode()[:241].decode(errors='ignore')}.0123abcd.tmp"
    abandoned.touch()
    taught().save(path)
    assert os.listdir(tmp_path) == [name]
    assert len(unfinished) == 1 and len(unfinished[0].encode()) in (254, 255)
    LookupTree.load(path)


def full_lookup(max_bytes=1 << 20):
    """One that gives contexts' memory to others."""
    lookup = BlendedLookup(max_bytes=max_bytes)
    lookup.learn([], np.random.default_rng(0).integers(0, 3000, 120_000))
    assert lookup.num_evicted > 10_000
    return lookup


def test_files_written_while_a_full_lookup_learns_are_read(tmp_path):
    """Contexts go while they are copied, and others that get their memory are copied later. Doors name the cap anew."""
    lookup, is_over = full_lookup(), threading.Event()

    def teach():
        while not is_over.is_set():
            lookup.learn([], np.random.default_rng(1).integers(0, 3000, 3000))

    teacher = threading.Thread(target=teach)
    teacher.start()
    try:
        for number in range(20):
            lookup.save(tmp_path / "busy.lookup")
            loaded = BlendedLookup.load(tmp_path / "busy.lookup", max_bytes=lookup.max_bytes if number % 2 else None)
            loaded.check()
            # How much is learned while a file is written is up to the threads: its roots are of two states or more.
            num_contexts = read_header(tmp_path / "busy.lookup")["num_contexts"]
            assert num_contexts > 0.9 * len(lookup), number
            assert len(loaded) > 0.95 * min(num_contexts, len(lookup)) and loaded.nbytes <= loaded.max_bytes, number
    finally:
        is_over.set()
        teacher.join()


def read_header(path):
    content = path.read_bytes()
    _, _, header_size = PREFIX.unpack(content[: PREFIX.size])
    return msgpack.unpackb(content[PREFIX.size : PREFIX.size + header_size])


def claim_cap(path, other, max_bytes):
    """The same file, as if it had been saved with this cap."""
    content = path.read_bytes()
    magic, version, header_size = PREFIX.unpack(content[: PREFIX.size])
    end = PREFIX.size + header_size
    header = msgpack.packb({**read_header(path), "max_bytes": max_bytes})
    body = PREFIX.pack(magic, version, len(header)) + header + content[end:-CHECKSUM_BYTES]
    other.write_bytes(body + hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest())


def test_contexts_beyond_the_files_own_cap_are_left_out_and_beyond_another_refused(tmp_path):
    large = full_lookup(1 << 22)
    large.save(tmp_path / "large.lookup")
    claim_cap(tmp_path / "large.lookup", tmp_path / "small.lookup", 1 << 20)
    loaded = BlendedLookup.load(tmp_path / "small.lookup")
    loaded.check()
    assert 0.1 * len(large) < len(loaded) < 0.6 * len(large) and loaded.nbytes <= 1 << 20
    for token in range(0, 3000, 100):
        if len(loaded.predict([token])[0]):
            assert set(loaded.predict([token])[0]) <= set(large.predict([token], limit=3000)[0])
    with pytest.raises(LookupFileError, match="must fit into max_bytes=1048576, got more"):
        BlendedLookup.load(tmp_path / "large.lookup", max_bytes=1 << 20)


@pytest.mark.parametrize("kind", [BlendedLookup, LookupTree])
def test_only_files_are_replaced(tmp_path, kind):
    """A device or a pipe that is replaced by a file is gone for all who use it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ValueError, match="path must name a file, or nothing yet"):
            kind().save(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"] and stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_numbers_are_no_paths():
    with pytest.raises(TypeError, match="PathLike"):
        BlendedLookup.load(0)


@pytest.mark.parametrize("far", [256, 511, 70_000, 100_000_000])
def test_ids_far_apart_are_written(far, tmp_path):
    """Of the pages between them none is there."""
    lookup = BlendedLookup()
    lookup.learn([], [5, 6, far, 7, far + 300, 8])
    lookup.check()
    lookup.save(tmp_path / "a.lookup")
    loaded = BlendedLookup.load(tmp_path / "a.lookup")
    assert len(loaded) == len(lookup)
    for context, token in ((6, far), (far, 7), (7, far + 300), (far + 300, 8)):
        assert loaded.predict([context])[0][:1].tolist() == [token]


@pytest.mark.parametrize("kind", [LookupTree, BlendedLookup])
def test_a_file_that_is_cut_off_is_damaged(tmp_path, kind):
    path = tmp_path / "cut"
    kind().save(path=path)
    content = path.read_bytes()
    for size in (8, 15, 16, 40):
        path.write_bytes(content[:size])
        with pytest.raises(LookupFileError, match=rf"must have at least \d+ bytes, got {size}; the file is damaged"):
            kind.load(path)
