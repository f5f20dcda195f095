"""The worker for SGLang that hands over laws, around a plain stand-in and, where its source is at hand, around the
released class: greedy texts, the laws that arrive, prompts, and what is refused."""

import ast
import inspect
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import sglang_stage
import torch
from sglang_stage import DEPTH, WORKER, PlainWorker, Request, Stage, logits_after, plain_text, released_worker

from stand.plugins.serving.arriving_laws import ArrivingLaws
from stand.plugins.sglang import LookupCorpus
from stand.plugins.sglang_worker import VERSIONS, with_laws, worker_with_laws

D, ENTRIES = 6, 5
HAS_SOURCE = WORKER.exists()
needs_source = pytest.mark.skipif(not HAS_SOURCE, reason="needs SGLang's source: STAND_SGLANG_SOURCE=folder")


def corpus(monkeypatch, laws: int = ENTRIES) -> LookupCorpus:
    monkeypatch.setenv("STAND_LAWS", str(laws))
    return LookupCorpus(max_trie_depth=DEPTH, draft_token_num=D)


def staged(monkeypatch, kind: str, *, laws: int = ENTRIES) -> Stage:
    """kind: "plain", "released" or "overlapped" (released, results one step late)."""
    made = corpus(monkeypatch, laws)
    wrap = (lambda base: worker_with_laws(base, laws)) if laws else (lambda base: base)
    if kind == "plain":
        return Stage(wrap(PlainWorker)(made))
    make, base = released_worker(made, is_overlapped=kind == "overlapped")
    return Stage(make(wrap(base)), is_overlapped=kind == "overlapped")


KINDS = ["plain", pytest.param("released", marks=needs_source), pytest.param("overlapped", marks=needs_source)]


def requests(seed: int, num_problems: int, copies: int) -> list[Request]:
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, 12, 6 + number).tolist() for number in range(num_problems)]
    return [Request(f"{number}-{copy}", prompt) for number, prompt in enumerate(prompts) for copy in range(copies)]


def run(stage: Stage, all_requests: list[Request], num_steps: int) -> None:
    """Requests come two by two, and leave after a while."""
    live: list[Request] = []
    waiting = list(all_requests)
    for step in range(num_steps):
        if waiting and step % 2 == 0:
            new, waiting = waiting[:2], waiting[2:]
            stage.prefill(new)
            live += new
        live = [one for one in live if len(one.text) < len(one.prompt) + 40]
        if live:
            stage.step(live[::-1] if step % 5 == 4 else live)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_without_drafts(monkeypatch, lessons, kind):
    stage, every = staged(monkeypatch, kind), requests(0, 3, 2)
    run(stage, every, 40)
    for one in every:
        new = one.text[len(one.prompt) :]
        assert len(new) >= 40 and new == plain_text(one.prompt, len(new))
    assert stage.num_tokens / stage.num_row_steps > 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_are_the_models_at_every_node(monkeypatch, lessons, kind):
    stage, every = staged(monkeypatch, kind), requests(1, 2, 2)
    temperature = 0.7
    stage.prefill(every)
    for step in range(12):
        stage.step(every[: 4 - step % 2], temperature)
    assert len(lessons["laws"]) > 100
    for text, ids, probs, _ in lessons["laws"]:
        law = torch.softmax(torch.from_numpy(logits_after(text)) / temperature, dim=-1).numpy()
        assert ids.tolist() == np.argsort(-law)[:ENTRIES].tolist()
        assert probs == pytest.approx(law[ids], abs=1e-6)
    shown = {tuple(text[-4:]) for text, *_ in lessons["laws"]}
    decided = {tuple(one.text[end - 4 : end]) for one in every for end in range(len(one.prompt) + 2, len(one.text) - D)}
    assert decided <= shown  # each place that was decided by a verification has taught its law


