"""Which way a model's steps run: captured with kernels of this project, or eager with PyTorch's attention."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol
from weakref import WeakMethod

import torch
from transformers import PreTrainedModel

from stand.forward.cache import mapped_memory
from stand.forward.cache.key_shape import key_shape
from stand.forward.cache.paged_cache import PagedCache, PromptRoom, fitting_page_size, most_shown_rows
from stand.forward.cache.tree_cache import DRAFT_ROOM, TreeCache
from stand.forward.devices import input_device, is_nvidia, is_offloaded, is_sharded, is_shared, off_one_device
from stand.forward.features import FeatureLayers
from stand.forward.latent_keys import expanding_layer
from stand.forward.model import is_mixture, waiting_ropes
from stand.forward.model_state import foreign_hook
from stand.forward.ranks import ALONE, Ranks, ranks_of
from stand.forward.recurrent.layers import recurrent_layers
from stand.forward.rider import Rider
from stand.forward.tree_attention import exclusive
from stand.fusion.on_cpu import fuse_on_cpu
from stand.step import EagerStep, Step, StepStart
from stand.verifiers import Verifier

if TYPE_CHECKING:
    from stand.drafters.drafter import Drafter
    from stand.drafters.heads.packed_run import RunRecorder
    from stand.fusion.fusion import Fusion
    from stand.gpu.guarded_step import GuardedStep

NAMES = ("auto", "sdpa", "triton")
REFUSAL = "backend 'triton' cannot serve here: {}; use backend='sdpa' or 'auto'"
RIDER_OBSTACLE = "the drafter runs at every node (placement='nodes'), which captured steps do not carry"
LOGGER = logging.getLogger("stand")


class Backend(Protocol):
    """Makes the steps of a call. `str(backend)` is its name."""

    name: str
    reason: str  # why it was chosen
    most_rows: int | None  # live at once, where the steps have such a limit
    held_bytes: int  # of keys that the last call has left and the next one takes over
    page_size: int | None  # slots of a page of the cache; None: rooms are contiguous, as long as the longest needs
    num_slots: int | None  # of a cache that is there from the start; None: memory is asked for
    most_drafted: int | None  # nodes of a step besides the roots, where the steps have such a limit
    computes_elsewhere: bool  # whether the calling thread waits for a device, or other threads, to compute its steps
    has_pool: bool  # whether a call's pages are one block of memory, taken when it begins
    step_sizes: tuple[int, ...]  # tokens to which steps are padded, ascending; none where they are not
    fusion: Fusion | None  # proven fused forwards of the model's modules
    ranks: Ranks  # processes that compute its steps together

    def key_maker(self) -> Callable[[int], TreeCache]:
        """For one call: makes a cache of one row with so much room, for what rows begin with."""

    def new_kept_keys(self) -> TreeCache:
        """An empty cache of one row, for what is kept from call to call."""

    def new_step(self, start: StepStart) -> Step:
        """A step for one call."""

    def new_recorder(self) -> RunRecorder | None:
        """For a drafter's own modules, where steps are recorded."""


class EagerBackend:
    """PyTorch's attention, operation by operation, on any device. On a CPU under Linux the cache has pages.

    fusion: proven fused forwards of the model's modules (`fusion.report`), or None.
    """

    name = "sdpa"
    held_bytes = 0
    num_slots = most_drafted = None
    has_pool = False
    step_sizes = ()

    def __init__(self, model: PreTrainedModel, reason: str, *, fusion: Fusion | None = None):
        self.reason = reason
        self.fusion = fusion
        self.page_size = _page_size(model)
        self.ranks = ranks_of(model)
        self._model = model

    @property
    def computes_elsewhere(self) -> bool:
        return input_device(self._model).type != "cpu" or self.ranks is not ALONE

    @property
    def most_rows(self) -> int | None:
        """As many as the system lets share prompts."""
        shape = key_shape(self._model)
        return None if self.page_size is None else most_shown_rows(shape.num_layers, shape.num_heads)

    def key_maker(self) -> Callable[[int], TreeCache]:
        if self.page_size is None:
            return partial(TreeCache, 1, fusion=self.fusion)
        return partial(PromptRoom, mapped_memory.SharedFile(), fusion=self.fusion)

    def __str__(self) -> str:
        return self.name

    def new_kept_keys(self) -> TreeCache:
        return TreeCache(1, 0)

    def new_step(self, start: StepStart) -> Step:
        if isinstance(start.keys, PromptRoom):
            room = max(row.most_cached for row in start.rows) + DRAFT_ROOM
            cache = PagedCache(start.num_places, room, page_size=self.page_size, fusion=self.fusion)
        else:
            room = max(row.num_cached for row in start.rows) + 1
            cache = TreeCache(start.num_places, room, fusion=self.fusion)
        return EagerStep(self._model, cache, start.law, start.verifier, **start.asked)

    def new_recorder(self) -> RunRecorder | None:
        return None


