"""Servers that learn from each other: the proposer for vLLM, and the corpus for SGLang."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from stand.plugins import sglang
from stand.plugins.sglang import LookupCorpus, choose_worker
from stand.plugins.vllm import LookupProposer
from stand.sharing import exchange
from stand.sharing.news import news_of
from stand.trees import BlendedLookup

STORY = [7, 3, 9, 4, 1, 8, 2, 6, 5]


def proposer(folder, *, rank: int = 0, seed: int | None = None, **parallel) -> LookupProposer:
    """Of one server whose model has two ranks."""
    places = {"data_parallel_index": 0, "rank": rank, "tensor_parallel_size": 2, **parallel}
    config = SimpleNamespace(
        additional_config={"stand": {"drafts": "all", "share": str(folder)}},
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        model_config=SimpleNamespace(max_model_len=512, get_vocab_size=lambda: 1000, seed=seed),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(**places),
    )
    return LookupProposer(config)


def propose(made: LookupProposer, row: list[int], num_sampled: int = 1) -> list[int]:
    """The draft behind a text of which the last tokens were sampled by this step."""
    tokens = np.zeros((2, 64), dtype=np.int32)
    tokens[0, : len(row)] = row
    sampled = [row[len(row) - num_sampled :], []]
    drafts = made.propose(sampled, np.array([len(row), 0], dtype=np.int32), tokens)
    assert drafts[1] == []
    return drafts[0]


def tell(made: LookupProposer, story: list[int]) -> None:
    """The story, token by token after its first."""
    for end in range(2, len(story) + 1):
        propose(made, story[:end])


def test_a_server_of_vllm_drafts_what_another_one_has_sampled(tmp_path):
    first, second, alone = proposer(tmp_path), proposer(tmp_path), proposer("")
    tell(first, STORY)
    assert first.exchange.num_sent == len(STORY) - 1
    for made in (second, alone):
        propose(made, [50, 51])
    assert propose(second, STORY[:3]) == STORY[3:7]
    assert propose(alone, STORY[:3]) != STORY[3:7]
    assert second.exchange.num_received == first.exchange.num_sent


def test_news_comes_while_prompts_are_read(tmp_path):
    first, second = proposer(tmp_path), proposer(tmp_path)
    tell(first, STORY)
    second.propose([[]], np.array([5], dtype=np.int32), np.zeros((1, 64), dtype=np.int32))
    assert second.exchange.num_received == first.exchange.num_sent


def test_one_rank_of_a_model_shares(tmp_path):
    assert proposer(tmp_path, rank=1).exchange is None
    assert proposer(tmp_path, rank=2).exchange is not None  # the first of the next stage


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_that_schedule_by_themselves_share_nothing(tmp_path, world_size):
    launched = {"distributed_executor_backend": "external_launcher", "world_size": world_size}
    if world_size == 1:
        assert proposer(tmp_path, **launched).exchange is not None
    else:
        with pytest.raises(ValueError, match="share must be left out where an external launcher"):
            proposer(tmp_path, **launched)


@pytest.fixture
def sharing(monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_SHARE", str(tmp_path))
    seeds = iter(range(9))
    monkeypatch.setattr(LookupCorpus, "seed", property(lambda self: next(seeds)))


def ask(corpus: LookupCorpus, name: str, text: list[int]) -> list[list[int]]:
    tokens, masks = corpus.batch_get([name], [text], [len(text)])
    return corpus.leaf_paths_from_mask(tokens.tolist(), masks.reshape(corpus.draft_token_num, -1).tolist())


def test_a_server_of_sglang_drafts_what_another_one_has_sampled(sharing):
    first, second = LookupCorpus(draft_token_num=4), LookupCorpus(draft_token_num=4)
    for end in range(2, 7):
        ask(first, "a", STORY[:end])
    ask(second, "b", [50, 51])
    assert [9, 4, 1, 8] in ask(second, "c", STORY[:3])
    assert second.exchange.num_received == first.exchange.num_sent == 4  # what may be a prompt is not told


def test_no_prompt_is_told(sharing, monkeypatch):
    made, told = LookupCorpus(draft_token_num=4), []
    monkeypatch.setattr(made.exchange, "send", told.append)
    ask(made, "a", STORY)
    made.learn_prompt("b", np.array(STORY, dtype=np.int32))
    ask(made, "b", [*STORY, 11, 12])
    ask(made, "a", [*STORY, 13])
    made.erase_match_state(["a"])
    ask(made, "a", [*STORY, 13, 14])
    assert [news.num_new.tolist() for news in told] == [[0], [2], [1], [1]]


@pytest.mark.parametrize(("is_mixed", "received"), [(True, [1, 1, 1]), (False, [0, 0, 1])])
def test_servers_of_vllm_with_one_seed_do_not_learn_from_each_other(tmp_path, monkeypatch, is_mixed, received):
    """From 0.32 on vLLM gives ranks of data parallelism numbers of their own."""

    def set_random_seed(seed, data_parallel_index=0): ...

    module = SimpleNamespace(set_random_seed=set_random_seed if is_mixed else lambda seed: None)
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "vllm.utils.torch_utils", module)
    first, second, other = (
        proposer(tmp_path, seed=seed, data_parallel_index=index) for seed, index in ((0, 0), (0, 1), (5, 0))
    )
    same = proposer(tmp_path, seed=0)
    propose(first, STORY[:3])
    for made in (second, same, other):
        propose(made, [50])
    assert [made.exchange.num_received > 0 for made in (second, other)] == [bool(received[0]), True]
    assert same.exchange.num_received == second.exchange.num_sent * is_mixed


def test_servers_without_vllm_s_word_count_as_one(tmp_path):
    first, second = (proposer(tmp_path, seed=0, data_parallel_index=index) for index in range(2))
    assert first.exchange.numbers == second.exchange.numbers != 0
    assert proposer(tmp_path).exchange.numbers == 0


def test_laws_are_told_with_all_nodes_and_tokens_not_twice(sharing, monkeypatch):
    monkeypatch.setenv("STAND_LAWS", "3")
    first, second = LookupCorpus(draft_token_num=4), LookupCorpus(draft_token_num=4)
    first.hands_over_laws = second.hands_over_laws = True
    ask(first, "a", STORY[:4])
    told = first.exchange.num_sent
    ids = np.arange(12, dtype=np.int32).reshape(4, 3) + 100
    num_nodes = first._drafted.batch.num_nodes
    first.learn_laws(ids, np.tile(np.float32([0.5, 0.3, 0.1]), (4, 1)))
    ask(first, "a", STORY[:5])
    assert first.exchange.num_sent == told + num_nodes
    ask(second, "b", [50, 51])
    tokens, _ = second.lookup.predict(np.array(STORY[:4], dtype=np.int32))
    assert {100, 101, 102} <= set(tokens.tolist())
    told = first.exchange.num_sent
    first.learn_laws(ids, np.full((4, 3), np.nan, dtype=np.float32))  # teaches nothing here, and nobody else
    assert first.exchange.num_sent == told


def choose(*, tp_size: int = 1, pp_size: int = 1, is_ngram: bool = True) -> type | None:
    ranks = SimpleNamespace(tp_size=tp_size, pp_size=pp_size, random_seed=7)
    return choose_worker(object, SimpleNamespace(is_ngram=lambda: is_ngram), ranks)


def test_sglang_shares_where_a_model_has_one_rank(monkeypatch, tmp_path):
    monkeypatch.setattr(LookupCorpus, "seed", None)
    monkeypatch.setenv("STAND_SHARE", str(tmp_path))
    with pytest.raises(RuntimeError, match="share needs one rank and its random_seed, but SGLang told none"):
        LookupCorpus()
    assert choose(is_ngram=False) is None and LookupCorpus.seed is None
    for ranks in ({"tp_size": 2}, {"pp_size": 2}):
        with pytest.raises(ValueError, match="share needs one rank, for all must draft alike"):
            choose(**ranks)
    assert choose() is None and LookupCorpus.seed == 7
    assert LookupCorpus().exchange is not None
    monkeypatch.delenv("STAND_SHARE")
    assert choose(tp_size=2) is None and LookupCorpus().exchange is None


@pytest.mark.parametrize("name", ["STAND_SHARE", "STAND_LAWS"])
def test_the_worker_s_class_is_looked_at_where_that_matters(monkeypatch, name):
    registered = []
    registry = SimpleNamespace(register=lambda *arguments: registered.append(arguments))
    kinds = SimpleNamespace(REPLACE="replace", AROUND="around", AFTER="after")
    for module in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__path__=[]))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=kinds)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setenv(name, "1")
    sglang.register()
    assert (sglang.CHOOSES_WORKER, choose_worker, "after") in registered


def test_a_lookup_of_a_file_is_shared_on(tmp_path, monkeypatch):
    """Only what is learned from now on is told, not what the file held."""
    lookup = BlendedLookup()
    lookup.learn([], np.array(STORY, dtype=np.int32))
    lookup.save(tmp_path / "lookup")
    sent = []
    monkeypatch.setattr(exchange.OwnFiles, "write", lambda self, data: sent.append(news_of(data)))
    monkeypatch.setenv("STAND_LOOKUP", str(tmp_path / "lookup"))
    made = proposer(tmp_path / "folder")
    assert propose(made, STORY[:3]) == STORY[3:7] and [news.num_learned for news in sent] == [1]
