"""What processes tell each other, as bytes and in files: nothing is lost on the way, and damage is seen."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from pieces_of_news import step_news, text_news

from stand.sharing import own_files, peer_file
from stand.sharing.news import NUM_BEFORE, NewsError, TextNews, news_of
from stand.sharing.own_files import MAGIC, RECORD, OwnFiles
from stand.sharing.peer_file import PeerFile
from stand.trees import BlendedLookup
from stand.trees.lookups import MAX_DEPTH


def teach_rows(news: TextNews, lookup: BlendedLookup) -> None:
    lookup.learn_rows(news.tokens, news.lengths, news.num_new, rows=news.rows, scopes=[3, 3, 3])


def saved(lookup: BlendedLookup, folder) -> bytes:
    lookup.save(folder / "lookup")
    return (folder / "lookup").read_bytes()


def taught_and_told(make, folder) -> tuple[bytes, bytes]:
    """Two lookups' files: of one that was taught, and of one that was told. Contexts of the largest depth are
    among what they hold."""
    taught, told = BlendedLookup(depth=MAX_DEPTH), BlendedLookup(depth=MAX_DEPTH)
    for seed in range(60 if make is step_news else 2000):
        news = make(seed)
        if make is step_news:
            news.teach(taught, scope=3)
        else:
            teach_rows(news, taught)
        arrived = news_of(news.to_bytes())
        assert arrived.num_learned == news.num_learned
        arrived.teach(told, scope=3)
    return saved(taught, folder), saved(told, folder)


@pytest.mark.parametrize("make", [step_news, text_news])
def test_what_arrives_teaches_what_was_sent(tmp_path, make):
    taught, told = taught_and_told(make, tmp_path)
    assert taught == told


@pytest.mark.parametrize("make", [step_news, text_news])
def test_tokens_too_few_before_the_new_ones_would_be_seen(tmp_path, monkeypatch, make):
    """The negative control of the test above."""
    monkeypatch.setattr("stand.sharing.news.NUM_BEFORE", NUM_BEFORE - 2)
    taught, told = taught_and_told(make, tmp_path)
    assert taught != told


def test_a_sent_step_is_a_sound_batch():
    news = news_of(step_news().to_bytes())
    np.testing.assert_array_equal(news.batch.sizes, [1, 6, 9])
    assert [len(before) for before in news.befores] == [0, 1, NUM_BEFORE]
    news.batch[2]


def test_laws_of_one_entry_are_laws():
    assert news_of(step_news(width=1).to_bytes()).top_ids.shape == (16, 1)


def test_texts_of_a_narrow_array_are_told():
    tokens = np.array([[1, 0, 1], [0, 1, 1]], dtype=np.int32)
    news = news_of(TextNews(tokens, np.array([3, 2]), np.array([3, 1])).to_bytes())
    assert [row[:length].tolist() for row, length in zip(news.tokens, news.lengths, strict=True)] == [[1, 0, 1], [0, 1]]
    assert news.num_new.tolist() == [3, 1] and news.num_learned == 4


def test_sizes_that_do_not_fit_are_refused():
    words = np.frombuffer(step_news().to_bytes(), dtype="<i4")
    assert words[4:7].tolist() == [0, 1, NUM_BEFORE]
    for counts in ([0, 1, NUM_BEFORE - 1], [5, -4, NUM_BEFORE], [0, 0, NUM_BEFORE + 2]):
        wrong = words.copy()
        wrong[4:7] = counts
        with pytest.raises(NewsError, match="tokens before the pending ones must be 13 in all, got ends"):
            news_of(wrong.tobytes())
    texts = np.frombuffer(text_news().to_bytes(), dtype="<i4").copy()
    texts[3] = 1
    with pytest.raises(NewsError, match="neither laws nor"):
        news_of(texts.tobytes())


@pytest.mark.parametrize("make", [step_news, text_news])
def test_bytes_that_are_cut_off_or_too_many_are_no_news(make):
    data = make().to_bytes()
    for wrong in (b"", data[:12], data[:-4], data[:-1], data + b"\0" * 4):
        with pytest.raises(NewsError, match=r"news must .*, got"):
            news_of(wrong)


@pytest.mark.parametrize("make", [step_news, text_news])
def test_changed_words_end_in_an_error_or_teach_something_sound(make):
    """Random words in random places: no crash, no other error, and a lookup that keeps its invariants."""
    random, data, lookup = np.random.default_rng(5), make().to_bytes(), BlendedLookup()
    num_refused = 0
    for _ in range(400):
        words = np.frombuffer(data, dtype="<i4").copy()
        places = random.integers(0, len(words) if random.random() < 0.5 else 40, random.integers(1, 4))
        words[places] = random.choice([-1, 0, 1, 7, 100_000, -(2**31)], len(places))
        try:
            news_of(words.tobytes()).teach(lookup, scope=0)
        except ValueError:
            num_refused += 1
    lookup.check()
    assert 50 < num_refused < 400


def records(path) -> list[bytes]:
    return [bytes(piece) for piece in PeerFile(path).records()]


def only_path(own: OwnFiles, folder):
    (path,) = own.paths
    assert path.parent == folder
    return path


@pytest.fixture
def slow_reader(tmp_path, monkeypatch):
    """A process's files, and their reader, who passes over what lies more than 100 bytes back."""
    monkeypatch.setattr(peer_file, "MOST_BEHIND", 100)
    monkeypatch.setattr(peer_file, "READ_BYTES", 64)
    own = OwnFiles(tmp_path, b"", 0)
    yield own, PeerFile(only_path(own, tmp_path))
    own.close()