class CapturedBackend:
    """The step as one graph of this project's kernels, or as two with a call's logits processors between them. Calls
    of a model with hooks, of one whose latents got another projection than a plain matrix, or of a drafter that learns
    more tokens of a node than a recorded step returns take eager steps over the same pages; calls inside torch.autocast
    take eager steps in rooms.

    Should a captured step fail during a call, the call and all later ones go on with eager steps, later ones in rooms:
    `name` becomes "sdpa" and `reason` says why.

    fusion: proven fused forwards of the model's modules (`fusion.report`), or None.
    """

    num_slots = most_drafted = None
    ranks = ALONE

    def __init__(self, model: PreTrainedModel, reason: str, *, fusion: Fusion | None = None):
        self.reason = reason
        self.fusion = fusion
        self._model = model
        self._is_captured = True  # until a captured step has failed
        self._eager = EagerBackend(model, reason)
        self._previous: GuardedStep | None = None  # graphs and cache of the last call, for the next one

    @property
    def name(self) -> str:
        return "triton" if self._is_captured else "sdpa"

    def __str__(self) -> str:
        return self.name

    @property
    def most_rows(self) -> int | None:
        """Half of the largest step's tokens, so that rows have room for drafts."""
        from stand.gpu.packets.step_size import NUM_TOKENS

        return NUM_TOKENS[-1] // 2 if self._is_captured else None

    @property
    def page_size(self) -> int | None:
        from stand.gpu.tuning.attention_tiles import PAGE_SIZE

        return PAGE_SIZE if self._is_captured else None

    @property
    def computes_elsewhere(self) -> bool:
        return self._eager.computes_elsewhere

    @property
    def has_pool(self) -> bool:
        return self._is_captured

    @property
    def step_sizes(self) -> tuple[int, ...]:
        from stand.gpu.packets.step_size import sizes_for

        return sizes_for(self._model) if self._is_captured else ()

    @property
    def held_bytes(self) -> int:
        is_taken_over = self._previous is not None and not self._is_autocast
        return self._previous.held_bytes if is_taken_over else 0

    @property
    def _is_autocast(self) -> bool:
        return torch.is_autocast_enabled(input_device(self._model).type)

    def new_kept_keys(self) -> TreeCache:
        return self._eager.new_kept_keys()

    def key_maker(self) -> Callable[[int], TreeCache]:
        return partial(TreeCache, 1)

    def new_step(self, start: StepStart) -> Step:
        if not self._is_captured:
            return self._eager.new_step(start)
        from stand.gpu.guarded_step import GuardedStep
        from stand.gpu.pooled_step import PooledStep

        obstacle = self._obstacle_of(start)
        if obstacle is not None:
            warnings.warn(f"steps are eager in this call: {obstacle}", stacklevel=2)
        if obstacle is not None or start.law.needs_scores:
            if self._previous is not None and self._previous.is_free:
                self._previous.dissolve()  # admission has counted its pool as free
                self._previous = None
            return PooledStep.starting(self._model, start)
        if self._is_autocast:
            warnings.warn("steps are eager inside torch.autocast, whose types no recorded step has", stacklevel=2)
            return self._eager.new_step(start)
        step = GuardedStep.start(self._previous, self._model, start, fusion=self.fusion, on_failure=self._told())
        if self._is_captured:
            self._previous = step
        return step

    def new_recorder(self) -> RunRecorder | None:
        from stand.gpu.head_runs.recorder import HeadRecorder

        return HeadRecorder(self._model)

    def _obstacle_of(self, start: StepStart) -> str | None:
        """What a recorded step cannot do for this call, though the model and the rule are served."""
        from stand.gpu.step_body import LEARNED_ROWS

        if hook := foreign_hook(self._model):
            return f"{hook} is a hook, whose Python no recorded step runs"
        if name := expanding_layer(self._model):
            return f"the projection of latents in {name} is no plain matrix any more"
        if key_shape(self._model).are_expanded:
            return "the model was wrapped once more while its steps computed keys from latents; wrap it again"
        if start.num_top > LEARNED_ROWS:
            return f"the drafter learns {start.num_top} tokens of a node, a recorded step returns {LEARNED_ROWS}"
        return None

    def _told(self) -> Callable[[str], None]:
        """`_give_up`, without keeping this backend and its memory from ending with its engine."""
        give_up = WeakMethod(self._give_up)

        def on_failure(reason: str) -> None:
            if give_up() is not None:
                give_up()(reason)

        return on_failure

    def _give_up(self, reason: str) -> None:
        """Eager steps from now on."""
        self._is_captured, self.reason, self._previous = False, reason, None


