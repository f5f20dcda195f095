"""What the steps of a running block share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ptx.ledger import Clock
from ptx.memory import Allocation, CopyGroups, Space

Step = Callable[[np.ndarray], None]  # takes the mask of threads that run it


@dataclass
class State:
    """Of a block: its threads, memory and clock."""

    num_threads: int
    memory: Space | None = None  # of the launch
    shared: Space | None = None  # of the block
    clock: Clock | None = None
    copies: CopyGroups = field(default_factory=CopyGroups)

    @property
    def shared_allocation(self) -> Allocation:
        return self.shared.allocations[0]
