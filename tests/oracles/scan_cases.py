"""Random trees of rows and random operands for the kernels of recurrent layers."""

from dataclasses import dataclass

import numpy as np
import torch

from stand.forward.recurrent.gates import DeltaGates, StepSizes


@dataclass
class ScanCase:
    """Rows of so many tokens each, then padding up to M; numbers are normal, states by cache row."""

    counts: tuple[int, ...]
    num_tokens: int
    heads: int = 4
    key_heads: int = 2
    key_size: int = 8
    value_size: int = 12
    channels: int = 70
    taps: int = 4  # of the convolution: N + 1
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        self._generator = torch.Generator().manual_seed(sum(self.counts))
        self._trees = np.random.default_rng(self.num_tokens)
        num_rows, tokens = len(self.counts), self.num_tokens
        self.offsets = torch.tensor(np.cumsum([0, *self.counts]), dtype=torch.int32)
        self.cache_rows = torch.arange(num_rows).roll(1)
        self.parents, self.depths = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)
        self.ancestors = torch.zeros(tokens, -(-min(tokens, 256) // 64), dtype=torch.int64)
        firsts = self.offsets.tolist()
        self.local_parents = [self._tree(first, count) for first, count in zip(firsts, self.counts, strict=False)]
        self.path = torch.full((num_rows, 32), -1)
        for row, parents in enumerate(self.local_parents):
            self._keep(row, parents)
        shape = (tokens, self.key_heads, self.key_size)
        self.query, self.key = self.normal(*shape), self.normal(*shape)
        self.value = self.normal(tokens, self.heads, self.value_size)
        self.log_decay = -self.normal(tokens, self.heads).float().abs() / 4
        self.beta = torch.sigmoid(self.normal(tokens, self.heads))
        self.states = self.normal(num_rows, self.heads, self.key_size, self.value_size).float()
        self.inputs = self.normal(tokens, self.channels)
        self.tails = self.normal(num_rows, self.taps - 1, self.channels)
        self.weight, self.bias = self.normal(self.channels, self.taps), self.normal(self.channels)
        raw = 4 * self.normal(tokens, 2 * self.heads) - 3  # softplus bends, and is very small
        decay, rate = raw.split(self.heads, dim=1)  # parts of one product
        self.gates = DeltaGates(decay, rate, self.normal(self.heads), self.normal(self.heads), 2.0)
        negative = -self.normal(self.heads).float().exp()
        self.steps = StepSizes(decay, self.normal(self.heads), True, (0.01, 4.0), negative)
        self.skip = self.normal(self.heads)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.offsets, self.cache_rows

    @property
    def is_token(self) -> torch.Tensor:
        return torch.arange(self.num_tokens) < int(self.offsets[-1])

    def seen(self, row: int) -> torch.Tensor:
        """[T, T] bool."""
        parents = self.local_parents[row]
        seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            seen[node] = seen[parent] if node else False
            seen[node, node] = True
        return seen

    def _tree(self, first: int, count: int) -> list[int]:
        """Row-local parents; the root's own is itself."""
        parents = [0, *(int(self._trees.integers(max(node - 3, 0), node)) for node in range(1, count))][:count]
        for node, parent in enumerate(parents):
            token = first + node
            self.parents[token] = first + parent
            if node:
                self.depths[token] = self.depths[first + parent] + 1
                self.ancestors[token] = self.ancestors[first + parent]
            bit = (1 << (node % 64)) - (1 << 64 if node % 64 == 63 else 0)
            self.ancestors[token, node // 64] |= bit
        return parents

    def _keep(self, row: int, parents: list[int]) -> None:
        """The path to the row's last node but one stays: not only the deepest, not all."""
        node, nodes = max(len(parents) - 2, 0), []
        while node > 0:
            nodes.insert(0, node)
            node = parents[node]
        self.path[row, : len(nodes)] = torch.tensor(nodes[:32], dtype=torch.int64)
