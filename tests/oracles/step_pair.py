"""One generation by eager and by captured steps, over a lookup that has read the model's own samples."""

from collections.abc import Callable

from transformers import PreTrainedModel

import stand
from stand.drafters.blended import BlendedDrafter
from stand.gpu.device_cache import DeviceCache
from stand.gpu.packets import page_table
from stand.output import GenerationOutput
from stand.scheduling.within_pages import WithinPages
from stand.trees import BlendedLookup

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8], [9, 10, 9]]  # one with nothing before its only token
BUDGET = 16
HOT = {"temperature": 2e4, "top_p": 0.9}  # filters of so hot a law take eager steps
OTHER_STEPS = [{"repetition_penalty": 1.3}, HOT]  # than those of one graph: in two parts, and eager ones


def taught_lookup(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int) -> BlendedLookup:
    """A lookup that drafts much, and often rightly: it has read the model's own samples."""
    lookup = BlendedLookup()
    teacher = stand.wrap(model, drafter=BlendedDrafter(lookup, budget=BUDGET), backend="sdpa")
    teacher.generate(input_ids=prompts, num_return_sequences=3, max_new_tokens=max_new_tokens, temperature=0.4, seed=1)
    return lookup


class StepPair:
    """Engines over the model of each family.

    settings: of every generation; they must teach nothing, for all engines of a family have one lookup.
    """

    def __init__(self, model_of: Callable[[str], PreTrainedModel], **settings: object):
        self._model_of, self.settings = model_of, settings
        self._lookups: dict[str, BlendedLookup] = {}

    def taught_lookup(self, family: str) -> BlendedLookup:
        if family not in self._lookups:
            self._lookups[family] = taught_lookup(self._model_of(family), PROMPTS, 40)
        return self._lookups[family]

    def engine_of(
        self, family: str, *, backend: str = "triton", verifier: str = "traversal", fuse: bool = False
    ) -> stand.Engine:
        drafter = BlendedDrafter(self.taught_lookup(family), budget=BUDGET)
        return stand.wrap(self._model_of(family), verifier=verifier, backend=backend, drafter=drafter, fuse=fuse)

    def both(
        self, family: str, *, verifier: str = "traversal", captured: dict | None = None, **settings: object
    ) -> tuple[GenerationOutput, GenerationOutput]:
        """(eager, captured) outputs; captured: settings of the captured call alone."""
        settings = self.settings | settings
        eager = self.engine_of(family, backend="sdpa", verifier=verifier).generate(PROMPTS, **settings)
        engine = self.engine_of(family, verifier=verifier)
        output = engine.generate(PROMPTS, **settings | (captured or {}))
        assert str(engine.backend) == "triton"
        return eager, output


def put_back_after(monkeypatch, num_steps: int) -> None:
    """Whoever has made so many steps beside others is put back, or a younger row is, as if no page were left."""
    holds = WithinPages.holds
    monkeypatch.setattr(
        WithinPages, "holds", lambda self, live: holds(self, live) and all(one.num_steps != num_steps for one in live)
    )


def growing_pools(monkeypatch) -> list:
    """Pools begin as small as they can be; to what they have grown, as they do."""
    for name, value in (("FIRST_ROOM", 1), ("DRAFT_ROOM", 32), ("PROMPTS_AHEAD", 0)):
        monkeypatch.setattr(page_table, name, value)
    grow, sizes = DeviceCache.grow, []
    monkeypatch.setattr(DeviceCache, "grow", lambda one, size: (sizes.append(size), grow(one, size)))
    return sizes
