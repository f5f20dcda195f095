"""A verifier that asks others what they would have done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers import TargetRows, Verdicts, Verifier, VerifierNoise, get_verifier
from verifier_parts.drafters import RoomDrafter
from verifier_parts.drafts_and_rules import Arm, Size
from verifier_parts.expected_kept import expected_kept


class AskingVerifier(Verifier):
    """Decides as `driver` and asks every rule what it keeps on average of the same drafts, by prompt.

    rules: `coupled` only where it is the driver, whose own verdicts then count. rows: samples of each prompt. Steps
    count where `drafter` says that a row has room.
    """

    name = "asking"

    def __init__(self, driver: str, rules: Sequence[str], drafter: RoomDrafter, *, prompts: int, rows: int) -> None:
        self.driver = get_verifier(driver)
        self.requires = self.driver.requires
        self.drafter, self.rows = drafter, rows
        self.steps = np.zeros(prompts)
        self.kept = {rule: np.zeros(prompts) for rule in rules}

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        verdicts = self.driver.verify(batch, target, noise)
        counted = np.flatnonzero(self.drafter.has_room)
        prompts = noise.rows[counted] // self.rows
        np.add.at(self.steps, prompts, 1.0)
        for rule, kept in self.kept.items():
            if rule == "coupled":
                means = verdicts.num_accepted.astype(np.float64)
            else:
                means = expected_kept(get_verifier(rule), batch, target)
            np.add.at(kept, prompts, means[counted])
        return verdicts

    def result(self) -> dict[str, object]:
        """Steps of each prompt, and by rule the tokens that come of them on average."""
        totals = {rule: (kept + self.steps).tolist() for rule, kept in self.kept.items()}
        return {"steps": self.steps.tolist(), "tokens": totals}


class ArmVerifier(AskingVerifier):
    """Asks about one arm of the comparison, and watches its drafts: their nodes, and where `token` refuses chains."""

    def __init__(self, arm: Arm, size: Size, drafter: RoomDrafter) -> None:
        super().__init__(arm.driver, arm.rules, drafter, prompts=size.prompts, rows=size.rows)
        self.arm = arm
        self.nodes = 0
        self.first = np.zeros(2)  # drafted first tokens, and how many `token` keeps of them
        self.refused = np.zeros(2)  # chance that `token` refuses a token, and of that where p < q / 10

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        verdicts = super().verify(batch, target, noise)
        counted = np.flatnonzero(self.drafter.has_room)
        self.nodes += int(batch.sizes[counted].sum()) - len(counted)
        if self.arm.part == "chains":
            self._watch_refusals(batch, target, counted)
        return verdicts

    def _watch_refusals(self, batch: DraftBatch, target: TargetRows, counted: np.ndarray) -> None:
        """Along every chain: where `token` refuses, and whether the target would have had the token at all."""
        thresholds, _, _ = get_verifier("token").thresholds(batch, target)
        for row in counted.tolist():
            reached = 1.0
            for place, chance in enumerate(thresholds[batch.offsets[row] + 1 : batch.offsets[row + 1]].tolist()):
                if place == 0:
                    self.first += (1.0, chance)
                self.refused += (reached * (1.0 - chance), reached * (1.0 - chance) * (chance < 0.1))
                reached *= chance

    def result(self) -> dict[str, object]:
        answer = super().result()
        answer["nodes_per_step"] = self.nodes / self.steps.sum()
        if self.arm.part == "chains":
            answer["alpha"] = self.first[1] / self.first[0]
            answer["hopeless"] = self.refused[1] / self.refused[0]
        return answer