@pytest.mark.parametrize("kind", KINDS)
def test_what_laws_have_taught_is_not_learned_as_tokens(monkeypatch, lessons, kind):
    stage, every = staged(monkeypatch, kind), requests(2, 2, 1)
    stage.prefill(every)
    stage.step(every)
    firsts = [one.text[len(one.prompt)] for one in every]
    for _ in range(5):
        stage.step(every)
    assert [tokens for tokens in lessons["tokens"] if tokens] == [[first] for first in firsts]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_learned_once_and_name_the_problem(monkeypatch, lessons, kind):
    stage, every = staged(monkeypatch, kind), requests(3, 2, 2)
    stage.prefill(every)
    for _ in range(4):
        stage.step(every)
    prompts = [tokens for tokens, _ in lessons["prompt"]]
    assert sorted(prompts) == sorted([every[0].prompt, every[2].prompt])
    scopes = {tuple(text[:3]): scope for text, _, _, scope in lessons["laws"]}
    one, other = (scopes[tuple(request.prompt[:3])] for request in (every[0], every[2]))
    assert one != other
    again = Request("again", every[0].prompt)
    stage.prefill([again])
    stage.step([again])
    stage.step([again])
    assert lessons["laws"][-1][3] == one and len(lessons["prompt"]) == 2


def test_without_laws_tokens_are_learned(monkeypatch, lessons):
    stage, every = staged(monkeypatch, "plain", laws=0), requests(1, 1, 1)
    stage.prefill(every)
    for _ in range(6):
        stage.step(every)
    assert lessons["laws"] == [] and sum(map(len, lessons["tokens"])) > 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_flushed_cache_forgets_the_laws_on_their_way(monkeypatch, kind):
    stage, every = staged(monkeypatch, kind), requests(1, 1, 1)
    stage.prefill(every)
    stage.step(every)
    stage.worker.clear_cache_pool()
    stage.step(every)
    assert len(stage.worker.ngram_corpus.lookup) > 0


def test_laws_that_are_not_finite_teach_nothing(monkeypatch, lessons):
    stage, every = staged(monkeypatch, "plain"), requests(1, 1, 2)
    stage.prefill(every)
    stage.step(every)
    stage.worker._laws._arrays[1][1] = float("nan")
    stage.worker._laws._arrays[1][D:] = float("nan")
    stage.step(every)
    rows = {len(text) for text, *_ in lessons["laws"]}
    assert lessons["laws"] and np.isfinite([probs for _, _, probs, _ in lessons["laws"]]).all() and len(rows) > 0
    assert all(text[: len(every[0].prompt)] == every[0].prompt for text, *_ in lessons["laws"])


def test_a_worker_without_laws_is_found_out(monkeypatch):
    """The hook may have failed: then SGLang's own worker runs, and the option would be ignored."""
    stage, every = Stage(PlainWorker(corpus(monkeypatch))), requests(0, 1, 1)
    stage.prefill(every)
    with pytest.raises(RuntimeError, match="hands over none"):
        stage.step(every)


def test_entries_are_the_best_ones_at_each_rows_temperature():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    temperatures = torch.tensor(3 * [0.5] + 2 * [2.0] + [0.0])
    ids, probs, other = ArrivingLaws(logits, temperatures[:, None], 4, torch.arange(2)).arrays()
    assert (ids.dtype, probs.dtype, ids.shape) == (np.int32, np.float32, (6, 4))
    for row in range(6):
        law = torch.softmax(logits[row].float() / (temperatures[row] or 1.0), dim=-1)
        assert probs[row] == pytest.approx(law[ids[row]].numpy(), rel=1e-5) and (np.diff(probs[row]) <= 0).all()
    assert other.tolist() == [0, 1]
    assert ArrivingLaws(logits, None, 50).arrays()[0].shape == (6, 9)


