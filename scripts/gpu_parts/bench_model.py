"""One model of random weights and the engine around it, shared by everything that runs whole steps."""

from __future__ import annotations

import gc

import numpy as np
import torch
from workloads.model_shapes import ModelShape

import stand
from stand.forward.cache.key_shape import key_shape, new_states
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_cache import DeviceCache
from stand.gpu.packets.step_size import MAX_ROW_NODES
from stand.gpu.tuning.attention_tiles import PAGE_SIZE
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.row import Row
from stand.verifiers import VerifierNoise

LAW = SamplingParams(temperature=0.6)
RULE = "traversal"
MARGIN = 2 * MAX_ROW_NODES  # slots behind the committed tokens
PEAKED = 4  # times larger logits: at temperature 0.6 a few tokens share 95 %, as after training, and not 50,000
SHARE = 0.85  # of the free memory that caches may take


class BenchModel:
    """`engine` is what `stand.wrap` makes of the model; every captured step here has its settings. Weights are random
    but for the scale of the logits: flat laws are the worst that a filter can meet.

    Raises ValueError where the engine would not run captured steps, with its reason.
    """

    def __init__(self, shape: ModelShape, *, device: torch.device, dtype: torch.dtype, max_positions: int):
        self.shape = shape
        if device.type == "cuda":
            free_memory()
        self.model = shape.random_model(device=device, dtype=dtype, max_positions=max_positions)
        with torch.no_grad():
            self.model.get_output_embeddings().weight.mul_(PEAKED)
        self.engine = stand.wrap(self.model, verifier=RULE, backend="auto" if device.type == "cuda" else "triton")
        if self.engine.backend.name != "triton":
            raise ValueError(
                f"whole steps are timed as captured ones, got the back end {self.engine.backend}: "
                f"{self.engine.backend.reason}; time kernels alone with --parts attention,products,laws"
            )
        self._generator = np.random.default_rng(0)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def fusion_report(self) -> list[str]:
        """One line per swap."""
        return [] if self.engine.backend.fusion is None else [str(swap) for swap in self.engine.backend.fusion.report]

    def tokens(self, count: int) -> np.ndarray:
        """[count] int32, random."""
        return self._generator.integers(0, self.shape.vocabulary, count).astype(np.int32)

    def step(self, num_rows: int, length: int) -> tuple[CapturedStep, list[Row]]:
        """A captured step behind `length` random keys per row, and its rows."""
        fusion = self.engine.backend.fusion
        step = CapturedStep(self.model, TargetLaw(LAW), self.engine.verifier, num_rows=num_rows, fusion=fusion)
        rows = [Row(row, self.tokens(length + 1), 1) for row in range(num_rows)]
        step.use(self._random_cache(num_rows, length), rows)
        return step, rows

    def obstacle(self, num_rows: int, length: int, *, copies: int = 1) -> str | None:
        """Why so many caches cannot be held at once, or None: they would take more than `SHARE` of what is free."""
        if self.device.type != "cuda":
            return None
        free_memory()
        free, _ = torch.cuda.mem_get_info(self.device)
        of_row = (length + MARGIN) * self.shape.cache_elements() * self.model.dtype.itemsize + self.shape.state_bytes()
        needed = copies * num_rows * of_row
        if needed < SHARE * free:
            return None
        return f"its cache needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"

    def step_bytes(self, num_rows: int, length: float) -> float:
        """What a step must read: the weights once, and every row's keys, values and states."""
        elements = self.shape.weight_count(num_rows) + num_rows * length * self.shape.cache_elements()
        return self.model.dtype.itemsize * elements + num_rows * self.shape.state_bytes()

    def _random_cache(self, num_rows: int, length: int) -> DeviceCache:
        cache = DeviceCache(
            layers=key_shape(self.model).layers, num_pages=num_rows * -(-(length + MARGIN) // PAGE_SIZE),
            page_size=PAGE_SIZE, dtype=self.model.dtype, device=self.device,
            recurrent=new_states(self.model, num_rows),
        )  # fmt: skip
        for block in cache.blocks:
            block.normal_()
        return cache


def free_memory() -> None:
    """Give back what earlier measurements have left behind."""
    gc.collect()
    torch.cuda.empty_cache()


def step_noise(rows: list[Row], *, seed: int = 0) -> VerifierNoise:
    """The noise of the coming step of these rows."""
    return VerifierNoise(
        seed=seed,
        rows=np.array([row.index for row in rows], dtype=np.int64),
        steps=np.array([row.num_steps for row in rows], dtype=np.int64),
        positions=np.array([row.num_cached + 1 for row in rows], dtype=np.int64),
    )
