"""Processes that learn from each other: what arrives, what is left alone, and that calls keep the target's law."""

import gc
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from markov_calls import EXPECTED, SIZE, one_call
from pearson import p_value
from pieces_of_news import step_news, text_news
from tiny_models import tiny_model

import stand
from stand.seeds import call_seed
from stand.sharing import exchange as exchange_module
from stand.sharing import own_files
from stand.sharing.exchange import Exchange, numbers_of
from stand.sharing.news import TextNews
from stand.sharing.peer_file import PeerFile
from stand.trees import BlendedLookup
from stand.verifiers import get_verifier

PROMPT = [3, 5, 1, 3, 5, 1, 3, 5]


def joined(folder, *, count=2, **settings) -> list[Exchange]:
    return [Exchange(folder, BlendedLookup(**settings), vocabulary_size=50) for _ in range(count)]


def names_of(exchange: Exchange) -> set[str]:
    return exchange._own.names


def contexts(exchange: Exchange) -> int:
    return len(exchange.lookup)


@pytest.mark.parametrize("make", [step_news, text_news])
def test_what_one_is_told_all_others_learn_once(tmp_path, make):
    first, second, third = joined(tmp_path / "new" / "folder", count=3)
    news = make()
    first.send(news)
    for _ in range(2):
        for one in (first, second, third):
            one.receive()
    assert [one.num_sent for one in (first, second, third)] == [news.num_learned, 0, 0]
    assert [one.num_received for one in (first, second, third)] == [0, news.num_learned, news.num_learned]
    assert contexts(first) == 0 < contexts(second) == contexts(third)
    assert [one.num_peers for one in (first, second, third)] == [2, 2, 2]


def test_who_comes_later_learns_what_lies_there_and_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange_module, "PAUSE", 0.0)
    (first,) = joined(tmp_path, count=1)
    first.send(step_news())
    first.receive()
    (second,) = joined(tmp_path, count=1)
    second.receive()
    second.send(step_news(1))
    first.receive()
    assert first.num_received == second.num_received == step_news().num_learned


def test_files_are_looked_for_now_and_then_alone(tmp_path):
    first, second = joined(tmp_path)
    first.receive()
    (third,) = joined(tmp_path, count=1)
    third.send(step_news())
    first.receive()
    second.receive()
    assert (first.num_peers, second.num_peers) == (1, 2)


def test_news_of_one_token_is_told_and_news_of_none_is_not(tmp_path):
    first, second = joined(tmp_path)
    for num_new in (0, 1):
        first.send(TextNews(np.array([[1, 2]], dtype=np.int32), np.array([2]), np.array([num_new])))
        second.receive()
    (name,) = names_of(first)
    assert second.num_received == 1 and len(list(PeerFile(tmp_path / name).records())) == 1


def test_news_that_is_too_long_is_not_told(tmp_path, monkeypatch):
    first, second = joined(tmp_path)
    length = len(step_news().to_bytes())
    for most in (length - 1, length):
        monkeypatch.setattr(exchange_module, "MOST_RECORD", most)
        first.send(step_news())
        second.receive()
        assert second.num_received == first.num_sent == (0 if most < length else 16)


@pytest.mark.parametrize(("most", "sums"), [(32, [32, 64, 96, 96]), (33, [48, 96, 96, 96])])
def test_no_more_is_learned_at_a_time_than_pays(tmp_path, monkeypatch, most, sums):
    """Peers have told 1, 4 and 1 pieces of news, 16 nodes each."""
    monkeypatch.setattr(exchange_module, "MOST_LEARNED", most)
    *others, last = joined(tmp_path, count=4)
    for one, count in zip(sorted(others, key=lambda one: sorted(names_of(one))), (1, 4, 1), strict=True):
        for _ in range(count):
            one.send(step_news())
    received = []
    for _ in sums:
        last.receive()
        received.append(last.num_received)
    assert received == sums


