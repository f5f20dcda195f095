"""Records the runs of a trained head, one graph per size, beside the steps of an engine."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from stand.drafters.heads.packed_run import Body, PackedRun
from stand.forward.attention_shape import AttentionShape
from stand.forward.cache.tree_cache import TreeCache
from stand.gpu.attention_room import AttentionRoom
from stand.gpu.head_runs.rooms import KernelRooms
from stand.gpu.head_runs.run_packet import RunPacket, RunSize
from stand.gpu.head_runs.swapped_heads import kernel_attention
from stand.gpu.head_runs.watched_modules import WatchedModules
from stand.gpu.packets.packet import Packet
from stand.gpu.packets.step_size import StepLimitError
from stand.gpu.runner import Runner, runner_for

LOGGER = logging.getLogger("stand")


class HeadRecorder:
    """A `RunRecorder` for the drafter of one engine. Runs that a recorded one has no place for, and those inside
    torch.autocast or of modules with hooks, are the caller's; so are all once one has failed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._device, self._dtype = model.device, model.dtype
        self._runner: Runner | None = None  # from the first recording on
        self._rooms: KernelRooms | None = None
        self._watched = WatchedModules(())
        self._shapes: tuple[AttentionShape, ...] | None = None
        self._attention: dict[int, AttentionRoom] = {}  # by rows
        self._recorded: dict[RunSize, RecordedRun] = {}
        self._version = 0  # of the rooms that it was recorded with
        self._is_open = True  # until a run has failed

    def rooms(self, num_rows: int, room: int) -> TreeCache:
        if not self._is_open or self._is_autocast:  # where keys may have another type
            return TreeCache(num_rows, room)
        if self._rooms is None or not self._rooms.holds(num_rows, room):
            self._forget()
            self._rooms = KernelRooms(num_rows, room)
        return self._rooms

    def look_at(self, modules: Sequence[nn.Module]) -> None:
        watched = WatchedModules(modules)
        if not watched.is_as(self._watched):
            self._forget()
        self._watched = watched

    def knows_shapes(self) -> bool:
        return self._shapes is not None

    def note_shapes(self, shapes: Sequence[AttentionShape]) -> None:
        self._shapes = tuple(dict.fromkeys(shapes))

    def run(
        self,
        body: Body,
        parts: Sequence[PackedRun],
        features: Sequence[torch.Tensor],
        *,
        cache: TreeCache,
        ends: np.ndarray | None,
        count: int,
        stays: Sequence[str] = (),
    ) -> dict[str, torch.Tensor] | None:
        if cache is not self._rooms or not self._can_record(parts):
            return None
        try:
            recorded = self._recorded_for(body, parts, ends, features[0], stays)
            return recorded.run(self._runner, parts, features, ends=ends, count=count)
        except StepLimitError:
            return None
        except Exception as error:
            self._give_up(error)
            return None

    def _can_record(self, parts: Sequence[PackedRun]) -> bool:
        if not self._is_open or not self._shapes or not self._rooms.keys:
            return False
        is_grown = any(part.starts is not None and part.starts.any() for part in parts)
        if is_grown and any(shape.window for shape in self._shapes):  # windows count packed tokens
            return False
        return not self._is_autocast and not self._watched.have_hooks()

    @property
    def _is_autocast(self) -> bool:
        return torch.is_autocast_enabled(self._device.type)

    def _recorded_for(
        self, body: Body, parts: Sequence[PackedRun], ends: np.ndarray | None, like: torch.Tensor, stays: Sequence[str]
    ) -> RecordedRun:
        self._rooms.reserve(max(int(part.ends.max()) for part in parts))
        is_moved = self._version != self._rooms.version
        if is_moved or not self._watched.hold_weights():
            self._forget()
            self._watched, self._version = WatchedModules(self._watched.modules), self._rooms.version
        num_rows = 1 << (max(part.num_rows for part in parts) - 1).bit_length()
        attention = self._attention_of(num_rows)
        size = RunSize.covering(parts, ends, attention, num_rows)
        if size not in self._recorded:
            packet = RunPacket(size, self._rooms, attention)
            recorded = RecordedRun(packet, like.new_zeros(size.parts[0].num_tokens, like.shape[1]), stays)
            self._runner = self._runner or runner_for(self._device)
            recorded.record(self._runner, body, self._watched.modules)
            self._recorded[size] = recorded
        return self._recorded[size]

    def _attention_of(self, num_rows: int) -> AttentionRoom:
        if num_rows not in self._attention:
            room = AttentionRoom(self._shapes, num_rows, dtype=self._dtype, device=self._device)
            self._attention[num_rows] = room
        return self._attention[num_rows]

    def _forget(self) -> None:
        """No graph runs: whoever starts one waits for it."""
        self._recorded.clear()
        if self._runner is not None:
            self._runner.forget()

    def _give_up(self, error: Exception) -> None:
        self._is_open = False
        self._forget()
        self._attention.clear()
        reason = f"a recorded run of the trained head ended in {type(error).__name__}: {error}"
        LOGGER.warning("%s", reason, exc_info=error)
        warnings.warn(f"{reason}; it goes on operation by operation", stacklevel=4)


class RecordedRun:
    """Of one size."""

    def __init__(self, packet: RunPacket, features: torch.Tensor, stays: Sequence[str]) -> None:
        """features [F, D]: their place on the device."""
        self._packet, self._features, self._stays = packet, features, stays
        self._down: Packet | None = None  # results that go to the host
        self._results: Mapping[str, torch.Tensor] = {}  # of the last run, where graphs leave them
        self._program = None

    def record(self, runner: Runner, body: Body, modules: Sequence[nn.Module]) -> None:
        """Run it once as it is, so that the shapes of its results are known, then make it ready to run often."""
        self._packet.clear()

        def compute() -> None:
            with kernel_attention(modules):
                self._results = body(self._packet.plans, self._features, self._packet.ends)

        @torch.inference_mode()
        def whole() -> None:
            self._packet.upload()
            compute()
            for name, array in self._down.device.items():
                array.copy_(self._results[name])
            self._down.download()

        self._packet.upload()
        compute()
        going = {name: found for name, found in self._results.items() if name not in self._stays}
        fields = {name: (_numpy_type(found), tuple(found.shape)) for name, found in going.items()}
        self._down = Packet(fields, self._features.device)
        self._program = runner.record_alone(whole)

    def run(
        self, runner: Runner, parts: Sequence[PackedRun], features: Sequence[torch.Tensor], *, ends: np.ndarray | None,
        count: int,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        self._packet.fill(parts, ends)
        given = torch.cat(list(features))
        self._features[: len(given)].copy_(given)
        runner.run_alone(self._program)
        found = {name: torch.from_numpy(array[:count].copy()) for name, array in self._down.host.items()}
        return found | {name: self._results[name][:count].clone() for name in self._stays}


def _numpy_type(tensor: torch.Tensor) -> type:
    return np.dtype(str(tensor.dtype).removeprefix("torch.")).type
