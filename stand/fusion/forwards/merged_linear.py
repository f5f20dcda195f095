"""Linear layers with one input as one matrix product, over one allocation that their own weights are slices of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.modules import module as all_modules

from stand.forward.few_tokens.linear_layers import FewTokenForward
from stand.forward.recurrent.layers import RecurrentForward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STANDING_FOR_THE_CLASS = (FewTokenForward, RecurrentForward)  # forwards of ours that do what the class's own does
Forward = Callable[..., torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class MergedLinear:
    """Moves the parts' weights (and biases) into one tensor; each part's parameter then is a slice of it.

    The parameters stay the same objects with the same values, so state dictionaries, optimisers and the parts' own
    forwards see no difference; only their addresses change, here and in `separate`. No second copy is kept. Parts that
    already lie behind each other (merged for another engine) are taken over, and left, as they are.
    No gradient flows through the product, which `product` computes.
    """

    def __init__(self, parts: Sequence[nn.Linear]):
        self.parts = tuple(parts)
        self.sizes = [part.out_features for part in self.parts]
        self._is_own = not _are_adjacent([part.weight for part in self.parts])
        with torch.inference_mode(False), torch.no_grad():
            self.weight = _merged([part.weight for part in self.parts])  # [sum of sizes, in]
            has_bias = self.parts[0].bias is not None
            self.bias = _merged([part.bias for part in self.parts]) if has_bias else None  # [sum of sizes]
        self.product: Product = linear
        self._input: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., sum of sizes]."""
        return self.product(states, self.weight, self.bias)

    def split(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts' outputs [..., size] as slices of one output."""
        return self(states).split(self.sizes, dim=-1)

    def forwards(self) -> list[tuple[nn.Module, Forward]]:
        """Forwards for the parts of an owner that is not rewritten: the first computes all, the others take theirs."""
        return [(part, self._forward_of(index)) for index, part in enumerate(self.parts)]

    def clear(self) -> None:
        """Let go of outputs that nobody took."""
        self._input = None
        self._waiting.clear()

    def is_linked(self) -> bool:
        """Whether the parts' parameters still are the slices (moving a model to another device or dtype ends it)."""
        return all(_is_slice(*own) for own in self._slices())

    def separate(self) -> None:
        """Give every parameter memory of its own again; one that left by itself is not touched."""
        if not self._is_own:
            return
        with torch.inference_mode(False), torch.no_grad():
            for parameter, piece in list(self._slices()):
                if _is_slice(parameter, piece):
                    parameter.data = parameter.data.clone()

    def _slices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every parameter of the parts, and its place in the merged tensor."""
        for name, merged in (("weight", self.weight), ("bias", self.bias)):
            if merged is not None:
                yield from zip((getattr(part, name) for part in self.parts), merged.split(self.sizes), strict=True)

    def _forward_of(self, index: int) -> Forward:
        def forward(states: torch.Tensor) -> torch.Tensor:
            if index == 0:
                self._input = states
                self._waiting = dict(enumerate(self.split(states)))
            if self._input is not states or index not in self._waiting:
                return linear(states, self.parts[index].weight, self.parts[index].bias)
            output = self._waiting.pop(index)
            if not self._waiting:
                self._input = None
            return output

        return forward


def merge_refusal(parts: Sequence[nn.Module], tied: frozenset[int]) -> str:
    """Why these modules cannot share one matrix product, "" if they can.

    tied: ids of parameters that are used elsewhere too (see `tied_parameters`).
    """
    if any(type(part) is not nn.Linear for part in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
        return f"not all plain linear layers ({kinds}: an adapter or a quantised layer)"
    if any(not is_bare(part) for part in parts):
        return "a hook or a replaced forward on a part"
    if len({part.bias is None for part in parts}) > 1:
        return "a bias on some parts only"
    parameters = [parameter for part in parts for parameter in part.parameters()]
    if any(type(parameter) is not nn.Parameter or parameter.is_meta for parameter in parameters):
        return "weights that are not plain tensors (sharded, quantised or not loaded)"
    if any(parameter.is_inference() or not parameter.is_contiguous() for parameter in parameters):
        return "weights made in inference mode, or not contiguous"
    if any(id(parameter) in tied for parameter in parameters):
        return "weights shared with another module"
    weights, biases = [part.weight for part in parts], [part.bias for part in parts if part.bias is not None]
    if any(any(map(_is_piece, kind)) and not _are_adjacent(kind) for kind in (weights, biases)):
        return "weights that are pieces of a larger tensor, whose owner would lose them"
    kinds = {(part.in_features, parameter.dtype, parameter.device) for part in parts for parameter in part.parameters()}
    if len(kinds) > 1 or parameters[0].dtype not in DTYPES:
        return "parts of different inputs, dtypes or devices"
    return ""


def _is_piece(parameter: torch.Tensor) -> bool:
    """As a trainer's flat buffers have them, which an optimiser writes through."""
    return parameter.untyped_storage().nbytes() > parameter.nbytes


def is_bare(module: nn.Module) -> bool:
    """Whether calling the module computes what its class's forward does and runs nothing else."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    of_all = (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks)
    forward = vars(module).get("forward")
    return (forward is None or type(forward) in STANDING_FOR_THE_CLASS) and not any((*own, *of_all))


def tied_parameters(model: nn.Module) -> frozenset[int]:
    """Ids of parameters that two modules hold, or whose memory overlaps another parameter's."""
    spans: list[tuple[int, int, int]] = []
    for parameter in (p for _, p in model.named_parameters(remove_duplicate=False)):
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            spans.append((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, id(parameter)))
    spans.sort()
    tied: set[int] = set()
    reach, owner = 0, 0  # how far the memory seen so far goes, and whose it is
    for start, end, name in spans:
        if start < reach:
            tied |= {name, owner}
        if end > reach:
            reach, owner = end, name
    return frozenset(tied)


def _merged(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor that holds all of them along dimension 0; their data become its slices."""
    plain = [tensor.detach() for tensor in tensors]
    if _are_adjacent(plain):
        rows = sum(tensor.shape[0] for tensor in plain)
        return plain[0].as_strided((rows, *plain[0].shape[1:]), plain[0].stride(), plain[0].storage_offset())
    merged = torch.cat(plain)
    start = 0
    for tensor in tensors:
        tensor.data = merged.narrow(0, start, tensor.shape[0])
        start += tensor.shape[0]
    return merged


def _are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    place = tensors[0].storage_offset()
    for tensor in tensors:
        if not _is_same_storage(tensor, tensors[0]) or tensor.storage_offset() != place:
            return False
        place += tensor.numel()
    return True


def _is_slice(parameter: torch.Tensor, piece: torch.Tensor) -> bool:
    """Whether it lies in this very place: parts that are tied or exchanged share the storage, too."""
    is_alike = (parameter.dtype, parameter.shape, parameter.stride()) == (piece.dtype, piece.shape, piece.stride())
    is_there = parameter.storage_offset() == piece.storage_offset()
    return is_alike and is_there and _is_same_storage(parameter, piece)


def _is_same_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch._C._is_alias_of(tensor, other)
