"""SGLang: drafts of the blended lookup in place of its n-gram corpus, `--speculative-algorithm NGRAM`.

The entry point of `sglang.srt.plugins` replaces the class `NgramCorpus`; verification, caches and graphs stay SGLang's.
Never run inside SGLang itself: see docs/sglang.md for what was checked.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stand.plugins.saving import Saver
from stand.plugins.serving.arriving_laws import learn_laws
from stand.plugins.serving.backlog import Backlog
from stand.plugins.serving.options import PREFIX, ServingOptions
from stand.plugins.serving.row_steps import Reporter, RowSteps
from stand.plugins.serving.scopes import TEXTS, Scopes
from stand.plugins.sglang_worker import CHOOSES_WORKER, check_one_rank, with_laws
from stand.sharing.exchange import numbers_of
from stand.sharing.news import TextNews
from stand.trees import DraftBatch, problem_key
from stand.trees.compiled import NamedTexts
from stand.trees.layouts.text_rows import TextRows

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

LOGGER = logging.getLogger("sglang.stand")  # below SGLang's own, so that its lines are shown
REPLACED = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus"
OWN_REFERENCES = 2  # to an attribute, as `sys.getrefcount` counts: the attribute itself and its argument
ADDS_CORPUS = "sglang.srt.speculative.external_corpus_manager.ExternalCorpusManager.add"
MOST_ERASED = 4096  # requests that may come back
LARGEST = 2**31 - 1  # longer than any text
NO_TEXT = 1_000_000  # from this id on SGLang writes pieces of images (MM_PAD_SHIFT_VALUE)
SEPARATOR = -(2**31)  # SGLang puts it between the documents of a corpus


class Drafted(NamedTuple):
    """The last drafts: laws come for their nodes."""

    names: Sequence[str]
    texts: TextRows
    scopes: list[int]
    batch: DraftBatch


class LookupCorpus:
    """What SGLang's NgramCorpus is for its workers: same arguments, methods and arrays.

    draft_token_num: nodes of every request's draft, its last token included. max_trie_depth: tokens that SGLang shows
    of each text; from 12 + draft_token_num on nothing is missed. max_bfs_breadth: with 1 drafts are chains, for SGLang
    verifies them without a mask then. external_corpus_max_tokens: of all corpora together. The other arguments
    belong to SGLang's trie and have no meaning here; options come from the environment (`ServingOptions`).
    """

    hands_over_laws = False  # a worker sets it that calls `learn_laws`
    seed: int | None = None  # of the server's random numbers, set where its model has one rank (`choose_worker`)

    def __init__(
        self,
        max_trie_depth: int = 18,
        min_bfs_breadth: int = 1,
        max_bfs_breadth: int = 8,
        draft_token_num: int = 8,
        match_type: str = "BFS",
        capacity: int = 1_000_000,
        external_sam_budget: int = 0,
        external_corpus_max_tokens: int = 10_000_000,
    ):
        self.options = ServingOptions.read()
        if self.options.budget > 0:
            raise ValueError("budget must be left out, for SGLang gives every request as many nodes; got STAND_BUDGET")
        if f"{PREFIX}DRAFTS" in os.environ:
            raise ValueError("drafts must be left out, for SGLang gives every request as many nodes; got STAND_DRAFTS")
        if self.options.share and self.seed is None:
            raise RuntimeError(
                "share needs one rank and its random_seed, but SGLang told none; see its log for a hook that failed, "
                "or leave STAND_SHARE out"
            )
        self.draft_token_num = draft_token_num
        self._width = 1 if max_bfs_breadth <= 1 else None  # of a draft
        self.external_corpus_max_tokens = external_corpus_max_tokens
        self.row_steps = RowSteps()
        self._read: tuple[str, list[np.ndarray]] = ("", [])  # name and documents of the corpus that was read last
        self._loaded: dict[str, int] = {}  # tokens of corpora whose load was confirmed
        self._masks = np.empty(0, dtype=np.int64)
        self.lookup = self.options.new_lookup()
        if self.options.save:
            self.saver = Saver(self, self.lookup, self.options.save)
        self.exchange = self.options.new_exchange(self.lookup, vocabulary_size=NO_TEXT, numbers=numbers_of(self.seed))
        self._reporter = Reporter(self.row_steps, LOGGER, every=self.options.report_every, exchange=self.exchange)
        self._scopes = Scopes()
        self._backlog = Backlog(self.lookup, tokens_per_step=self.options.text_tokens)
        self.reset()
        if max_trie_depth < self.lookup.depth + draft_token_num:
            LOGGER.warning(
                "STAND: --speculative-ngram-max-trie-depth is %d; with %d or more nothing that is accepted is missed",
                max_trie_depth,
                self.lookup.depth + draft_token_num,
            )
        LOGGER.info("STAND drafts %d nodes per request; %r", draft_token_num, self.lookup)

    @property
    def remaining_token_budget(self) -> int:
        """Tokens that corpora may still have."""
        return self.external_corpus_max_tokens - sum(self._loaded.values())

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(token_ids int64 [B * d], masks int64 [B * d * d]) after learning what the requests have got since.

        batch_tokens: each text's last tokens. total_lens: its tokens in all.
        """
        self._check_laws()
        texts = TextRows.from_lists(batch_tokens)
        num_new, is_sampled, scopes = self._news(req_ids, texts, total_lens)
        texts = _behind_pieces(texts, num_new)
        self._backlog.work()
        self.lookup.learn_rows(texts.tokens, texts.lengths, num_new, rows=texts.rows, scopes=scopes)
        if self.exchange is not None:
            self.exchange.send(TextNews(texts.tokens, texts.lengths, num_new * is_sampled, texts.rows, NO_TEXT))
            self.exchange.receive()
        batch = self._draft(texts, scopes)
        self._requests.keep(req_ids, total_lens, scopes)
        self._drafted = Drafted(req_ids, texts, scopes, batch)
        self._reporter.look()
        token_ids, masks = batch.ancestor_masks(self.draft_token_num, out=self._masks_for(len(batch)))
        return token_ids.astype(np.int64).ravel(), masks.ravel()

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing: these are the texts that the next `batch_get` shows again, with their names."""

    def synchronize(self) -> None:
        """Nothing: all that was shown is learned."""

    def knows(self, name: str) -> bool:
        """Was this request asked for?"""
        return name in self._requests

    def learn_prompt(self, name: str, prompt: np.ndarray) -> None:
        """The whole prompt int32[L] of a request that was not asked for yet. Prompts are learned little by little, and
        equal ones once."""
        is_text = not ((prompt < 0) | (prompt >= NO_TEXT)).any()
        key = problem_key(prompt) if is_text else prompt.tobytes()
        if is_text and key not in self._scopes:
            self._backlog.add(prompt, self._scopes.of(key))
        self._prompts[name] = len(prompt), self._scopes.of(key)

    def learn_laws(self, top_ids: np.ndarray, top_probs: np.ndarray) -> None:
        """The target's laws at the nodes of the last `batch_get`: int32 and float32 [B * d, K], likeliest first.

        What these requests got of that draft is not learned as tokens too. Laws that are not finite teach nothing.
        """
        names, texts, scopes, batch = self._drafted
        nodes = np.arange(len(batch), dtype=np.int64) * self.draft_token_num - batch.offsets[:-1]
        nodes = np.repeat(nodes, batch.sizes) + np.arange(batch.num_nodes)
        befores = TextRows(texts.tokens, texts.lengths - 1, texts.rows)
        learn_laws(self.lookup, self.exchange, batch, befores, top_ids[nodes], top_probs[nodes], scopes)
        self._lawful = set(names)

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Forget these requests; what they taught stays. SGLang says so of a request, too, that it takes out of the
        batch for want of memory and brings back later: the latest ones are remembered, and go on as they were."""
        names = list(req_ids)
        lengths, scopes = self._requests.find(names, [LARGEST] * len(names))
        self._erased |= {
            name: known for name, *known in zip(names, lengths.tolist(), scopes, strict=True) if known[0] >= 0
        }
        while len(self._erased) > MOST_ERASED:
            del self._erased[next(iter(self._erased))]
        self._requests.forget(names)

    def reset(self) -> None:
        """Forget the requests. SGLang asks for it after new weights, too, which change what is likely a little: what
        was learned stays, and fades."""
        self._requests = NamedTexts()
        self._erased: dict[str, list[int]] = {}  # length and scope of requests, the latest ones last
        self._prompts: dict[str, tuple[int, int]] = {}  # length and scope, of requests that were not asked for yet
        self._drafted: Drafted | None = None
        self._lawful: set[str] = set()  # requests whose last draft's laws are learned

    def load_external_corpus_named(self, corpus_id: str, chunks: Iterable[Sequence[int]]) -> int:
        """Take a corpus, in pieces of token ids; its documents are separated by -2**31. Returns its tokens.

        It is learned little by little after `commit_external_corpus_load`; SGLang reads one at a time. Raises
        ValueError for a name that is taken, and for more tokens than the budget has left.
        """
        if corpus_id in self._loaded:
            raise ValueError(f"corpus {corpus_id!r} is there already; remove it before another one takes its name")
        tokens, budget = np.empty(0, dtype=np.int32), self.remaining_token_budget
        pieces: list[np.ndarray] = []
        num_tokens = 0
        for chunk in chunks:
            pieces.append(np.asarray(chunk, dtype=np.int32))
            strange = pieces[-1][(pieces[-1] != SEPARATOR) & ((pieces[-1] < 0) | (pieces[-1] >= NO_TEXT))]
            if len(strange):
                raise ValueError(f"a corpus must hold token ids below {NO_TEXT}, got {strange[0]}; take that out")
            num_tokens += len(chunk)
            if num_tokens > budget:
                raise ValueError(f"corpus {corpus_id!r} must have at most {budget} tokens, got more; split it")
        if pieces:
            tokens = np.concatenate(pieces)
        documents = np.split(tokens, np.flatnonzero(tokens == SEPARATOR))
        self._read = corpus_id, [document[document != SEPARATOR] for document in documents]
        return num_tokens

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """The load is over: the corpus counts, and is learned from the next `batch_get` on."""
        name, documents = self._read
        if name != corpus_id:
            raise ValueError(f"the corpus that was read last must be committed, got {corpus_id!r}; read it again")
        self._loaded[corpus_id] = loaded_token_count
        self._backlog.add_corpus(corpus_id, documents, TEXTS)
        self._read = "", []

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Free a corpus' name and budget. What the lookup has learned of it fades, the rest is not learned."""
        self._loaded.pop(corpus_id, None)
        self._backlog.remove_corpus(corpus_id)

    def list_external_corpora(self) -> dict[str, int]:
        """Tokens by name."""
        return dict(self._loaded)

    def leaf_paths_from_mask(self, tokens: Sequence[int], tree_mask: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens of every path from the root to a node without children, of one draft."""
        mask = np.asarray(tree_mask, dtype=bool)
        has_child = (mask & ~np.eye(len(mask), dtype=bool)).any(axis=0)
        return [np.asarray(tokens)[mask[leaf]].tolist() for leaf in np.flatnonzero(~has_child)]

    def debug_result(self, decoding_ids: np.ndarray, decoding_masks: np.ndarray, tokenizer: object = None) -> None:
        """Write the paths of a result of `batch_get` to the log."""
        size = self.draft_token_num
        pairs = zip(decoding_ids.reshape(-1, size), decoding_masks.reshape(-1, size, size), strict=True)
        for row, (tokens, mask) in enumerate(pairs):
            for path in self.leaf_paths_from_mask(tokens, mask):
                LOGGER.info("row %d: %s%s", row, path, "" if tokenizer is None else f" {tokenizer.decode(path)!r}")

    def _masks_for(self, num_rows: int) -> np.ndarray:
        """int64[num_rows, d, d], the last result's memory where nobody holds it: fresh memory of this size costs as
        much as a draft."""
        shape = num_rows, self.draft_token_num, self.draft_token_num
        size = math.prod(shape)
        if self._masks.size < size or sys.getrefcount(self._masks) > OWN_REFERENCES:
            self._masks = np.empty(size, dtype=np.int64)
        return self._masks[:size].reshape(shape)

    def _news(
        self, names: Sequence[str], texts: TextRows, totals: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(new tokens among those shown int64[B], whether none of them may be of a prompt bool[B], scopes). The
        row-steps of known requests are counted.

        A new request's problem is known by its length and by the last tokens of its prompt, where no more was shown.
        """
        before, scopes = self._requests.find(names, totals)
        num_new = np.minimum(np.array(totals, dtype=np.int64) - before, texts.lengths)
        is_sampled = before >= 0
        drafted = [self.draft_token_num - 1] * len(names)
        for row in (before < 0).nonzero()[0].tolist():
            num_new[row], drafted[row] = len(texts[row]), -1
            length, scope = self._erased.pop(names[row], (LARGEST, 0))
            prompt = self._prompts.pop(names[row], None)
            if length <= totals[row]:
                num_new[row], scopes[row] = min(totals[row] - length, num_new[row]), scope
                is_sampled[row] = True
            elif prompt is not None:
                num_prompt, scopes[row] = prompt
                num_new[row] = min(max(0, totals[row] - num_prompt), num_new[row])
                is_sampled[row] = True
            else:
                scopes[row] = self._scopes.of((totals[row], texts[row][:-1].tobytes()))
        self.row_steps.add(num_new.tolist(), drafted)
        if self._lawful:
            num_new[[known in self._lawful and steps >= 0 for known, steps in zip(names, drafted, strict=True)]] = 0
            self._lawful = set()
        return num_new, is_sampled, scopes

    def _check_laws(self) -> None:
        if self.options.laws > 0 and not self.hands_over_laws:
            raise RuntimeError(
                "laws were asked for (STAND_LAWS), but SGLang made a worker that hands over none; see its log for a "
                "hook that failed, or leave STAND_LAWS out"
            )

    def _draft(self, texts: TextRows, scopes: list[int]) -> DraftBatch:
        nothing = np.zeros(len(texts), dtype=np.int64)  # deterministic drafts take no noise
        return self.lookup.draft(
            texts,
            len(texts) * (self.draft_token_num - 1),
            seed=0,
            rows=nothing,
            steps=nothing,
            floor=self.options.floor,
            max_nodes=self.draft_token_num - 1,
            width=self._width,
            scopes=scopes,
        )


def _behind_pieces(texts: TextRows, num_new: np.ndarray) -> TextRows:
    """Texts that begin behind their last piece of an image, so that nothing is learned of pieces, nor behind them as
    contexts: their ids lie far apart, and a lookup keeps memory by id. A text that ends in a piece stays, with nothing
    new; num_new [B] follows."""
    if texts.tokens.max(initial=0) < NO_TEXT:
        return texts
    tokens, lengths = texts.tokens.copy(), texts.lengths.copy()
    for row in range(len(texts)):
        pieces = np.flatnonzero(texts[row] >= NO_TEXT)
        if len(pieces):
            rest = texts[row][int(pieces[-1]) + 1 :]
            num_new[row] = min(num_new[row], len(rest))
            if len(rest):
                tokens[texts.rows[row], : len(rest)] = rest
                lengths[row] = len(rest)
    return TextRows(tokens, lengths, texts.rows)


def wait_for_corpus(add: Callable, manager: object, *given: object, **named: object) -> object:
    """Around the manager's `add`: the corpus is there when it returns. SGLang lets it come when each rank has seen that
    its thread has ended, so ranks would begin to learn it in different steps, and draft differently from then on."""
    answer = add(manager, *given, **named)
    if answer is None and manager._pending_load is not None:
        manager._pending_load[1].join()
        manager.check_pending_load()
    return answer


def choose_worker(worker: type, algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type | None:
    """A hook after SGLang has chosen its class of workers: another class in its place, None to keep it.

    Raises what `with_laws` raises, and ValueError for several ranks that share: both stop the server before it serves.
    """
    options = ServingOptions.read()
    if options.share and algorithm.is_ngram():
        check_one_rank(server_args, "share needs one rank, for all must draft alike", option="share")
        LookupCorpus.seed = server_args.random_seed
    return with_laws(worker, algorithm, server_args)


def register() -> None:
    """The entry point of `sglang.srt.plugins`: SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(REPLACED, LookupCorpus, HookType.REPLACE)
    HookRegistry.register(ADDS_CORPUS, wait_for_corpus, HookType.AROUND)
    if f"{PREFIX}LAWS" in os.environ or f"{PREFIX}SHARE" in os.environ:
        HookRegistry.register(CHOOSES_WORKER, choose_worker, HookType.AFTER)