def test_news_is_read_once_and_in_order(tmp_path):
    own = OwnFiles(tmp_path, b"words", 2**63 + 5)
    peer = PeerFile(only_path(own, tmp_path))
    assert (peer.fingerprint, peer.numbers) == (b"words", 2**63 + 5) and list(peer.records()) == []
    own.write(b"one")
    own.write(b"two")
    assert list(peer.records()) == [b"one", b"two"] and list(peer.records()) == []
    own.write(b"three")
    own.write(b"four")
    assert next(peer.records()) == b"three"  # what is not taken comes again
    assert list(peer.records()) == [b"four"]
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_files_are_their_users_alone(tmp_path):
    own = OwnFiles(tmp_path, b"", 0)
    assert only_path(own, tmp_path).stat().st_mode & 0o777 == 0o600
    own.close()


def test_news_that_is_taken_back_meanwhile_is_passed_over_later(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_file, "MOST_BEHIND", 100)
    monkeypatch.setattr(peer_file, "READ_BYTES", 64)
    own = OwnFiles(tmp_path, b"", 0)
    path = only_path(own, tmp_path)
    for number in range(8):
        own.write(b"%17d" % number)
    peer, fstat = PeerFile(path), os.fstat
    monkeypatch.setattr(peer_file.os, "fstat", lambda file: SimpleNamespace(st_size=fstat(file).st_size + 400))
    assert list(peer.records()) == []
    monkeypatch.undo()
    own.write(b"new")
    assert list(peer.records()) == [b"new"]
    own.close()


def test_the_longest_news_is_read_and_longer_news_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_file, "MOST_RECORD", 100)
    monkeypatch.setattr(peer_file, "READ_BYTES", 64)
    own = OwnFiles(tmp_path, b"", 0)
    peer = PeerFile(only_path(own, tmp_path))
    own.write(b"?" * 100)
    assert list(peer.records()) == [b"?" * 100]
    own.write(b"?" * 101)
    with pytest.raises(NewsError, match="at most 100 bytes, got 101;"):
        list(peer.records())
    own.close()


def test_a_piece_that_is_being_written_waits(tmp_path):
    own = OwnFiles(tmp_path, b"", 0)
    path = only_path(own, tmp_path)
    own.write(b"whole")
    whole = path.read_bytes()
    peer = PeerFile(path)
    for cut in range(len(whole) - RECORD.size - 5, len(whole)):
        path.write_bytes(whole[:cut])
        assert list(peer.records()) == []
    path.write_bytes(whole)
    assert list(peer.records()) == [b"whole"]
    own.close()