def choose_backend(
    model: PreTrainedModel, verifier: Verifier, requested: str, *, fuse: bool, drafter: Drafter | None = None
) -> Backend:
    """Resolve "auto". Raises ValueError for an unknown name, or for "triton" where it cannot serve.

    drafter: one whose rider cannot be captured gets eager steps.
    """
    if requested not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {requested!r}; auto is usual")
    if requested == "sdpa":
        return _eager(model, "asked for", fuse=fuse)
    place = input_device(model).type
    if requested == "auto" and place != "cuda":
        return _eager(model, f"the model is on {place}, kernels are for CUDA", fuse=fuse)
    with exclusive(model):  # its forwards are swapped and its weights move: nobody may run it meanwhile
        return _proven(model, verifier, requested, fuse=fuse, drafter=drafter)


def _proven(
    model: PreTrainedModel, verifier: Verifier, requested: str, *, fuse: bool, drafter: Drafter | None
) -> Backend:
    """Captured steps where they pass their checks, as `choose_backend` says.

    Those of a mixture are tried fused at first: torch's own products of experts make the host wait, which no graph can
    hold, but for bfloat16 on sm_90 and sm_100 (pytorch #169970)."""
    rider = None if drafter is None else drafter.rider
    asked = {"feature_layers": None if drafter is None else drafter.asked_features, "rider": rider}
    fusion, unfused = None, ""  # and why there is none
    try:
        obstacle = kernel_obstacle(model, verifier, rider=rider)
        if obstacle is None and fuse and is_mixture(model):
            fusion, unfused = _fused(model, verifier, **asked)
        if obstacle is None and fusion is None:
            obstacle = _kernel_failure(model, verifier, **asked)
    except Exception as error:  # Triton's errors derive from Exception alone
        obstacle = _ended_in(error)
        if requested == "triton":
            raise ValueError(REFUSAL.format(obstacle + unfused)) from error
        LOGGER.warning("steps are eager: %s", obstacle, exc_info=error)
    if obstacle is not None and requested == "triton":
        raise ValueError(REFUSAL.format(obstacle + unfused))
    if obstacle is not None:
        return _eager(model, obstacle + unfused, fuse=fuse)
    if fuse and fusion is None and not unfused:
        fusion, unfused = _fused(model, verifier, **asked)
    reason = "asked for" if requested == "triton" else "the kernels serve this model"
    return CapturedBackend(model, reason + unfused, fusion=fusion)


