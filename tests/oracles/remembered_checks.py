"""What `wrap` has checked is not checked anew: the suite wraps a few tiny models some two thousand times.

A model passes again as long as its modules, their forwards and settings are those that have passed. Remembered is what
has passed alone, in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import pytest
from transformers import PreTrainedModel

from stand.forward.model import text_config
from stand.forward.module_code import code_of
from stand.fusion.forwards.merged_linear import is_bare
from stand.fusion.guard import plain_values

CALLERS = ("stand.wrapping", "stand.drafters.draft_model")  # of the check of models; that of kernels is looked up anew


class PassedChecks:
    """Of one process."""

    def __init__(self) -> None:
        self._passed: WeakKeyDictionary[PreTrainedModel, list[tuple]] = WeakKeyDictionary()

    @contextmanager
    def skipped(self, own: str) -> Iterator[None]:
        """Within it what has passed is not checked again. own: under which alone what passes is known, if not ""."""
        with pytest.MonkeyPatch.context() as patch:
            for module in [sys.modules[name] for name in CALLERS if name in sys.modules]:
                patch.setattr(module, "check_model", self._models_once(module.check_model, own))
            if kernels := sys.modules.get("stand.gpu.self_check"):
                patch.setattr(kernels, "kernel_failure", self._kernels_once(kernels.kernel_failure, own))
            yield

    def _models_once(self, check_model: Callable, own: str) -> Callable:
        def once(model) -> None:
            key = isinstance(model, PreTrainedModel) and ("model", state_of(model))
            if not key or not self._has_passed(model, key, own):
                check_model(model)
                if key:
                    self._passed.setdefault(model, []).append((own, key))

        return once

    def _kernels_once(self, kernel_failure: Callable, own: str) -> Callable:
        def once(model, verifier, **asked) -> str | None:
            if asked.get("rider") is not None:  # another one each time
                return kernel_failure(model, verifier, **asked)
            key = "kernels", type(verifier), dict(getattr(verifier, "__dict__", {})), asked, state_of(model)
            if self._has_passed(model, key, own):
                return None
            found = kernel_failure(model, verifier, **asked)
            if found is None:
                self._passed.setdefault(model, []).append((own, key))
            return found

        return once

    def _has_passed(self, model: PreTrainedModel, key: tuple, own: str) -> bool:
        return any(name in ("", own) and known == key for name, known in self._passed.get(model, ()))


def state_of(model: PreTrainedModel) -> tuple:
    """What a check depends on, but for the weights: who changes them takes a model of his own."""
    modules = [
        (name, id(module), getattr(vars(module).get("forward"), "__code__", None), is_bare(module), code_of(module),
         plain_values(module))
        for name, module in model.named_modules()
    ]  # fmt: skip
    return model.dtype, model.training, plain_values(text_config(model)), modules
