"""Options of the doors of serving engines: given by name, or in the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from stand.plugins.saving import check_can_be_written
from stand.sharing.exchange import Exchange
from stand.trees import BlendedLookup

LOGGER = logging.getLogger("stand")
FILES = ("lookup", "save")
COUNTS = ("budget", "text_tokens", "report_every", "laws")
PREFIX = "STAND_"  # of names in the environment: STAND_FLOOR is `floor`
OTHERS = ("COSTS", "DEBUG", "PORTABLE", "PTX", "SGLANG_SOURCE")  # that mean something elsewhere
ALL, PAYING = DRAFTS = ("all", "paying")


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """lookup: a file to start from. save: a file that a `Saver` writes; it may be the same one. share: a folder in
    which processes tell each other what they learn (`Exchange`). max_bytes: memory cap of the lookup. fade: see
    `BlendedLookup`. floor: no draft token that is less likely to be accepted, in [0, 1]. budget: the most draft tokens
    of all rows of a step together, 0 for no bound beside the engine's own. drafts: "paying" for those that pay by the
    times of earlier steps, "all" for what the bounds allow; of vLLM alone. text_tokens: tokens of prompts and corpora
    that are learned per step; 0: they are not learned. report_every: steps of single rows between two lines in the log;
    0: none. laws: entries of the target's law that are learned at every verified node, 10 is usual; 0: tokens are
    learned.
    """

    lookup: str = ""
    save: str = ""
    share: str = ""
    max_bytes: int = 256 << 20
    fade: float = 0.95
    floor: float = 0.0
    budget: int = 0
    drafts: str = PAYING
    text_tokens: int = 512
    report_every: int = 100_000
    laws: int = 0

    @classmethod
    def read(
        cls, given: object = None, environment: Mapping[str, str] = os.environ, *, rank: int | None = None
    ) -> ServingOptions:
        """given: a mapping, which goes before the environment; None is as if it was not there. rank: what `{rank}`
        becomes in the names of files.

        Raises ValueError for an unknown name, a bad value, and a file that could not be written."""
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(
                f"options must be a mapping of names to values, got {type(given).__name__}; pass a dict, or None"
            )
        kinds = {field.name: type(field.default) for field in fields(cls)}
        unknown = set(given or ()) - set(kinds)
        if unknown:
            got = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"options must be among {', '.join(kinds)}, got {got}; leave others out")
        names = {PREFIX + name.upper() for name in (*kinds, *OTHERS)}
        if strangers := sorted(name for name in environment if name.startswith(PREFIX) and name not in names):
            LOGGER.warning("STAND: nothing in the environment is named %s; check the spelling", ", ".join(strangers))
        values = {name: environment[PREFIX + name.upper()] for name in kinds if PREFIX + name.upper() in environment}
        values |= {name: value for name, value in (given or {}).items() if value is not None}  # null: as left out
        converted = {name: _converted(name, value, kinds[name]) for name, value in values.items()}
        if rank is not None:
            converted |= {name: converted[name].replace("{rank}", str(rank)) for name in FILES if name in converted}
        options = cls(**converted)
        if options.save:
            check_can_be_written(options.save, "save")
        return options

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}; leave it out for the default")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}; 0 drafts everything")
        if not 0 < self.fade <= 1:  # also where a file's own counts
            raise ValueError(f"fade must be in (0, 1], got {self.fade}; leave it out for the default")
        if self.drafts not in DRAFTS:
            raise ValueError(f"drafts must be one of {', '.join(DRAFTS)}, got {self.drafts!r}; {PAYING} is usual")

    def new_exchange(self, lookup: BlendedLookup, *, vocabulary_size: int, numbers: int) -> Exchange | None:
        """The lookup's place in the folder, where one is given. Raises ValueError where that cannot be written to."""
        if not self.share:
            return None
        return Exchange(self.share, lookup, vocabulary_size=vocabulary_size, numbers=numbers)

    def new_lookup(self) -> BlendedLookup:
        """The lookup of the file, or an empty one. Raises OSError, LookupFileError, and ValueError for a bad value."""
        is_first_run = self.lookup == self.save and not Path(self.lookup).exists()
        if self.lookup and not is_first_run:
            lookup = BlendedLookup.load(self.lookup, max_bytes=self.max_bytes)
            if self.fade not in (lookup.fade, ServingOptions().fade):
                LOGGER.warning(
                    "STAND: fade %g has no effect on %s, which has its own, %g", self.fade, self.lookup, lookup.fade
                )
            return lookup
        return BlendedLookup(max_bytes=self.max_bytes, fade=self.fade)


def _converted(name: str, value: object, kind: type) -> object:
    try:
        is_path = isinstance(value, (str, os.PathLike))
        if isinstance(value, bool) or (kind is int and isinstance(value, float)) or (kind is str and not is_path):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be of type {kind.__name__}, got {value!r}; leave it out for the default"
        ) from None
