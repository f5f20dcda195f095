"""The trained part of DFlash (arXiv 2602.06036): from hidden states of several of the target's layers to the laws of a
whole block of tokens.

A token's *feature* is what one linear layer and a norm make of them. Layers of the head see the features of all tokens
before the pending one, as keys and values, and the places of one block: the pending token, then masks. What comes out
at a mask is read by the target's LM head: the law of the token that stands there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from stand.drafters.dflash.layers import BlockLayer
from stand.drafters.dflash.pairs import PairScores, pair_scores
from stand.drafters.dflash.settings import CONFIG_FILE, DFlashSettings
from stand.drafters.heads.draft_vocabulary import KNOWN, OFFSETS, check_known, offsets_of, tokens_of
from stand.drafters.heads.trained_part import WEIGHT_FILE, TrainedPart, check_shapes, named, read_tensors, rows_of
from stand.forward.features import FeatureLayers, feature_width
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.tree_attention import ATTENTION_NAME
from stand.fusion.fusion import Fusion

WEIGHT_FILES = (WEIGHT_FILE, "pytorch_model.bin")
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
NOT_READ = (
    "verifier_norm.",
    "verifier_lm_head.",
    "confidence_head.",
)  # the target's own; what the lookup learns itself


@dataclass(frozen=True, slots=True)
class BlockLaws:
    """Laws of A blocks of G places, likeliest token first.

    ids int32 and probs float32 [A, G, K]: whatever stands before. Where a head scores pairs, before int32 [A, G, W]:
    the tokens before a place that have laws of their own there, pair_ids and pair_probs [A, G, W, K]. Before the first
    place stands the pending token, W times.
    """

    ids: torch.Tensor
    probs: torch.Tensor
    before: torch.Tensor | None = None
    pair_ids: torch.Tensor | None = None
    pair_probs: torch.Tensor | None = None


class DFlashHead(TrainedPart):
    """One linear layer over the target's hidden states and layers of its own; DFlash 2's convolutions and selector, or
    DSpark's Markov head, where the settings have them.

    Token embeddings are the target's, frozen, and so is the LM head unless the checkpoint brings one. Names of
    parameters are those of z-lab's and speculators' checkpoints.
    """

    def __init__(
        self, target: PreTrainedModel, settings: DFlashSettings, *, vocabulary: torch.Tensor | None = None
    ) -> None:
        """vocabulary [W] int64: the tokens that it guesses, by an LM head of its own; None: all, by the target's."""
        super().__init__(target)
        self.settings, self.config = settings, settings.config
        self.config._attn_implementation = ATTENTION_NAME
        size = self.config.hidden_size
        self.fc = nn.Linear(feature_width(target, self.feature_layers), size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=self.config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(settings, index) for index in range(self.config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(size, eps=self.config.rms_norm_eps)
        if vocabulary is not None:
            self._take_lm_head(nn.Linear(size, len(vocabulary), bias=False))
            self.vocabulary = vocabulary.to(target.device)
        pairs = pair_scores(settings, self.num_guessed)
        if settings.selector_rank:
            self.candidate_selector = pairs
        elif settings.markov_rank:
            self.markov_head = pairs
        self._embedding = (target.get_input_embeddings(),)  # in tuples: the target's, and angles that stay in float32
        self._rotary = (Qwen3RotaryEmbedding(self.config),)
        self.to(target.device, target.dtype)

    @property
    def feature_layers(self) -> FeatureLayers:
        """See `Drafter.feature_layers`."""
        return self.settings.feature_layers

    @property
    def has_windows(self) -> bool:
        """Whether a layer's places see the newest tokens alone."""
        return any(layer.self_attn.sliding_window is not None for layer in self.layers)

    @property
    def pairs(self) -> PairScores | None:
        """What it adds to a token's score by the token before."""
        return getattr(self, "candidate_selector", None) or getattr(self, "markov_head", None)

    @classmethod
    def load(cls, target: PreTrainedModel, path: str | PathLike) -> DFlashHead:
        """Read a checkpoint: a folder with config.json and model.safetensors or pytorch_model.bin, as published.

        Raises ValueError where names, shapes or settings do not belong to a DFlash head of this target.
        """
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        settings = DFlashSettings.read(folder, target)
        found = read_tensors(Path(path), WEIGHT_FILES)
        tensors = {name.removeprefix("model."): found[name] for name in found if not name.startswith(NOT_READ)}
        offsets, known = tensors.pop(OFFSETS, None), tensors.pop(KNOWN, None)
        size = target.get_input_embeddings().weight.shape[0]
        vocabulary = None if offsets is None else tokens_of(offsets, size)
        count = settings.draft_vocab_size if vocabulary is not None else None
        check_known(vocabulary, known, count, size)
        head = cls(target, settings, vocabulary=vocabulary)
        head._take(tensors)
        return head.eval()

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [..., D] of tokens, from the inputs [..., W] of the target's layers."""
        with few_token_layers(self.fc):
            return self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))

    def remember(self, features: torch.Tensor, position_ids: torch.Tensor, cache: object) -> None:
        """Write the keys of features [R, M, D], of tokens at position_ids [R, M], in every layer."""
        angles = self._rotary[0](features, position_ids=position_ids)
        for layer in self.layers:
            layer.remember(features, angles, cache)

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        cache: object,
        seen: Sequence[Mapping[str, object]],
    ) -> torch.Tensor:
        """Estimates [A, G, D] at the guessing places of A blocks, of tokens [R, N] int64: pending ones and masks.

        position_ids [R, N]: in their texts. seen: per layer, what says to its attention which keys a place sees.
        """
        settings = self.settings
        hidden = nn.functional.embedding(token_ids, self._embedding[0].weight) * settings.input_embedding_scale
        hidden = hidden.to(self.fc.weight.dtype)
        angles = self._rotary[0](hidden, position_ids=position_ids)
        for layer, told in zip(self.layers, seen, strict=True):
            hidden = layer(hidden, cache=cache, position_embeddings=angles, **told)
        blocks = self.norm(hidden).view(-1, settings.block_size, hidden.shape[-1])
        return blocks[:, settings.block_size - settings.num_guesses :]

    def logits(self, estimates: torch.Tensor) -> torch.Tensor:
        """[..., W] of the tokens that are guessed, whatever stands before."""
        with few_token_layers(self._lm_head[0]):
            logits = self._lm_head[0](estimates).float() * self.settings.output_multiplier
        cap = self.settings.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap > 0 else logits

    def laws(
        self, estimates: torch.Tensor, pending: torch.Tensor, *, temperature: float, count: int, width: int
    ) -> BlockLaws:
        """Of estimates [A, G, D] behind pending tokens [A] int64; count: tokens of a law; width: tokens before a place
        that have laws of their own, where the head scores pairs."""
        logits, pairs = self.logits(estimates), self.pairs
        kept = max(count, width, 0 if pairs is None else pairs.num_candidates)
        scores, places = torch.topk(logits, min(kept, logits.shape[-1]), dim=-1)
        ids = (places if self.vocabulary is None else self.vocabulary[places]).to(torch.int32)
        whole = torch.logsumexp(logits / temperature, dim=-1, keepdim=True)
        probs = torch.exp(scores / temperature - whole)
        alone = ids[..., :count], probs[..., :count].nan_to_num(nan=0.0)
        if pairs is None:
            return BlockLaws(*alone)
        first = pending.to(torch.int32)[:, None, None].expand(-1, 1, min(width, ids.shape[-1]))
        before = torch.cat([first, ids[:, :-1, :width]], dim=1)
        size = min(pairs.num_candidates, scores.shape[-1])
        candidates = ids[..., :size].long() if pairs.is_closed else places[..., :size]
        added = pairs(estimates, before.long(), candidates).float()
        paired = (scores[..., None, :size] + added) / temperature
        total = torch.logsumexp(paired, dim=-1, keepdim=True)
        if not pairs.is_closed:
            others = (1 - probs[..., :size].sum(dim=-1, keepdim=True)).clamp(min=1e-9).log() + whole
            total = torch.logaddexp(total, others[..., None, :])
        law = torch.topk(torch.exp(paired - total), min(count, size), dim=-1)
        names = ids[..., None, :size].expand(paired.shape).gather(-1, law.indices)
        return BlockLaws(*alone, before, names, law.values.nan_to_num(nan=0.0))

    def restrict(self, token_ids: Sequence[int] | torch.Tensor) -> None:
        """Guess those of these tokens alone that the head knows. Raises ValueError as `TrainedPart.restrict`, and where
        it knows none of them."""
        places = self.narrowed(token_ids)
        self._take_lm_head(rows_of(self._lm_head[0], places))
        if hasattr(self, "markov_head"):
            self.markov_head.markov_w2 = rows_of(self.markov_head.markov_w2, places)

    def fusion(self) -> Fusion | None:
        """Nothing was proven for its layers, as they are not the target's."""
        return None

    def layers_of_a_run(self) -> Sequence[nn.Module]:
        return self.layers

    def weights_of_a_run(self) -> Sequence[nn.Module]:
        """Of pairs it reads a few rows alone."""
        return [self.fc, *self.layers, self._lm_head[0]]

    def save(self, folder: str | PathLike) -> None:
        """Write model.safetensors in bfloat16 and config.json, as z-lab's checkpoints are; some tokens of the target's
        alone as speculators'."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        facts = self.settings.as_json()
        if self.vocabulary is not None:
            tensors |= offsets_of(self.vocabulary, self._embedding[0].weight.shape[0])
            facts["draft_vocab_size"] = len(self.vocabulary)
        save_file(tensors, Path(folder) / WEIGHT_FILE, metadata={"format": "pt"})
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._rotary[0].to(self.fc.weight.device)
        return self

    def _take_lm_head(self, layer: nn.Linear) -> None:
        self.lm_head = layer
        self._lm_head = (layer,)

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load `tensors`; embeddings and an LM head that are the target's own are not kept twice."""
        tensors = dict(tensors)
        self._check_embedding(tensors.pop(EMBEDDING, None))
        given, frozen = tensors.get(LM_HEAD), self._model[0].get_output_embeddings().weight
        if given is not None and self.vocabulary is None:
            check_shapes({LM_HEAD: given}, {LM_HEAD: tuple(frozen.shape)})
            if torch.equal(given.to(frozen), frozen):
                del tensors[LM_HEAD]
            else:
                self._take_lm_head(nn.Linear(given.shape[1], given.shape[0], bias=False).to(frozen))
        own = self.state_dict()
        unknown, missing = sorted(set(tensors) - set(own)), sorted(set(own) - set(tensors))
        if unknown or missing:
            raise ValueError(
                f"a DFlash checkpoint must hold what {CONFIG_FILE} says, got {named(unknown)} beyond it and lacks "
                f"{named(missing)}; take a head that was trained for this model"
            )
        check_shapes(tensors, {name: tuple(value.shape) for name, value in own.items()})
        self.load_state_dict(tensors)

    def _check_embedding(self, given: torch.Tensor | None) -> None:
        own = self._embedding[0].weight
        if given is not None and (given.shape != own.shape or not torch.equal(given.to(own), own)):
            raise ValueError(
                f"{EMBEDDING} of a DFlash checkpoint must be the target's, got others; take a head that was trained "
                "for this model"
            )