def test_much_news_is_learned_in_parts_and_every_peer_has_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange_module, "MOST_LEARNED", 20)  # a step's news has 16 nodes
    first, second, third = joined(tmp_path, count=3)
    for seed in range(4):
        first.send(step_news(seed))
        second.send(step_news(seed))
    received = []
    for _ in range(5):
        third.receive()
        received.append(third.num_received)
    assert received == [32, 64, 96, 128, 128]


def test_a_process_that_ends_is_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange_module, "PAUSE", 0.0)
    first, second = joined(tmp_path)
    second.receive()
    first.send(step_news())
    del first
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    second.receive()
    assert second.num_received == 16 and second.num_peers == 0


KILLED = """
import os, signal, sys
from stand.sharing.exchange import Exchange
from stand.trees import BlendedLookup
one = Exchange(sys.argv[1], BlendedLookup(), vocabulary_size=50)
print("joined", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_files_of_processes_that_have_ended_go(tmp_path, is_killed):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "joined\n"
    (left,) = tmp_path.iterdir()
    (second,) = joined(tmp_path, count=1)
    assert left.exists()  # its process lives
    if is_killed:
        process.send_signal(signal.SIGKILL)
    process.communicate("end\n")
    assert left.exists() == is_killed
    third = Exchange(tmp_path, BlendedLookup(), vocabulary_size=50)
    assert {path.name for path in tmp_path.iterdir()} == names_of(second) | names_of(third)


def test_files_of_others_are_let_alone(tmp_path, caplog):
    ours = f"{own_files.machine_word()}-89abcdef"
    names = ("today.news", f"{ours}-00000001.news.bak", f"{ours}-000000001.news", f"{ours}-0000001.news.tmp")
    for name in names:
        (tmp_path / name).write_text("no news")
    (one,) = joined(tmp_path, count=1)
    with caplog.at_level(logging.WARNING, "stand"):
        one.receive()
    assert {path.name for path in tmp_path.iterdir()} - set(names) == names_of(one)
    assert all((tmp_path / name).exists() for name in names) and caplog.messages == []


def test_a_drafter_that_gets_another_lookup_shares_that(tmp_path):
    engine = engine_of(tmp_path)
    drafter, first = engine.drafter, engine.drafter.exchange
    stand.wrap(engine.model, drafter=drafter)
    assert drafter.exchange is first
    drafter.lookup = None
    stand.wrap(engine.model, drafter=drafter)
    assert drafter.exchange is not first and drafter.exchange.lookup is drafter.lookup


def in_a_fork(check, meanwhile=lambda: None) -> None:
    """Fails where `check` fails in a fork of this process; `meanwhile` is done here."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    meanwhile()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_has_a_place_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange_module, "PAUSE", 0.0)
    (parent,) = joined(tmp_path, count=1)
    parent.receive()
    parent.send(step_news(2))
    names, start = names_of(parent), parent.start_call(0, learns=False)
    assert parent.start_call(0, learns=False) == start
    told = os.pipe()

    def has_its_own() -> bool:
        os.read(told[0], 1)  # the parent has told more
        is_apart = parent.start_call(0, learns=False) != start and not names_of(parent) & names
        parent.send(step_news())
        parent.receive()
        held = {os.path.basename(os.path.realpath(f"/dev/fd/{number}")) for number in map(int, os.listdir("/dev/fd"))}
        is_read = not os.path.isdir("/proc/self/fd") or held & names == names
        return is_apart and is_read and parent.num_received == 16  # what came after the fork, once

    def tell_more() -> None:
        parent.send(step_news(3))
        os.write(told[1], b"!")

    parent.send(step_news(1))
    in_a_fork(has_its_own, tell_more)
    parent.receive()
    assert parent.num_received == 16 and names_of(parent) == names
    assert all((tmp_path / name).exists() for name in names)


