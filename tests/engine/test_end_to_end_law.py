"""The bundled model through the whole engine: drafted output is distributed like plain sampling.

Independent of the exact tests. `scripts/check_law.py` runs the same on 20,000 continuations per arm and on more rules.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stand
from stand.trees import LookupTree, TreeShape

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
import check_law  # noqa: E402
from workloads.problems import held_out_problems, write_prompt  # noqa: E402

CONTINUATIONS, TOKENS = 400, 3  # per prompt and arm
FALSE_ALARM = 1e-4  # odds that an exact rule fails one comparison, were the seeds drawn anew


@pytest.fixture(scope="module")
def reasoner():
    model = AutoModelForCausalLM.from_pretrained(check_law.REASONER, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(check_law.REASONER)


@pytest.fixture(scope="module")
def plain_arm(reasoner):
    engine = stand.wrap(*reasoner, verifier="match")
    prompts = check_law.fixed_prompts(engine, 5)
    counts, _ = check_law.continuations(engine, prompts, CONTINUATIONS, tokens=TOKENS, seed=10**6, draft=False)
    return prompts, counts


@pytest.mark.parametrize(
    ("verifier", "kind", "lossless"),
    [("traversal", "sampled", True), ("traversal", "mixed", True), ("match", "deterministic", True)]
    + [("typical", "sampled", False)],
)
def test_continuations_follow_plain_sampling(reasoner, plain_arm, verifier, kind, lossless):
    prompts, expected = plain_arm
    engine = check_law.warmed_up(*reasoner, prompts, verifier=verifier, kind=kind)
    count = CONTINUATIONS if lossless else 2 * CONTINUATIONS  # the control must be seen, whatever the drafts
    seen, tokens_per_step = check_law.continuations(engine, prompts, count, tokens=TOKENS, seed=2 * 10**6, draft=True)
    assert tokens_per_step > 1.3  # drafts are in use
    comparison = check_law.compare(seen, expected)
    assert comparison.degrees_of_freedom >= 5
    assert (comparison.p_value > FALSE_ALARM) == lossless, comparison


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_tokens_are_those_of_plain_sampling(reasoner, verifier):
    engine = stand.wrap(*reasoner, verifier=verifier)
    texts = [write_prompt(problem.problem) for problem in held_out_problems(3, seed=1)]
    settings = {"num_return_sequences": 4, "max_new_tokens": 48, "temperature": 1.0, "seed": 5}
    plain = engine.generate(texts, **settings, draft=False)
    drafted = engine.generate(texts, **settings)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.mean_acceptance_length > 1.1


def test_coupled_drafts_share_the_verifiers_noise(reasoner):
    """Through the engine: plain sampling's tokens, in fewer steps than with noise of the drafter's own."""
    texts = [write_prompt(problem.problem) for problem in held_out_problems(6, seed=1)]
    settings = {"num_return_sequences": 4, "max_new_tokens": 40, "temperature": 1.5}
    steps, tokens = {}, {}
    for kind in ("sampled", "coupled"):
        drafter = stand.FixedShapeDrafter(LookupTree(), TreeShape.chain(2), kind=kind)
        engine = stand.wrap(*reasoner, verifier="coupled", drafter=drafter)
        engine.generate(texts, **settings, seed=77)
        output = engine.generate(texts, **settings, seed=5, learn=False)
        steps[kind], tokens[kind] = output.stats.num_steps, output.token_ids
    assert tokens["coupled"] == tokens["sampled"] == engine.generate(texts, **settings, seed=5, draft=False).token_ids
    assert steps["coupled"] < steps["sampled"]


def test_the_comparison_is_a_chi_square():
    """Under the null its mean is the degrees of freedom; p-values are spread evenly; a shifted arm is seen."""
    generator = np.random.default_rng(0)
    law, shifted = [0.4, 0.3, 0.2, 0.08, 0.02], [0.3, 0.4, 0.2, 0.08, 0.02]

    def arm(weights, count=800):
        return [Counter(generator.choice(5, size=count, p=weights).tolist()) for _ in range(3)]

    null = [check_law.compare(arm(law), arm(law, 500)) for _ in range(300)]
    freedom = np.mean([comparison.degrees_of_freedom for comparison in null])
    assert np.mean([comparison.statistic for comparison in null]) == pytest.approx(freedom, rel=0.1)
    assert np.mean([comparison.p_value < 0.1 for comparison in null]) == pytest.approx(0.1, abs=0.06)
    assert check_law.compare(arm(law), arm(shifted)).p_value < FALSE_ALARM


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_only_draws_on_a_border_excuse_a_difference(reasoner, verifier, monkeypatch):
    model, prompt = reasoner[0], list(range(5, 15))
    plain = stand.wrap(model, verifier=verifier).generate(input_ids=prompt, max_new_tokens=8, seed=5, draft=False)
    one = plain.token_ids[0]
    two = [*one[:6], one[6] + 1]
    arguments = {"verifier": verifier, "row": 0, "seed": 5}
    assert not check_law.is_near_border(model, prompt, one, two, **arguments)
    monkeypatch.setattr(check_law, "ROUNDING", 1.0)
    assert check_law.is_near_border(model, prompt, one, two, **arguments)
