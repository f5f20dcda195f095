"""A multi-token-prediction layer without our cache, a batch or a tree: one forward over a node's whole context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from mtp_checkpoints import OF_LIBRARY, TWIN, read_target
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from stand.drafters.drafter import Lesson
from stand.drafters.eagle.followed_rows import FollowedRows, NodeLaws

Tokens = tuple[int, ...]


class PlainLayer:
    """By the paper's formulas, with models of its own: a target that is in a call runs nothing else.

    folder: as `write_checkpoint` has filled it; layer: what it gave.
    """

    def __init__(self, kind: str, folder: Path, layer: Mapping[str, torch.Tensor]) -> None:
        self._target, self._layer = read_target(kind, folder), layer
        self._config = self._target.config.get_text_config()
        self._block = read_target(kind, folder / TWIN).get_decoder().layers[-1]
        self._base = 0.0 if kind in OF_LIBRARY else 1.0  # what a norm's weights are added to
        self._rope = {"layer_type": "sliding_attention"} if kind == "mellum" else {}
        self._window = self._config.sliding_window if kind == "mellum" else None
        self._features: dict[Tokens, torch.Tensor] = {}
        self._estimates: dict[tuple[Tokens, Tokens], torch.Tensor] = {}

    @torch.inference_mode()
    def estimate(self, history: Tokens, path: Tokens = ()) -> torch.Tensor:
        """[D]: what the LM head reads the law behind `history` and the drafted `path` from; of the latter's tokens the
        features are estimates, too."""
        if (history, path) not in self._estimates:
            if history not in self._features:
                given = self._target(torch.tensor([history]), use_cache=False, output_hidden_states=True)
                self._features[history] = given.hidden_states[-1][0]
            guessed = [self.estimate(history, path[:end]) for end in range(len(path))]
            features = torch.stack([*self._features[history][:-1], *guessed])
            self._estimates[history, path] = self.run(features, torch.tensor([*history[1:], *path]))[-1]
        return self._estimates[history, path]

    def run(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[L, D], of pairs of a feature [L, D] and the token behind it [L]."""
        embedded = self._normed(self._target.get_input_embeddings()(tokens), "enorm")
        joined = torch.cat([embedded, self._normed(features, "hnorm")], dim=-1) @ self._layer["eh_proj.weight"].T
        places = torch.arange(len(tokens))
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (self._window or len(tokens)))
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
        angles = self._target.get_decoder().rotary_emb(joined[None], position_ids=places[None], **self._rope)
        block = self._block(
            joined[None], attention_mask=mask, position_embeddings=angles, position_ids=places[None]
        )  # fmt: skip
        return self._normed(block[0], "post_norm")

    def _normed(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = (values.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        return values * scale * (self._base + self._layer[f"{name}.weight"])


class LibraryLayer(PlainLayer):
    """By transformers' own forward; skips the test where it runs all layers of a checkpoint alone."""

    def __init__(self, kind: str, folder: Path, layer: Mapping[str, torch.Tensor]) -> None:
        if not hasattr(MtpModel, "forward_layer"):
            pytest.skip("this version of transformers runs no single layer")
        super().__init__(kind, folder, layer)
        self._library = MtpModel.from_pretrained(self._target)

    def run(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        cache = MtpCache(config=self._target.config.get_mtp_config())
        places = torch.arange(1, len(tokens) + 1)[None]  # it counts the pair by its token
        return self._library.forward_layer(0, features[None], places, cache, input_ids=tokens[None])[0]


class CheckedRows(FollowedRows):
    """Compares every estimate of a head with a plain one."""

    def __init__(self, *args: object, plain: PlainLayer, **settings: object) -> None:
        super().__init__(*args, **settings)
        self._plain = plain
        self.num_roots = self.num_nodes = self.num_siblings = 0  # that were compared
        self.num_kept = 0  # drafted tokens whose features the target gave

    def follow(self, lesson: Lesson) -> None:
        super().follow(lesson)
        self.num_kept += sum(map(len, lesson.accepted))

    def catch_up(self, histories: Sequence[np.ndarray]) -> tuple[np.ndarray, NodeLaws]:
        rows, laws = super().catch_up(histories)
        self._histories = [tuple(history.tolist()) for history in histories]
        self._drafted: list[list[Tokens]] = [[] for _ in histories]
        self.num_roots += len(rows)
        self._compare(rows, [()] * len(rows), laws.estimates)
        return rows, laws

    def extend(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int | None],
        features: Sequence[torch.Tensor],
    ) -> NodeLaws:
        laws = super().extend(rows, tokens, parents, features)
        paths = []
        for row, token, parent in zip(rows, tokens, parents, strict=True):
            above = () if parent is None else self._drafted[row][parent]
            self.num_siblings += any(path[:-1] == above for path in self._drafted[row])
            paths.append((*above, int(token)))
            self._drafted[row].append(paths[-1])
        self.num_nodes += len(rows)
        self._compare(rows, paths, laws.estimates)
        return laws

    def _compare(self, rows: Sequence[int], paths: Sequence[Tokens], estimates: torch.Tensor) -> None:
        for row, path, estimate in zip(rows, paths, estimates, strict=True):
            expected = self._plain.estimate(self._histories[row], path)
            torch.testing.assert_close(estimate, expected, rtol=0.0, atol=1e-3 * float(expected.abs().max()))