def test_a_fork_goes_on_where_its_parent_was(tmp_path, monkeypatch):
    monkeypatch.setattr(own_files, "FILE_BYTES", 2000)  # the third piece is in a second file
    (parent,) = joined(tmp_path, count=1)
    for seed in range(3):
        parent.send(step_news(seed))
    newest = parent._own.paths[-1]

    def has_read_all() -> bool:
        parent.start_call(0, learns=True)
        (peer,) = parent._peers
        parent.receive()
        return peer.path == newest and parent.num_received == 0

    assert len(names_of(parent)) == 2
    in_a_fork(has_read_all)


def test_a_fork_within_a_call_waits_for_its_next_one(tmp_path):
    """It has its parent's random numbers until then."""
    parent, other = joined(tmp_path)
    parent.receive()

    def is_silent() -> bool:
        parent.send(step_news())
        other.send(step_news())  # of the parent's other place: a fork of it, too
        parent.receive()
        return (parent.num_sent, parent.num_received, other.num_sent) == (0, 0, 0)

    in_a_fork(is_silent)
    parent.receive()
    assert parent.num_received == 0


def test_a_fork_without_a_folder_goes_on(tmp_path, caplog):
    (parent,) = joined(tmp_path / "folder", count=1)

    def goes_on() -> bool:
        for path in (tmp_path / "folder").iterdir():
            path.unlink()
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").write_text("a file")
        with caplog.at_level(logging.WARNING, "stand"):
            start = parent.start_call(0, learns=True)
            parent.send(step_news())
            parent.receive()
        return start != 0 and "a fork tells nothing" in caplog.text

    in_a_fork(goes_on)


@pytest.mark.long
def test_forks_wait_for_those_who_learn(tmp_path):
    """A thread receives, with its own lock and then the lookup's, while others fork: all locks in the same order."""
    first, second = joined(tmp_path)
    is_over = threading.Event()

    def receive() -> None:
        while not is_over.is_set():
            first.send(step_news())
            second.receive()

    thread = threading.Thread(target=receive)
    thread.start()
    for _ in range(60):
        in_a_fork(lambda: first.start_call(0, learns=True) != 0)
    is_over.set()
    thread.join(timeout=60)
    assert not thread.is_alive() and second.num_received > 0


def test_a_fork_from_a_signal_s_handler_does_not_wait_for_itself(tmp_path):
    (one,) = joined(tmp_path, count=1)
    with one._turn:  # the handler interrupts a receive
        in_a_fork(lambda: one.start_call(0, learns=True) != 0)


def test_numbers_of_a_call_are_a_process_s_own(tmp_path):
    starts = [one.start_call(0, learns=True) for one in joined(tmp_path, count=20)]
    assert len(set(starts)) == 20 and 0 not in starts


def test_a_cleared_lookup_does_not_bring_numbers_back(tmp_path):
    """Others remember what it told before."""
    (one,) = joined(tmp_path, count=1)
    drafter = stand.BlendedDrafter(one.lookup)
    drafter.exchange, starts = one, []
    for _ in range(3):
        starts += [drafter.start_call(learns=False), drafter.start_call(learns=False), drafter.start_call(learns=True)]
        step_news().teach(one.lookup, scope=0)
        one.lookup.clear()
    assert starts[0::3] == starts[1::3] and len(set(starts)) == 6


def test_a_peer_that_is_damaged_is_left_alone_and_others_are_not(tmp_path, caplog):
    *others, last = joined(tmp_path, count=4)
    first, second, third = sorted(others, key=lambda one: sorted(names_of(one)))
    for one in (first, second, third):
        one.send(step_news())
    (name,) = names_of(first)
    with open(tmp_path / name, "ab") as file:
        file.write(b"\x04\0\0\0garbage!")
    with caplog.at_level(logging.WARNING, "stand"):
        last.receive()
        for one in (first, second, third):
            one.send(step_news(1))
        last.receive()
    assert last.num_received == 16 * 5 and {peer.path.name for peer in last._peers} == names_of(second) | names_of(
        third
    )
    assert [f"nothing more is learned from {tmp_path / name}" in line for line in caplog.messages] == [True]