def test_damage_is_seen(tmp_path):
    own = OwnFiles(tmp_path, b"words", 0)
    path = only_path(own, tmp_path)
    own.write(b"whole")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    with pytest.raises(NewsError, match="checksum, got 0x"):
        records(path)
    path.write_bytes(whole[: -5 - RECORD.size] + b"\xff" * 8)
    with pytest.raises(NewsError, match="at most .* the file is damaged"):
        records(path)
    for header in (b"", MAGIC, b"STANDCTX" + whole[8:], MAGIC + b"\2" + whole[9:], whole[:26]):
        path.write_bytes(header)
        with pytest.raises(NewsError, match="must begin with .* use one version"):
            PeerFile(path)
    own.close()


def test_a_process_has_two_files_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(own_files, "FILE_BYTES", 100)
    own, paths = OwnFiles(tmp_path, b"", 0), []
    for number in range(20):
        own.write(b"%30d" % number)
        assert set(tmp_path.iterdir()) == set(own.paths) and len(own.paths) <= 2
        paths += [path for path in own.paths if path not in paths]
    assert len(paths) == 7 and paths == sorted(paths)  # three pieces each
    assert [piece for path in own.paths for piece in records(path)] == [b"%30d" % number for number in range(15, 20)]
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_makes_room_for_others_keeps_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(own_files, "FILE_BYTES", 100)
    own = OwnFiles(tmp_path, b"", 0)
    held = os.open(only_path(own, tmp_path), os.O_RDONLY)
    for _ in range(3):
        own.write(b"?" * 200)
    assert os.fstat(held).st_size == 0
    last = os.open(own.paths[0], os.O_RDONLY)
    own.close()
    assert os.fstat(last).st_size > 200  # of a process that ends the last words can be read
    for file in (held, last):
        os.close(file)


def test_files_that_are_closed_take_nothing(tmp_path):
    own = OwnFiles(tmp_path, b"", 0)
    own.close()
    with pytest.raises(OSError, match="closed"):
        own.write(b"news")


def test_news_that_lies_too_far_back_is_passed_over(slow_reader):
    own, peer = slow_reader
    for number in range(20):
        own.write(b"%17d" % number)  # 25 bytes with its record's sizes
    assert list(peer.records()) == [b"%17d" % number for number in range(16, 20)]


def test_news_longer_than_what_is_read_at_a_time_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_file, "READ_BYTES", 64)
    own, random = OwnFiles(tmp_path, b"", 0), np.random.default_rng(3)
    peer, pieces = PeerFile(only_path(own, tmp_path)), [random.bytes(40 * number) for number in range(9)]
    for piece in pieces:
        own.write(piece)
    assert [bytes(piece) for piece in peer.records()] == pieces
    own.close()


def test_the_last_news_is_never_passed_over(slow_reader):
    own, peer = slow_reader
    own.write(b"first")
    own.write(b"?" * 200)
    assert list(peer.records()) == [b"?" * 200]


def test_reading_may_begin_later(tmp_path):
    own = OwnFiles(tmp_path, b"", 0)
    own.write(b"before")
    path, size = only_path(own, tmp_path), own.size
    own.write(b"after")
    assert list(PeerFile(path, start=size).records()) == [b"after"]
    own.close()


def test_texts_with_ids_of_no_token_are_not_told():
    """Images in a text have ids beyond the vocabulary; what lies behind a text in an engine's array may be anything."""
    tokens = np.array([[1, 99, 3, 4], [1, 2, 3, 99], [5, 6, 7, 8]], dtype=np.int32)
    news = TextNews(tokens, np.array([4, 3, 4]), np.array([1, 1, 2]), vocabulary_size=50)
    arrived = news_of(news.to_bytes())
    assert arrived.num_new.tolist() == [0, 1, 2] and arrived.largest_id == 8
    assert arrived.tokens[1, :3].tolist() == [1, 2, 3] and step_news().largest_id == 4


def test_a_file_system_that_is_full_leaves_no_half_pieces(tmp_path, monkeypatch):
    own = OwnFiles(tmp_path, b"", 0)
    path, write = only_path(own, tmp_path), os.write
    own.write(b"first")
    monkeypatch.setattr(own_files.os, "write", lambda file, data: write(file, data[:9]))
    with pytest.raises(OSError, match="only 9 of 14 bytes"):
        own.write(b"second")
    monkeypatch.undo()
    own.write(b"third")
    assert records(path) == [b"first", b"third"]
    own.close()
