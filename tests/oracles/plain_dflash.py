"""A block head from its formulas (DFlash, arXiv 2602.06036; DFlash 2; DSpark): no layer of transformers, no cache, no
batch."""

import numpy as np
import torch
from plain_eagle3 import Formulas, layer_inputs
from transformers import PreTrainedModel

from stand.drafters.dflash.head import DFlashHead
from stand.drafters.dflash.settings import DFlashSettings


@torch.inference_mode()
def plain_block(
    head: DFlashHead, target: PreTrainedModel, history: list[int], *, settings: DFlashSettings | None = None
) -> torch.Tensor:
    """[G, D]: the estimates behind `history`. settings: others than the head's, of formulas that are not its own."""
    formulas = BlockFormulas(head, target, settings)
    features = formulas.combined(layer_inputs(target, history, head.feature_layers)[:-1])
    return formulas.estimates(features, history[-1])


class BlockFormulas(Formulas):
    """Those of one head, on the weights of its state_dict."""

    def __init__(self, head: DFlashHead, target: PreTrainedModel, settings: DFlashSettings | None = None):
        super().__init__(head, target)
        self._settings = settings or head.settings
        self._config = self._settings.config
        self._vocabulary = torch.arange(head.num_guessed) if head.vocabulary is None else head.vocabulary
        self._num_tokens = target.get_input_embeddings().weight.shape[0]
        self._num_candidates = head.pairs.num_candidates if head.pairs is not None else 0

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [L, D] of the target's hidden states [L, W]."""
        return self._normed("hidden_norm", self._times("fc", hidden))

    def estimates(self, features: torch.Tensor, pending: int) -> torch.Tensor:
        """[G, D], at the guessing places behind features [L - 1, D] and the pending token."""
        settings = self._settings
        tokens = [pending, *[settings.mask_token_id] * (settings.block_size - 1)]
        hidden = self._weights["embed_tokens.weight"][tokens] * settings.input_embedding_scale
        for index in range(self._config.num_hidden_layers):
            name = f"layers.{index}"

            def attended(normed: torch.Tensor, index: int = index, name: str = name) -> torch.Tensor:
                inputs = torch.cat([features, normed])
                return self._attended(name, inputs, self._unseen(index, len(inputs)))[len(features) :]

            def fed(normed: torch.Tensor, name: str = name) -> torch.Tensor:
                return self._gated(name, normed)

            hidden = hidden + self._between(f"{name}.attention_conv", f"{name}.input_layernorm", hidden, attended)
            hidden = hidden + self._between(f"{name}.mlp_conv", f"{name}.post_attention_layernorm", hidden, fed)
        estimates = self._normed("norm", hidden)
        return estimates if settings.has_anchor_law else estimates[1:]

    def logits(self, estimates: torch.Tensor) -> torch.Tensor:
        """[G, W] of the tokens that are guessed."""
        found = self._times("lm_head", estimates).double() * self._settings.output_multiplier
        cap = self._settings.final_logit_softcapping
        return cap * torch.tanh(found / cap) if cap else found

    def law(self, estimate: torch.Tensor, *, before: int | None = None, temperature: float = 1.0) -> np.ndarray:
        """[V]: of one place's estimate [D], whatever stands before it, or behind the token `before`.

        Tokens whose scores a Markov head leaves as they are have their shares, but are not named.
        """
        scores = self.logits(estimate[None])[0]
        likely = torch.arange(len(scores))
        if before is not None:
            likely = scores.topk(min(self._num_candidates, len(scores))).indices
            changed = scores if self._settings.markov_rank else torch.full_like(scores, -torch.inf)
            added = torch.tensor([self._added(estimate, before, place) for place in likely.tolist()])
            scores = changed.index_copy(0, likely, scores[likely] + added)
        law = torch.zeros(self._num_tokens, dtype=torch.float64)
        law[self._vocabulary[likely]] = (scores / temperature).softmax(dim=0)[likely]
        return law.numpy()

    def _added(self, estimate: torch.Tensor, before: int, place: int) -> float:
        """To the score of one guessed token, by its number among them."""
        if self._settings.selector_rank:
            asked = self._times("candidate_selector.hidden_projection", estimate)
            asked = asked * self._weights["candidate_selector.predecessor_codebook"][before]
            answer = self._weights["candidate_selector.successor_codebook"][int(self._vocabulary[place])]
            return float(asked.double() @ answer.double())
        asked = self._weights["markov_head.markov_w1.weight"][before]
        if self._settings.markov_head_type == "gated":
            given = torch.cat([estimate, asked])
            gate = self._times("markov_head.gate_proj", given) + self._weights["markov_head.gate_proj.bias"]
            asked = asked / (1 + torch.exp(-gate))
        return float(asked.double() @ self._weights["markov_head.markov_w2.weight"][place].double())

    def _unseen(self, index: int, length: int) -> torch.Tensor:
        """Keys that a layer's places do not see. Features' own places are not asked."""
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        is_of_block = key >= length - self._settings.block_size
        unseen = (key > query) & (is_of_block if self._settings.is_causal[index] else False)
        if self._config.layer_types[index] != "full_attention":
            unseen = unseen | (query - key >= self._config.sliding_window)
        return unseen

    def _between(self, convolution: str, norm: str, hidden: torch.Tensor, sublayer) -> torch.Tensor:
        """A sublayer on its normed input, between its two convolutions where the head has any."""
        normed = self._normed(norm, hidden)
        if not self._settings.conv_kernel_size:
            return sublayer(normed)
        made = self._times(f"{convolution}.kernel_projection", normed)
        made = made.view(len(normed), 2, self._settings.conv_kernel_size, -1)  # by group of channels
        base = self._weights[f"{convolution}.base_kernel"]
        first = self._convolved(normed, base[0], made[:, 0])
        return self._convolved(sublayer(first), base[1], made[:, 1])

    def _convolved(self, states: torch.Tensor, base: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Place t: the sum over taps of (base + made) * what stands `tap` places before it."""
        mixed = torch.zeros_like(states)
        for place in range(len(states)):
            for tap in range(min(len(base), place + 1)):
                kernel = base[tap] + made[place, tap].repeat_interleave(self._settings.conv_group_size)
                mixed[place] += kernel * states[place - tap]
        return mixed