def choose(monkeypatch, *, version=VERSIONS[0], is_ngram=True, laws="10", tp_size=1):
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__=version))
    monkeypatch.setenv("STAND_LAWS", laws)
    ranks = SimpleNamespace(tp_size=tp_size, pp_size=1)
    return with_laws(PlainWorker, SimpleNamespace(is_ngram=lambda: is_ngram), ranks)


def test_the_worker_is_chosen_where_it_fits(monkeypatch):
    assert issubclass(choose(monkeypatch), PlainWorker)
    assert choose(monkeypatch, laws="0") is None and choose(monkeypatch, is_ngram=False) is None
    with pytest.raises(RuntimeError, match=r"got 0\.5\.24"):
        choose(monkeypatch, version="0.5.24")
    with pytest.raises(ValueError, match="one rank.* got 2 in tensor"):
        choose(monkeypatch, tp_size=2)


def methods(tree: ast.AST, name: str) -> dict[str, list[str]]:
    """The arguments of a class' methods, in a module's source."""
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return {one.name: [arg.arg for arg in one.args.args] for one in found.body if isinstance(one, ast.FunctionDef)}


@needs_source
def test_the_released_methods_take_what_ours_take():
    released = methods(ast.parse(WORKER.read_text()), "NGRAMWorker")
    plain = methods(ast.parse(inspect.getsource(sglang_stage)), "PlainWorker")
    ours = methods(ast.parse(inspect.getsource(worker_with_laws)), "LawWorker")
    for name, arguments in ours.items():
        assert released[name] == plain[name] == arguments, name
    theirs = methods(ast.parse((WORKER.parent / "cpp_ngram/ngram_corpus.py").read_text()), "NgramCorpus")
    corpus_methods = methods(ast.parse(inspect.getsource(LookupCorpus)), "LookupCorpus")
    for name in set(theirs) - {"_get_state_id"}:
        assert corpus_methods[name] == theirs[name], name
    chooser = methods(ast.parse((WORKER.parent / "spec_info.py").read_text()), "SpeculativeAlgorithm")
    assert chooser["create_worker"] == ["self", "server_args"] and "is_ngram" in chooser


@needs_source
def test_the_released_registry_puts_ours_in_place(monkeypatch):
    """Its own hook code, run on stand-ins of its targets."""
    name = "released_hook_registry"
    spec = sglang_stage.importlib.util.spec_from_file_location(
        name, sglang_stage.SOURCE / "sglang/srt/plugins/hook_registry.py"
    )
    registry = sglang_stage.importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, registry)
    spec.loader.exec_module(registry)
    stand_ins = sglang_stage._stand_ins(None)
    modules = {**stand_ins, "sglang.srt.plugins.hook_registry": registry}
    modules["sglang"].__version__ = VERSIONS[0]
    algorithm = type("SpeculativeAlgorithm", (), {})
    algorithm.is_ngram = lambda self: True
    algorithm.create_worker = lambda self, server_args: PlainWorker
    modules["sglang.srt.speculative.spec_info"] = types.ModuleType("spec_info")
    modules["sglang.srt.speculative.spec_info"].SpeculativeAlgorithm = algorithm
    modules["sglang.srt.plugins"] = types.ModuleType("sglang.srt.plugins")
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
        parent, _, child = path.rpartition(".")
        if parent:
            monkeypatch.setattr(modules[parent], child, module, raising=False)
    original = type("NgramCorpus", (), {})
    modules["sglang.srt.speculative.cpp_ngram.ngram_corpus"].NgramCorpus = original
    importer = types.ModuleType("importer")
    importer.NgramCorpus = original
    monkeypatch.setitem(sys.modules, "importer", importer)
    monkeypatch.setenv("STAND_LAWS", "10")
    from stand.plugins.sglang import register

    register()
    registry.HookRegistry.apply_hooks()
    assert importer.NgramCorpus is LookupCorpus
    chosen = algorithm().create_worker(SimpleNamespace(tp_size=1, pp_size=1))
    assert chosen is not PlainWorker and issubclass(chosen, PlainWorker)
