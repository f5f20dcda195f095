"""What trained parts beside a frozen target have in common: whose they are, the tokens that they guess, and the file
they are saved in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from stand.forward.devices import is_offloaded
from stand.forward.few_tokens.linear_layers import few_token_layers

FAMILIES = ("llama", "qwen2")  # of targets
WEIGHT_FILE = "model.safetensors"
VOCABULARY = "vocabulary"  # its name in the file
OF_TOKENS = (VOCABULARY, "d2t", "t2d")  # tensors of a file that are no weights
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights in a file
MOST_OF_A_REASON = 120  # characters: torch's texts are long, and some advise what is unsafe
OTHER_WORK = 1.5  # LM head, plans and laws of a run, in decoder layers: what two cores take with two small models


class TrainedPart(nn.Module):
    """A module that uses the target's own parts and has parameters of its own.

    It guesses tokens by the target's LM head; of a large vocabulary by the rows of frequent tokens alone, where
    `restrict` names them (FR-Spec, arXiv 2502.14856). That changes what is guessed, never what the target says.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        if not isinstance(target, PreTrainedModel):
            raise ValueError(
                f"{type(self).__name__} must have a transformers model as its target, got {type(target).__name__}; "
                "load the model first"
            )
        if is_offloaded(target):
            raise ValueError(
                f"{type(self).__name__} must have its model's weights at hand, got a model with weights offloaded; "
                "load it without offloading, or draft by the lookup alone"
            )
        self._model = (target,)  # in tuples, so that the target's parameters are not this part's
        self.vocabulary: torch.Tensor | None = None  # [W] int64, ascending: the tokens that are guessed; None: all
        self._lm_head = (target.get_output_embeddings(),)  # or its rows of the vocabulary
        self._path: str | PathLike | None = None  # that `of` has read it from

    @classmethod
    @abstractmethod
    def load(cls, target: PreTrainedModel, path: str | PathLike) -> Self:
        """Read what `save` has written. Raises ValueError where it does not belong to this target."""

    @classmethod
    def of(cls, target: PreTrainedModel, part: Self | str | PathLike) -> Self:
        """`part`, read where it is a path, and again where it was read so for another model, or before this one was
        moved or cast. Raises ValueError where a part that was no path is another model's, or older than that."""
        name = cls.__name__
        if not isinstance(part, (cls, str, PathLike)):
            raise ValueError(f"{name} must be one, a file or a folder, got {type(part).__name__}; pass the path")
        path = part._path if isinstance(part, cls) else part
        if path is not None and not (isinstance(part, cls) and part.is_of(target) and part._is_where(target)):
            part = cls.load(target, path)
            part._path = path
        if not part.is_of(target):
            raise ValueError(
                f"{name} must be the wrapped model's own, got one that was made for another model; make it with "
                f"{name}.load(model, path), or pass the path"
            )
        if not part._is_where(target):
            own = next(part.parameters())
            raise ValueError(
                f"{name} must be where its model is, in {target.dtype} on {target.device}, got {own.dtype} on "
                f"{own.device}; make it anew behind model.to(...), or pass the path"
            )
        return part

    def restrict(self, token_ids: Sequence[int] | torch.Tensor) -> None:
        """Guess these tokens alone. Raises ValueError as `checked_vocabulary`."""
        self.vocabulary = self.checked_vocabulary(token_ids)
        self._lm_head = (rows_of(self._model[0].get_output_embeddings(), self.vocabulary),)

    def narrowed(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Guess those of these tokens alone that are guessed so far; their places [W] int64 among these, ascending, for
        whoever has an LM head of its own. Raises ValueError as `checked_vocabulary`, and where there is none."""
        wanted = self.checked_vocabulary(token_ids)
        own = torch.arange(self.num_guessed, device=wanted.device) if self.vocabulary is None else self.vocabulary
        places = torch.isin(own, wanted).nonzero()[:, 0]
        if len(places) == 0:
            raise ValueError(f"a vocabulary must have tokens that the head knows, got {len(wanted)} others; add some")
        self.vocabulary = own[places]
        return places

    def checked_vocabulary(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Ids, int64, ascending. Raises ValueError for none, for tokens that the target does not have, and for other
        numbers than integers."""
        weight = self._model[0].get_output_embeddings().weight
        try:
            given = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"a vocabulary must hold token ids, got {token_ids!r:.80}; give integers") from error
        if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
            raise ValueError(f"a vocabulary must hold token ids, got numbers of {given.dtype}; give integers")
        vocabulary = given.to(torch.int64).unique()
        size = weight.shape[0]
        if len(vocabulary) == 0 or vocabulary[0] < 0 or vocabulary[-1] >= size:
            got = "none" if len(vocabulary) == 0 else f"{int(vocabulary[0])} to {int(vocabulary[-1])}"
            raise ValueError(
                f"a vocabulary must be some tokens from 0 to {size - 1}, got {got}; give the target's own ids"
            )
        return vocabulary.to(weight.device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Behind `to` and its like: rows of the LM head that are this part's own go along, the target's do not."""
        super()._apply(fn, recurse)
        if self.vocabulary is not None:
            self._lm_head[0]._apply(fn)
            self.vocabulary = fn(self.vocabulary)
        return self

    def best_tokens(
        self, features: torch.Tensor, *, temperature: float, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens after features [..., D]: ids [..., K] int32, probabilities [..., K] float32 among all
        that are guessed, K the smaller of `count` and their number."""
        with few_token_layers(self._lm_head[0]):
            logits = self._lm_head[0](features)
        best, probs = likeliest(logits, temperature=temperature, count=count)
        ids = best if self.vocabulary is None else self.vocabulary[best]
        return ids.to(torch.int32), probs

    @property
    def num_guessed(self) -> int:
        """Tokens that may be guessed."""
        return self._lm_head[0].weight.shape[0]

    @abstractmethod
    def layers_of_a_run(self) -> Sequence[nn.Module]:
        """The decoder layers that a run goes through, its own or the target's."""

    def weights_of_a_run(self) -> Sequence[nn.Module]:
        """The modules that a run reads."""
        return [self, *self.layers_of_a_run(), self._lm_head[0]]

    @property
    def is_recordable(self) -> bool:
        """Whether a run never waits for the device."""
        return True

    def modules_of_a_run(self) -> Sequence[nn.Module]:
        """All that a run goes through, the target's parts among it."""
        return [self, self._model[0].get_input_embeddings(), self._lm_head[0]]

    def share_of_step(self) -> float:
        """What a run costs of a forward of the target: of the weights that it reads, or of the layers that it goes
        through, whichever is the larger share. Beside its layers a run has OTHER_WORK, the forward its LM head."""
        target = self._model[0]
        own, all_layers = self.layers_of_a_run(), target.get_decoder().layers
        weights = _num_weights(self.weights_of_a_run())
        share = weights / _num_weights([*all_layers, target.get_output_embeddings()])
        return max(share, (len(own) + OTHER_WORK) / (len(all_layers) + 1))

    def save(self, folder: str | PathLike) -> None:
        """Write model.safetensors in bfloat16, and the vocabulary: nothing of the target is in it."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        if self.vocabulary is not None:
            tensors[VOCABULARY] = self.vocabulary.to(torch.int32).contiguous()
        save_file(tensors, Path(folder) / WEIGHT_FILE, metadata={"format": "pt"})

    def is_of(self, target: PreTrainedModel) -> bool:
        """Whether this part was made for this very model."""
        return self._model[0] is target

    def _is_where(self, target: PreTrainedModel) -> bool:
        """Whether it lies on the target's device, in its dtype."""
        own = next(self.parameters())
        return (own.device, own.dtype) == (target.device, target.dtype)


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tensors by name, all finite, weights in one of DTYPES, of a file, or of the first of `names` in a folder.

    Raises ValueError where there is none, or a damaged one.
    """
    file, tensors = _opened(path, names)
    for name, value in tensors.items():
        if value.dtype not in DTYPES and name not in OF_TOKENS:
            raise ValueError(
                f"{name} in {file} must hold floats of 16, 32 or 64 bits, got {value.dtype}; dequantise it first"
            )
        if not value.isfinite().all():
            raise ValueError(f"{name} in {file} must be finite, got NaN or infinities; train or fetch it again")
    return dict(tensors)


def tensor_names(path: Path, names: Sequence[str]) -> set[str]:
    """Those of what `read_tensors` would read; no weights are read of a safetensors file. Raises ValueError alike."""
    return set(_opened(path, names, load=_header)[1])


def _header(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), torch.empty(0))


def _opened(
    path: Path, names: Sequence[str], *, load: Callable[[Path], Mapping[str, torch.Tensor]] = load_file
) -> tuple[Path, Mapping[str, torch.Tensor]]:
    """load: for a safetensors file."""
    files = [path] if path.is_file() else [path / name for name in names if (path / name).is_file()]
    if not files:
        raise ValueError(f"a trained part must be a file or a folder with {' or '.join(names)}, got {path}; check it")
    file = files[0]
    try:
        is_safe = file.suffix == ".safetensors"
        tensors = load(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # either library has many, and few name the file
        raise ValueError(
            f"{file} must hold tensors, got {type(error).__name__}: {reason_of(error)}; fetch or write it again"
        ) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ValueError(f"{file} must hold tensors by name, got {type(tensors).__name__}; write its state_dict()")
    return file, tensors


def reason_of(error: Exception) -> str:
    """The beginning of what another library says."""
    return str(error).strip().partition("\n")[0][:MOST_OF_A_REASON]


def _num_weights(modules: Sequence[nn.Module]) -> int:
    return sum({id(part): part.numel() for module in modules for part in module.parameters()}.values())


def rows_of(layer: nn.Linear, rows: torch.Tensor) -> nn.Linear:
    """A frozen layer with these of its outputs."""
    part = nn.Linear(layer.in_features, len(rows), bias=layer.bias is not None, device="meta")
    for name, parameter in layer.named_parameters():
        setattr(part, name, nn.Parameter(parameter.detach()[rows], requires_grad=False))
    return part


def likeliest(logits: torch.Tensor, *, temperature: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places [..., K] int64 of the largest of logits [..., W], and their probabilities [..., K] float32 among all W.

    A law that is not finite says nothing: its probabilities are 0, so that one overflow costs a draft and not the call.
    """
    law = torch.softmax(logits.float() / temperature, dim=-1)
    best = torch.topk(law, min(count, law.shape[-1]), dim=-1)
    return best.indices, best.values.nan_to_num(nan=0.0)


def check_shapes(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError for a tensor of a checkpoint that has another shape than the head's."""
    for name, value in tensors.items():
        if tuple(value.shape) != shapes[name]:
            raise ValueError(
                f"{name} must be {list(shapes[name])} for this target, got {list(value.shape)}; take the head that was "
                "trained for this model"
            )


def named(tensors: Sequence[str]) -> str:
    """The first of them."""
    return ", ".join(tensors[:4]) or "nothing"