def test_another_vocabulary_is_not_learned(tmp_path, caplog):
    several = [
        Exchange(tmp_path, BlendedLookup(fingerprint=name), vocabulary_size=50) for name in (b"one", b"two", b"")
    ]
    for one in several:
        one.send(step_news())
    with caplog.at_level(logging.WARNING, "stand"):
        for one in several:
            one.receive()
    assert [one.num_received for one in several] == [16, 16, 32]
    assert len(caplog.messages) == 2 and all("every model a folder of its own" in line for line in caplog.messages)


def test_servers_with_the_same_random_numbers_do_not_learn_from_each_other(tmp_path, caplog):
    numbers = (numbers_of(0), numbers_of(0), numbers_of(0, 1), numbers_of(1), 0, 0)
    several = [Exchange(tmp_path, BlendedLookup(), vocabulary_size=50, numbers=number) for number in numbers]
    for one in several:
        one.send(step_news())
    with caplog.at_level(logging.WARNING, "stand"):
        for one in several:
            one.receive()
    assert [one.num_received // 16 for one in several] == [4, 4, 5, 5, 5, 5] and numbers_of(None) == 0
    assert len(caplog.messages) == 2 and all("a seed of its own; the others" in line for line in caplog.messages)


def test_what_is_left_of_a_removed_file_is_passed_over(tmp_path, monkeypatch):
    """A reader that falls behind would else hold more and more files that have gone."""
    monkeypatch.setattr(exchange_module, "PAUSE", 0.0)
    monkeypatch.setattr(exchange_module, "MOST_LEARNED", 16)
    first, second = joined(tmp_path)
    second.receive()
    for seed in range(3):
        first.send(step_news(seed))
    del first
    gc.collect()
    for _ in range(3):
        second.receive()
    assert second.num_received == 16 and second.num_peers == 0


def test_what_was_told_and_learned_is_shown(tmp_path):
    first, second = joined(tmp_path)
    first.send(step_news())
    second.receive()
    assert str(first) == f"shared in {tmp_path}: 16 nodes and tokens told, 0 learned of others, 0 files open"
    assert str(second) == f"shared in {tmp_path}: 0 nodes and tokens told, 16 learned of others, 1 files open"


def test_files_of_another_machine_are_let_alone(tmp_path, monkeypatch):
    """Its locks may not be seen here."""
    other = joined(tmp_path, count=1)[0]
    (path,) = tmp_path.iterdir()
    other._own.abandon()  # no lock is held
    monkeypatch.setattr(exchange_module, "machine_word", lambda: "00000000")
    joined(tmp_path, count=1)
    assert path.exists()
    monkeypatch.undo()
    joined(tmp_path, count=1)
    assert not path.exists()


def test_a_machine_has_one_word_until_it_starts_anew(monkeypatch):
    """The name of a Mac changes with the network that it is in; the name of its session does not."""

    def refuse(self, **_):
        raise FileNotFoundError

    machine_word = own_files.machine_word.__wrapped__  # not kept
    monkeypatch.setattr(Path, "read_bytes", refuse)
    words = []
    for session, node in (
        ("1-2", "mac.home"),
        ("1-2", "mac.office"),
        ("3-4", "mac.office"),
        ("", "mac.home"),
        ("", "b"),
    ):
        monkeypatch.setattr(own_files, "kernel_value", {"kern.bootsessionuuid": session}.__getitem__)
        monkeypatch.setattr(platform, "node", lambda node=node: node)
        words.append(machine_word())
    assert words[0] == words[1] and len(set(words)) == 4 and len(words[0]) == 8


def test_news_with_other_ids_is_not_learned(tmp_path, caplog):
    larger, ours = (Exchange(tmp_path, BlendedLookup(), vocabulary_size=size) for size in (50, 4))
    larger.send(step_news())  # ids below 5
    ours.send(step_news())
    with caplog.at_level(logging.WARNING, "stand"):
        ours.receive()
        larger.receive()
    assert (ours.num_received, larger.num_received, contexts(ours)) == (0, 16, 0)
    assert "tokens must be in [0, 4), got 4; give every model a folder of its own" in caplog.text


def test_an_interrupt_loses_no_peer(tmp_path, monkeypatch):
    first, second = joined(tmp_path)
    first.send(step_news())
    monkeypatch.setattr(exchange_module, "news_of", lambda data: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        second.receive()
    monkeypatch.undo()
    first.send(step_news(1))
    second.receive()
    assert second.num_peers == 1 and second.num_received == 16  # the first piece was being learned


def test_news_goes_on_in_the_next_file(tmp_path, monkeypatch):
    """Without waiting until files are looked for again."""
    monkeypatch.setattr(own_files, "FILE_BYTES", 2000)  # a step's news has 1,100 bytes
    monkeypatch.setattr("stand.sharing.peer_file.FILE_BYTES", 2000)
    first, second = joined(tmp_path)
    for seed in range(20):
        first.send(step_news(seed))
        second.receive()
        assert second.num_received == 16 * (seed + 1)
    assert first._own._num_begun > 5 and second.num_peers <= 3


@pytest.mark.parametrize("name", ["unlink", "rename", "fchmod"])
def test_files_that_cannot_be_changed_end_no_call(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setattr(own_files, "FILE_BYTES", 100)
    first, second = joined(tmp_path)
    second.receive()

    def fail(*arguments, **named):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "stand"):
        broken.setattr(own_files.Path if name == "unlink" else own_files.os, name, fail)
        for seed in range(5):
            first.send(step_news(seed))
            first.receive()
    assert len(caplog.messages) == (0 if name == "unlink" else 1)
    second.receive()
    assert second.num_received >= 16


def test_a_peer_that_cannot_be_opened_for_now_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange_module, "PAUSE", 0.0)
    first, second = joined(tmp_path)
    first.send(step_news())

    def fail(path):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(exchange_module, "PeerFile", fail)
        second.receive()
    second.receive()
    assert second.num_received == 16


def test_a_file_of_another_user_is_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(exchange_module, "PAUSE", 0.0)
    first, second = joined(tmp_path)

    def fail(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(exchange_module, "PeerFile", fail)
    with caplog.at_level(logging.WARNING, "stand"):
        for _ in range(3):
            second.receive()
    assert len(caplog.messages) == 1 and "Permission denied" in caplog.text


def test_something_else_of_such_a_name_is_no_file(tmp_path, caplog):
    (one,) = joined(tmp_path, count=1)
    pipe = tmp_path / f"{own_files.machine_word()}-89abcdef-00000001.news"
    os.mkfifo(pipe)
    with caplog.at_level(logging.WARNING, "stand"):
        one.receive()
    assert "must be in a file" in caplog.text
    joined(tmp_path, count=1)
    assert pipe.exists()


def test_drafters_of_one_lookup_share_its_place(tmp_path):
    lookup = BlendedLookup()
    first, second = (stand.BlendedDrafter(lookup, share=tmp_path) for _ in range(2))
    for drafter in (first, second):
        stand.wrap(tiny_model("qwen2"), drafter=drafter)
    elsewhere = stand.BlendedDrafter(lookup, share=tmp_path / "other")
    stand.wrap(tiny_model("qwen2"), drafter=elsewhere)
    assert first.exchange is second.exchange is not elsewhere.exchange


def test_a_full_file_system_ends_what_is_told_and_nothing_else(tmp_path, caplog, monkeypatch):
    first, second = joined(tmp_path)
    monkeypatch.setattr(own_files.os, "write", lambda file, data: 3)
    with caplog.at_level(logging.WARNING, "stand"):
        first.send(step_news())
        monkeypatch.undo()
        first.send(step_news())
        second.send(step_news())
        first.receive()
        second.receive()
    assert (first.num_sent, first.num_received, second.num_received) == (0, 16, 0)
    assert len(caplog.messages) == 1 and "only 3 of" in caplog.text


def test_a_folder_that_goes_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(exchange_module, "PAUSE", 0.0)
    (one,) = joined(tmp_path / "gone", count=1)
    for path in (tmp_path / "gone").iterdir():
        path.unlink()
    (tmp_path / "gone").rmdir()
    with caplog.at_level(logging.WARNING, "stand"):
        one.receive()
        one.send(step_news())
        one.receive()
    assert one.num_sent == 0 and len(caplog.messages) == 1 and "was removed" in caplog.text


@pytest.mark.parametrize("share", ["", 3, b"/tmp", True, "a\0b", SimpleNamespace()])
def test_what_is_no_folder_is_refused(share):
    with pytest.raises(ValueError, match="share must be the path of a folder, got"):
        stand.BlendedDrafter(share=share)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="share must name a folder that can be written to, got"):
        stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(share=tmp_path / "file"))


