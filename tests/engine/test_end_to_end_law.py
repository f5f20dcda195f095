"""The bundled model through the whole engine: drafted output is distributed like plain sampling.

Independent of the exact tests. `scripts/check_law.py` runs the same on 20,000 continuations per arm and on more rules.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from law_parts import continuations as drawn_continuations
from law_parts import token_check
from law_parts.continuation_law import ContinuationLaw, cells_of, compare, next_token_laws
from law_parts.continuations import WHOLE_LAW, continuations, fixed_prompts, law_of
from law_parts.engines import new_engine
from measuring.setup import REASONER
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads.problems import held_out_problems, write_prompt

import stand
from stand.trees import LookupTree, TreeShape

CONTINUATIONS, TOKENS, ROWS = 400, 3, 100  # per prompt and arm; rows of a call, which decide how large drafts are
FALSE_ALARM = 1e-4  # odds that an exact rule fails one comparison, were the seeds drawn anew


@pytest.fixture(scope="module")
def reasoner():
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(REASONER)


@pytest.fixture(scope="module")
def prompts(reasoner):
    return fixed_prompts(stand.wrap(*reasoner, verifier="match"), 5, WHOLE_LAW)


@pytest.fixture(scope="module")
def exact_laws(reasoner, prompts):
    return [law_of(reasoner[0], prompt, WHOLE_LAW, tokens=TOKENS, rows=CONTINUATIONS) for prompt in prompts]


@pytest.mark.long
@pytest.mark.parametrize(
    ("verifier", "kind", "lossless", "drafter"),
    [
        pytest.param("match", "none", True, "lookup", marks=pytest.mark.slow),
        pytest.param("traversal", "sampled", True, "lookup", marks=pytest.mark.slow),
        pytest.param("traversal", "mixed", True, "lookup", marks=pytest.mark.slow),
        pytest.param("match", "deterministic", True, "lookup", marks=pytest.mark.slow),
        ("typical", "sampled", False, "lookup"),
        ("traversal", "sampled", True, "blended"),
        pytest.param("traversal", "mixed", True, "blended", marks=pytest.mark.slow),
        pytest.param("traversal", "sampled", True, "eagle", marks=pytest.mark.slow),
        pytest.param("typical", "sampled", False, "blended", marks=pytest.mark.slow),
    ],
)
def test_continuations_follow_the_exact_law(
    reasoner, prompts, exact_laws, verifier, kind, lossless, drafter, monkeypatch
):
    monkeypatch.setattr(drawn_continuations, "MOST_ROWS", ROWS)
    arm = {"verifier": verifier, "kind": kind, "drafter": drafter}
    engine = new_engine(*reasoner, prompts, WHOLE_LAW, **arm)
    counters, stats = [], stand.Stats()
    for place, (prompt, law) in enumerate(zip(prompts, exact_laws, strict=True)):
        arguments = {"tokens": TOKENS, "seed": 2 * 10**6 + 1000 * place, "draft": kind != "none"}
        drawn, more = continuations(engine, prompt, CONTINUATIONS, WHOLE_LAW, **arguments)
        counters.append(cells_of(drawn, law))
        stats += more
    assert (stats.mean_acceptance_length > 1.3) == (kind != "none")  # drafts are in use
    comparison = compare(counters, exact_laws)
    assert comparison.degrees_of_freedom >= 5
    assert (comparison.p_value > FALSE_ALARM) == lossless, comparison


@torch.inference_mode()
def test_the_exact_law_is_the_product_of_the_model_s_laws(reasoner, prompts):
    """Cells cover everything once, and a whole continuation has the probability that one plain forward gives it."""
    model, prompt = reasoner[0], prompts[0]
    law = {"temperature": 0.7, "top_p": 0.9}
    found = law_of(model, prompt, law, tokens=TOKENS, rows=CONTINUATIONS)
    assert sum(found.cells.values()) == pytest.approx(1.0)
    whole = [cell for cell in found.cells if len(cell) == TOKENS]
    assert whole
    for cell in whole:
        logits = model(torch.tensor([[*prompt, *cell]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        laws = next_token_laws(logits, **law)
        assert found.cells[cell] == pytest.approx(float(laws[range(TOKENS), cell].prod()), rel=1e-4)


def test_a_continuation_belongs_to_its_longest_likely_beginning():
    law = ContinuationLaw({(): 0.1, (1,): 0.2, (1, 2): 0.4, (7,): 0.3}, frozenset({(), (1,)}))
    assert [law.cell_of(tokens) for tokens in ([1, 2], [1, 3], [4, 2], [7])] == [(1, 2), (1,), (), (7,)]


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
    texts = [write_prompt(problem.problem) for problem in held_out_problems(4, seed=1)]
    settings = {"num_return_sequences": 4, "max_new_tokens": 32, "temperature": 1.5}
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
    exact = [ContinuationLaw({(token,): chance for token, chance in enumerate(law)}, frozenset({()}))] * 3

    def arm(weights, count=400):
        drawn = [generator.choice(5, size=count, p=weights).tolist() for _ in range(3)]
        return [Counter((token,) for token in tokens) for tokens in drawn]

    null = [compare(arm(law), exact) for _ in range(300)]
    assert {comparison.degrees_of_freedom for comparison in null} == {9}  # the rarest joins the next one
    assert np.mean([comparison.statistic for comparison in null]) == pytest.approx(9, rel=0.1)
    assert np.mean([comparison.p_value < 0.1 for comparison in null]) == pytest.approx(0.1, abs=0.06)
    assert compare(arm(shifted), exact).p_value < FALSE_ALARM


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_only_draws_on_a_border_excuse_a_difference(reasoner, verifier, monkeypatch):
    model, prompt = reasoner[0], list(range(5, 15))
    plain = stand.wrap(model, verifier=verifier).generate(input_ids=prompt, max_new_tokens=8, seed=5, draft=False)
    one = plain.token_ids[0]
    two = [*one[:6], one[6] + 1]
    arguments = {"law": WHOLE_LAW, "verifier": verifier, "row": 0, "seed": 5}
    assert not token_check.is_near_border(model, prompt, one, two, **arguments)
    monkeypatch.setattr(token_check, "ROUNDING", 1.0)
    assert token_check.is_near_border(model, prompt, one, two, **arguments)
    for part, whole in ((one[:6], one), (one, one[:6])):  # a row that ends too early ended the check with a traceback
        assert not token_check.is_near_border(model, prompt, part, whole, **arguments)