def way_of_steps(model: PreTrainedModel, backend: Backend) -> str:
    """As `StepTimer` says. A model may be sharded after its engine was made."""
    name = "" if backend.name == "sdpa" and input_device(model).type == "cpu" else str(backend)
    if is_sharded(model):
        return f"{name} {off_one_device(model)}".strip()
    return name if backend.fusion is not None else f"{name} unfused".strip()


def _page_size(model: PreTrainedModel) -> int | None:
    """Slots per page where all of the model is on a CPU whose system maps memory as pages need it, and rows keep keys
    alone: pages do not count states."""
    if {parameter.device.type for parameter in model.parameters()} != {"cpu"} or not mapped_memory.is_available():
        return None
    if recurrent_layers(model):
        return None
    return fitting_page_size(key_shape(model).head_bytes)


def kernel_obstacle(model: PreTrainedModel, verifier: Verifier, *, rider: Rider | None = None) -> str | None:
    """What forbids captured steps for this model, with this rule and rider, before one is tried; None: nothing."""
    if rider is not None and not rider.is_capturable:
        return RIDER_OBSTACLE
    place = input_device(model)
    if place.type not in ("cpu", "meta") and not is_nvidia(place):
        got = "a torch that is built for ROCm" if place.type == "cuda" else f"a model on {place.type}"
        return f"the kernels are for NVIDIA GPUs, got {got}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from stand.gpu.device_rule import rule_like
    from stand.gpu.tuning.attention_tiles import limits_of, refusal

    if rule_like(verifier) is None:
        return f"rule {verifier.name!r} offers no device rule of its own"
    if is_offloaded(model):
        return "some of the model's weights are offloaded"
    if is_shared(model):
        return "processes share the model's weights"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        return f"the model lies on {len(devices)} devices"
    if is_nvidia(place) and (obstacle := refusal(limits_of(place))):
        return obstacle
    if torch.backends.cuda.matmul.fp32_precision not in {"none", "ieee"}:
        return "TF32 is on, which rounds rotary positions; call torch.set_float32_matmul_precision('highest')"
    if waiting_ropes(model):
        return f"rotary positions of kind {', '.join(waiting_ropes(model))} make the host wait"
    if key_shape(model).are_expanded:
        return "layers keep less of a token than its keys, and would compute those of the whole pool in every step"
    return None


def _kernel_failure(
    model: PreTrainedModel, verifier: Verifier, *, feature_layers: FeatureLayers | None, rider: Rider | None
) -> str | None:
    """Why a captured step that was tried cannot run the model, deliver its features or carry the rider, or None.

    Raises what a step with kernels raises."""
    from stand.gpu.self_check import kernel_failure

    return kernel_failure(model, verifier, feature_layers=feature_layers, rider=rider)


def _ended_in(error: Exception) -> str:
    return f"a step with kernels ends in {type(error).__name__}: {error}"


def _eager(model: PreTrainedModel, reason: str, *, fuse: bool) -> EagerBackend:
    """With proven fused forwards on a CPU; without them where that fails."""
    if not fuse or input_device(model).type != "cpu" or is_shared(model):
        return EagerBackend(model, reason)
    try:
        return EagerBackend(model, reason, fusion=fuse_on_cpu(model))
    except Exception as error:  # what a trial meets in a foreign model may be anything
        return EagerBackend(model, f"{reason}; not fused, because of {type(error).__name__}: {error}")


def _fused(
    model: PreTrainedModel, verifier: Verifier, *, feature_layers: FeatureLayers | None, rider: Rider | None
) -> tuple[Fusion | None, str]:
    """(proven fused forwards, checked once more all together; behind a reason, why there are none)"""
    from stand.fusion.fusion import fuse

    try:
        fusion = fuse(model)
    except Exception as error:  # Triton's errors derive from Exception alone
        return None, f"; not fused, because of {type(error).__name__}: {error}"
    try:
        with fusion.active():
            failure = _kernel_failure(model, verifier, feature_layers=feature_layers, rider=rider)
    except Exception as error:
        failure = _ended_in(error)
        LOGGER.warning("modules are not fused: %s", failure, exc_info=error)
    if failure is None:
        return fusion, ""
    fusion.undo()
    return None, f"; not fused, because {failure}"