def engine_of(folder, **settings) -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=12, share=folder), **settings)


def test_an_engine_drafts_what_another_one_has_learned(tmp_path):
    """Greedy, so that both decode the same text: the second one's drafts are all kept as soon as it has read them."""
    first, second, alone = engine_of(tmp_path), engine_of(tmp_path), engine_of(None)
    settings = {"input_ids": PROMPT, "max_new_tokens": 60, "do_sample": False, "stop_token_ids": []}
    outputs = [engine.generate(**settings) for engine in (first, second, alone)]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert outputs[0].stats.num_steps == outputs[2].stats.num_steps
    assert outputs[1].stats.num_steps < 0.8 * outputs[0].stats.num_steps
    received = [engine.drafter.exchange.num_received for engine in (first, second)]
    assert received[0] == 0 and received[1] == first.drafter.exchange.num_sent > 0


def test_calls_that_must_not_learn_neither_tell_nor_are_told(tmp_path):
    first, second = engine_of(tmp_path), engine_of(tmp_path)
    first.generate(input_ids=PROMPT, max_new_tokens=20, seed=0)
    second.generate(input_ids=PROMPT, max_new_tokens=20, seed=0, learn=False)
    exchange = second.drafter.exchange
    assert (exchange.num_sent, exchange.num_received, len(second.lookup)) == (0, 0, 0)


