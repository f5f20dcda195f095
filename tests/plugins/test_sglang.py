"""The corpus for SGLang, called as its NGRAM worker calls its own, without SGLang: masks, requests, corpora."""

import sys
import threading
import time
import types

import numpy as np
import pytest
from ancestor_rules import broken_rule

from stand.plugins.sglang import ADDS_CORPUS, REPLACED, LookupCorpus, register, wait_for_corpus
from stand.plugins.vllm import register as register_vllm
from stand.trees import BlendedLookup
from stand.trees.layouts.text_rows import TextRows

SHOWN = 24


def corpus(d: int = 8, **arguments) -> LookupCorpus:
    return LookupCorpus(max_trie_depth=SHOWN, draft_token_num=d, **arguments)


def ask(made: LookupCorpus, texts: dict[str, list[int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """One step: by request its [d] tokens and [d, d] mask."""
    made.synchronize()
    tails = [text[-SHOWN:] for text in texts.values()]
    tokens, masks = made.batch_get(list(texts), tails, [len(text) for text in texts.values()])
    made.batch_put(tails)
    d = made.draft_token_num
    assert tokens.dtype == masks.dtype == np.int64
    assert tokens.shape == (len(texts) * d,) and masks.shape == (len(texts) * d * d,)
    pairs = zip(tokens.reshape(-1, d), masks.reshape(-1, d, d), strict=True)
    return dict(zip(texts, pairs, strict=True))


def knows(made: LookupCorpus, context: list[int], token: int) -> bool:
    """Whether the token is expected after the context."""
    return made.lookup.predict(context)[0][:1].tolist() == [token]


@pytest.mark.parametrize(("d", "num_steps"), [(2, 40), (8, 100), (12, 20), (33, 6)])
def test_drafts_keep_the_rules_of_masks(d, num_steps):
    """8,000 drafts of all sizes: texts that repeat, texts that do not, requests that come and go."""
    generator, made = np.random.default_rng(d), corpus(d)
    texts: dict[str, list[int]] = {}
    num_branched = 0
    for step in range(num_steps):
        for name in range(48 + 3 * (step % 2)):
            text = texts.setdefault(f"{name}", generator.integers(0, 4 + 30 * (name % 3), 3).tolist())
            text += generator.integers(0, 4 + 30 * (name % 3), generator.integers(1, d + 1)).tolist()
        for name, (tokens, mask) in ask(made, texts).items():
            assert broken_rule(tokens, mask) is None, name
            assert tokens[0] == texts[name][-1]
            num_branched += mask[-1].sum() < d
        if step % 5 == 4:
            gone = list(texts)[:: 2 + step % 3]
            made.erase_match_state(gone)
            for name in gone:
                del texts[name]
    assert num_branched > 0 or d == 2
    made.lookup.check()


def test_drafts_are_chains_where_sglang_verifies_chains():
    """With a breadth of 1 SGLang's attention is causal and reads no mask."""
    made, generator = corpus(max_bfs_breadth=1), np.random.default_rng(0)
    text = generator.integers(0, 4, 300).tolist()
    for end in range(100, 300):
        tokens, mask = ask(made, {"a": text[:end]})["a"]
        assert np.array_equal(mask, np.tril(np.ones_like(mask)))
    assert len(set(tokens[1:].tolist()) - {0}) > 0


def test_what_a_request_got_is_learned_once(monkeypatch):
    made, lessons = corpus(), []

    class Witness(type(made.lookup)):
        def learn_rows(self, tokens, lengths, num_new, *, rows, scopes):
            lessons.extend(
                tokens[row, length - new : length].tolist()
                for row, length, new in zip(rows, lengths, num_new, strict=True)
            )
            super().learn_rows(tokens, lengths, num_new, rows=rows, scopes=scopes)

    made.lookup = Witness()
    text, other = list(range(40, 80)), [5, 6, 7]
    ask(made, {"a": text})
    ask(made, {"a": [*text, 1, 2], "b": other})
    ask(made, {"b": [*other, 8], "a": [*text, 1, 2]})  # a has got nothing
    made.erase_match_state(["a", "unknown"])
    ask(made, {"a": [*text, 1, 2, 3]})  # it was taken out of the batch and is back
    ask(made, {"a": text})  # another one of that name, for it is shorter
    assert lessons == [text[-SHOWN:], [1, 2], other, [8], [], [3], text[-SHOWN:]]


def test_more_new_tokens_than_are_shown_are_learned_in_part():
    made, text = corpus(), list(range(100))
    ask(made, {"a": text[:20]})
    ask(made, {"a": text})
    assert knows(made, text[90:95], 95) and not knows(made, text[30:35], 35)


def test_drafts_continue_what_was_seen():
    made, story = corpus(4), [7, 3, 9, 4, 1, 8]
    ask(made, {"a": story})
    tokens, mask = ask(made, {"b": story[:3]})["b"]
    path = made.leaf_paths_from_mask(tokens.tolist(), mask.tolist())
    assert [9, 4, 1, 8] in path


def test_the_likeliest_draft_is_the_lookups_own():
    """Neither packing nor padding changes what the lookup drafts with a cap per row."""
    made = corpus(6)
    text = np.random.default_rng(3).integers(0, 4, 300).tolist()
    (found,) = ask(made, {"a": text}).values()
    tail = np.array(text[-SHOWN:], np.int32)
    (scope,) = made._requests.find(["a"], [len(text)])[1]
    draft = made.lookup.draft([tail], 5, seed=0, rows=[0], steps=[0], max_nodes=5, scopes=[scope])[0]
    assert broken_rule(*found, draft) is None and draft.num_nodes == 6


def test_results_that_are_held_stay_as_they_are():
    """The memory of masks is used again, but never under the eyes of who holds a result or a part of one."""
    made, generator = corpus(), np.random.default_rng(4)
    made.lookup.learn([], generator.integers(0, 3, 300))
    held, copies = [], []
    for step in range(12):
        texts = {f"{step} {row}": generator.integers(0, 3, 9).tolist() for row in range(1 + step % 3)}
        for tokens, mask in ask(made, texts).values():
            held.append((tokens, mask[2:4]))
            copies.append((tokens.copy(), mask[2:4].copy()))
        if step % 4 == 3:
            held, copies = held[::2], copies[::2]
        for (tokens, part), (same_tokens, same_part) in zip(held, copies, strict=True):
            assert np.array_equal(tokens, same_tokens) and np.array_equal(part, same_part)
    one = ask(made, {"z": [1, 2, 1]})["z"][1]
    address = one.ctypes.data
    del one
    assert ask(made, {"z": [1, 2, 1, 0]})["z"][1].ctypes.data == address


def test_row_steps_are_counted():
    made = corpus()
    ask(made, {"a": [1, 2, 3]})
    ask(made, {"a": [1, 2, 3, 4, 5], "b": [6]})
    ask(made, {"a": [1, 2, 3, 4, 5, 6], "b": [6, 7]})
    assert (made.row_steps.num_row_steps, made.row_steps.num_tokens) == (3, 4)


def test_corpora_are_learned_after_their_load(monkeypatch):
    monkeypatch.setenv("STAND_TEXT_TOKENS", "6")
    made = corpus(external_corpus_max_tokens=20)
    chunks = [[11, 12, 13, 14], [15, 16, -(2**31), 21, 22], [23, 24, 25]]
    assert made.load_external_corpus_named("book", iter(chunks)) == 12
    assert made.list_external_corpora() == {} and made.remaining_token_budget == 20
    ask(made, {"a": [1]})
    assert not knows(made, [11, 12], 13)
    made.commit_external_corpus_load("book", 12)
    assert made.list_external_corpora() == {"book": 12} and made.remaining_token_budget == 8
    ask(made, {"a": [1, 1]})
    ask(made, {"a": [1, 1, 1]})
    assert knows(made, [12, 13], 14) and knows(made, [23, 24], 25)
    assert not knows(made, [15, 16], 21)  # documents are apart
    with pytest.raises(ValueError, match="there already"):
        made.load_external_corpus_named("book", [[1]])
    with pytest.raises(ValueError, match="at most 8 tokens"):
        made.load_external_corpus_named("long", [[1] * 9])
    made.remove_external_corpus("book")
    assert made.list_external_corpora() == {} and made.remaining_token_budget == 20


def test_a_removed_corpus_is_not_learned_any_further(monkeypatch):
    monkeypatch.setenv("STAND_TEXT_TOKENS", "6")
    made, book = corpus(), np.random.default_rng(0).integers(0, 900, 50).tolist()
    for name in ("read alone", "book"):
        made.load_external_corpus_named(name, [book])
    made.commit_external_corpus_load("book", 50)
    ask(made, {"a": [1]})
    made.remove_external_corpus("book")
    for end in range(2, 12):
        ask(made, {"a": [1] * end})
    assert knows(made, book[:5], book[5]) and not knows(made, book[20:25], book[25])
    with pytest.raises(ValueError, match="read last must be committed, got 'read alone'"):
        made.commit_external_corpus_load("read alone", 50)


def test_new_weights_forget_the_requests_alone(monkeypatch, tmp_path):
    """SGLang flushes its cache then. What was learned stays, and is still written."""
    path = tmp_path / "served.lookup"
    monkeypatch.setenv("STAND_SAVE", str(path))
    made = corpus()
    ask(made, {"a": [7, 3, 9, 4]})
    made.reset()
    assert not made.knows("a") and knows(made, [3, 9], 4)
    ask(made, {"a": [1, 8, 2, 6]})
    made.saver.finish()
    assert len(BlendedLookup.load(path)) == len(made.lookup)


def test_files_are_read_and_written(monkeypatch, tmp_path):
    path = tmp_path / "served.lookup"
    monkeypatch.setenv("STAND_LOOKUP", str(path))
    monkeypatch.setenv("STAND_SAVE", str(path))
    made = corpus()
    ask(made, {"a": [7, 3, 9, 4, 1, 8]})
    made.saver.finish()
    again = corpus(4)
    assert [9, 4, 1, 8] in again.leaf_paths_from_mask(*ask(again, {"b": [7, 3, 9]})["b"])


def test_debug_output_names_the_paths(caplog):
    made = corpus(3)
    ask(made, {"a": [1, 2, 3]})
    tokens, mask = ask(made, {"b": [9, 1]})["b"]
    with caplog.at_level("INFO", logger="sglang.stand"):
        made.debug_result(tokens, mask)
    assert "row 0: [1, 2" in caplog.text


@pytest.fixture
def modules(monkeypatch):
    """Fakes of the engines' modules that registering imports: name -> module."""

    def make(**members):
        for name, content in members.items():
            module = types.ModuleType(name.replace("__", "."))
            for key, value in content.items():
                setattr(module, key, value)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            parent, _, child = module.__name__.rpartition(".")
            if parent:
                if parent not in sys.modules:
                    monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
                monkeypatch.setattr(sys.modules[parent], child, module, raising=False)

    return make


def test_the_entry_point_replaces_the_class(modules):
    calls = []
    registry = types.SimpleNamespace(register=lambda *arguments: calls.append(arguments))
    kinds = types.SimpleNamespace(REPLACE="replace", AROUND="around")
    packages = dict.fromkeys(("sglang", "sglang__srt", "sglang__srt__plugins"), {})
    modules(**packages, sglang__srt__plugins__hook_registry={"HookRegistry": registry, "HookType": kinds})
    register()
    assert calls == [(REPLACED, LookupCorpus, "replace"), (ADDS_CORPUS, wait_for_corpus, "around")]


def test_a_corpus_is_there_when_it_was_added():
    """SGLang's manager loads in a thread, and commits when it is next asked and sees that the thread has ended."""

    class Manager:
        def __init__(self, made):
            self.made, self._pending_load = made, None

        def add(self, name, chunks):
            if self._pending_load is not None:
                return "busy"

            def load():
                time.sleep(0.05)
                self.number = self.made.load_external_corpus_named(name, chunks)

            self._pending_load = name, threading.Thread(target=load)
            self._pending_load[1].start()
            return None

        def check_pending_load(self):
            if self._pending_load is None or self._pending_load[1].is_alive():
                return
            (name, _), self._pending_load = self._pending_load, None
            self.made.commit_external_corpus_load(name, self.number)

    made = corpus()
    manager = Manager(made)
    assert wait_for_corpus(Manager.add, manager, "a", [[1, 2, 3]]) is None
    assert made.list_external_corpora() == {"a": 3}
    assert wait_for_corpus(Manager.add, manager, "b", chunks=[[4]]) is None
    assert made.list_external_corpora() == {"a": 3, "b": 1}


def test_pieces_of_images_are_not_learned():
    made = corpus()
    text = [1, 2, 3, *[1_000_123, 1_000_124] * 5, 4, 5, 6]
    for token in (4, 5, 6) * 8:
        text.append(token)
        tokens, _ = ask(made, {"one": text})["one"]
        assert tokens.max() < 1_000_000
    assert knows(made, [4, 5], 6) and not knows(made, [3], 1_000_123) and not knows(made, [1], 2)
    plain = corpus()
    ask(plain, {"one": [1, 2, 3, 4]})
    assert knows(plain, [1], 2)  # control: without an image all that is shown is learned


def test_ids_of_images_take_no_memory():
    """They lie far apart, and the lookup keeps memory by id; what is behind them is learned without them."""
    made, plain = corpus(), corpus()
    for number in range(20):
        ask(made, {f"{number}": [1, 2, 1_000_000 + 50_000_000 * number, 4, 5, 6]})
        ask(plain, {f"{number}": [4, 5, 6]})
    assert made.lookup.nbytes == plain.lookup.nbytes and knows(made, [4, 5], 6)


def test_a_request_that_was_taken_out_goes_on_as_it_was():
    """Its scope is that of its samples still, and nothing is learned twice."""
    made, text = corpus(), [1, 2, 3, 4]
    ask(made, {"one": text, "two": text})
    made.erase_match_state(["one", "never seen"])
    text = [*text, 5, 6]
    texts = TextRows.from_lists([text, text])
    num_new, is_sampled, scopes = made._news(["one", "two"], texts, [6, 6])
    assert is_sampled.all()
    assert num_new.tolist() == [2, 2] and scopes[0] == scopes[1]
    made.erase_match_state(["two"])
    num_new, is_sampled, _ = made._news(["two"], TextRows.from_lists([[1, 2]]), [2])  # another text of that name
    assert not is_sampled.any()
    assert num_new.tolist() == [2]


def test_requests_that_come_back_leave_nothing_behind():
    """A worker with laws shows the prompt of one that was taken out again."""
    made, prompt = corpus(), np.arange(4, dtype=np.int32)
    for tokens in range(1, 4):
        made.learn_prompt("one", prompt)
        ask(made, {"one": [*prompt.tolist(), *range(tokens)]})
        made.erase_match_state(["one"])
        assert not made._prompts and len(made._erased) == 1


def test_prompts_and_corpora_with_other_ids():
    made = corpus()
    made.learn_prompt("one", np.array([1, -200, 3], dtype=np.int32))
    ask(made, {"one": [1, -200, 3][2:]})
    for wrong in (-5, 1_000_000):
        with pytest.raises(ValueError, match=f"a corpus must hold token ids below 1000000, got {wrong}"):
            made.load_external_corpus_named("a", [[1, 2, wrong]])


def test_a_setting_of_vllm_alone_is_refused(monkeypatch):
    monkeypatch.setenv("STAND_DRAFTS", "all")
    with pytest.raises(ValueError, match="drafts must be left out"):
        corpus()


@pytest.mark.parametrize("is_cpu", [True, False])
def test_vllms_sampler_is_mended_on_a_cpu_alone(modules, is_cpu):
    packages = dict.fromkeys(("vllm", "vllm__v1", "vllm__v1__sample"), {})
    platform = types.SimpleNamespace(is_cpu=lambda: is_cpu)

    def recover(max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs,
                sampling_metadata):  # fmt: skip
        raise AssertionError("nothing is to be recovered")

    modules(
        **packages,
        vllm__platforms={"current_platform": platform},
        vllm__v1__sample__rejection_sampler={"expand_batch_to_tokens": "its own", "sample_recovered_tokens": recover},
    )
    register_vllm()
    sampler = sys.modules["vllm.v1.sample.rejection_sampler"]
    assert (sampler.expand_batch_to_tokens != "its own") == (sampler.sample_recovered_tokens is not recover) == is_cpu


def test_the_entry_points_name_what_is_there():
    from importlib.metadata import distribution

    points = {point.group: point for point in distribution("stand-decoding").entry_points}
    if "vllm.general_plugins" not in points:
        pytest.skip("the installed metadata is older than the entry points; install again")
    assert points["vllm.general_plugins"].load() is register_vllm
    assert points["sglang.srt.plugins"].load() is register
