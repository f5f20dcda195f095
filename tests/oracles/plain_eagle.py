"""EAGLE-1's head without a cache, a batch or a tree: one plain forward over a node's whole context."""

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.eagle.head import EagleHead
from stand.forward.tree_attention import tree_attention


def random_head(target: PreTrainedModel, *, seed: int = 0, scale: float = 1.0) -> EagleHead:
    """An untrained head with the layer sizes of `target`; `scale` times torch's own initial weights."""
    torch.manual_seed(seed)
    head = EagleHead(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(scale)
    return head.eval()


@torch.inference_mode()
def plain_features(target: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[L, D]: what the target's LM head takes."""
    with tree_attention(target, "eager"):  # plain attention, also in the middle of a call
        return target(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]


@torch.inference_mode()
def plain_logits(head: EagleHead, target: PreTrainedModel, history: list[int], drafted: list[int]) -> np.ndarray:
    """[V]: the head's logits after `history` and the drafted tokens, of which only the first have true features."""
    features = plain_features(target, history)[:-1]
    tokens = [*history, *drafted]
    drafting = head.config._attn_implementation
    head.config._attn_implementation = "sdpa"
    try:
        for end in range(len(history), len(tokens) + 1):
            token_ids, positions = torch.tensor([tokens[1:end]]), torch.arange(end - 1)[None]
            estimate = head(features[None], token_ids, positions)[0, -1:]
            features = torch.cat([features, estimate])
        return head.logits(estimate)[0].numpy()
    finally:
        head.config._attn_implementation = drafting