def p_of_second_processes(folder, verifier: str, *, num_seeds: int = 600) -> float:
    """Of the law of a process's call that has the seed of another process, whose outcome it has learned before; by
    chi-square against the target's, over many seeds."""
    rule, counts = get_verifier(verifier), dict.fromkeys(EXPECTED, 0)
    for seed in range(num_seeds):
        first, second = drafters = [
            stand.BlendedDrafter(BlendedLookup(num_candidates=SIZE), budget=5, kind="mixed") for _ in range(2)
        ]
        for drafter in drafters:
            drafter.exchange = Exchange(folder, drafter.lookup, vocabulary_size=SIZE)
        starts = [drafter.start_call(learns=True) for drafter in drafters]
        one_call(first, rule, seed=seed, own_seed=call_seed(seed, starts[0]))
        second.exchange.receive()
        assert second.exchange.num_received > 0
        counts[one_call(second, rule, seed=seed, own_seed=call_seed(seed, starts[1]))] += 1
    return p_value(list(counts.values()), [num_seeds * share for share in EXPECTED.values()])


@pytest.fixture
def fixed_numbers(monkeypatch):
    """Processes' own numbers, which are drawn, the same in every run: a test must not fail by chance."""
    random = np.random.default_rng(7)
    monkeypatch.setattr(exchange_module.secrets, "randbits", lambda bits: int(random.integers(2**bits)))


@pytest.mark.long
def test_a_process_with_the_seed_of_another_follows_the_target(tmp_path, fixed_numbers):
    assert p_of_second_processes(tmp_path, "traversal") > 1e-3


@pytest.mark.long
def test_processes_that_share_their_numbers_are_seen(tmp_path, monkeypatch):
    """The negative control: calls that start from what the lookup says alone."""
    monkeypatch.setattr(Exchange, "start_call", lambda self, start, learns: start)
    assert p_of_second_processes(tmp_path, "traversal", num_seeds=1500) < 1e-6
