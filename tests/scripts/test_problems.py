"""The generated problems: true answers, true arithmetic, a clean split, bounded texts."""

import hashlib
import random
import re

import pytest
from workloads import problems, reasoning
from workloads.answers import extract_answer

EQUATION = re.compile(r"(?<![\d*+/^-] )\b(\d+) ([-+*]) (\d+) = (\d+)")
REGRET = re.compile(r"^, (wait, that is wrong,|no, wait,|hmm, no,|wait, let me redo this,)")


def drawn(family: str, count: int, *, held_out: bool = False) -> list[problems.Problem]:
    rng = random.Random(f"test {family} {held_out}")
    return [problems.draw_problem(rng, held_out=held_out, family=family) for _ in range(count)]


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def true_divisor(*operands: int) -> int:
    first, second = operands
    return max(k for k in range(1, second + 1) if first % k == 0 and second % k == 0)


def true_factors(*operands: int) -> int:
    number = 1
    for prime, exponent in zip(operands[::2], operands[1::2], strict=True):
        number *= prime**exponent
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return 2 * len(small) - (small[-1] ** 2 == number)


def true_recursion(start: int, factor: int, shift: int, count: int) -> int:
    return start if count == 1 else factor * true_recursion(start, factor, shift, count - 1) + shift


# Each answer again, by search rather than by the family's own formula.
TRUTH = {
    "remainder": lambda a, b, c, m: next(r for r in range(m) if (a * b + c - r) % m == 0),
    "power": lambda base, exponent, m: base**exponent % m,
    "divisor": true_divisor,
    "multiple": lambda a, b: next(k for k in range(a, a * b + 1) if k % a == 0 and k % b == 0),
    "equation": lambda a, b, c: next(x for x in range(c) if a * x + b == c),
    "digits": lambda number: sum(map(int, str(number))),
    "sequence": lambda start, step, count: [start + step * k for k in range(count)][-1],
    "series": lambda start, step, count: sum(start + step * k for k in range(count)),
    "recursion": true_recursion,
    "count": lambda low, high, k: sum(n % k == 0 for n in range(low, high + 1)),
    "factors": true_factors,
    "story": lambda boxes, each, given: sum([each] * boxes) - given,
    "animals": lambda heads, legs: next(r for r in range(heads) if 4 * r + 2 * (heads - r) == legs),
}


def false_equations(text: str) -> list[str]:
    """Sums, differences and products that are wrong and not taken back at once."""
    wrong = []
    for found in EQUATION.finditer(text):
        first, sign, second, value = found.groups()
        true = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(first), int(second))
        if true != int(value) and not REGRET.match(text[found.end() :]):
            wrong.append(found.group())
    return wrong


def test_truth_covers_every_family():
    assert set(TRUTH) == set(problems.FAMILIES)


@pytest.mark.parametrize("family", problems.FAMILIES)
def test_answer_is_true(family):
    for problem in drawn(family, 60):
        assert problem.answer == TRUTH[family](*problem.operands), problem


@pytest.mark.parametrize("family", problems.FAMILIES)
def test_statement_holds_the_operands(family):
    for problem in drawn(family, 20):
        missing = set(problem.operands) - set(numbers_in(problem.problem))
        # Sequences may be given by their first terms, and a recursion by its number of steps.
        assert family in ("sequence", "series", "recursion") or not missing, problem


@pytest.mark.parametrize("family", problems.FAMILIES)
def test_reasoning_is_true_and_ends_in_the_answer(family):
    rng = random.Random(family)
    for problem in drawn(family, 40):
        text = reasoning.write_reasoning(problem, rng)
        assert not false_equations(text), text
        assert text.count(problems.THINK_END) == 1
        assert text.endswith(f"\nAnswer: {problem.answer}")
        assert extract_answer(text) == problem.answer
        assert reasoning.SHORTEST_REASONING <= reasoning.count_pieces(text) <= reasoning.LONGEST_REASONING + 20


def test_false_equations_are_found():
    assert false_equations("First 3 * 4 = 13, 13 + 2 = 15.") == ["3 * 4 = 13"]
    assert false_equations("First 3 * 4 = 13, no, wait, 3 * 4 = 12.") == []


def test_slips_occur_and_are_taken_back():
    rng = random.Random(1)
    texts = [reasoning.write_reasoning(problems.draw_problem(rng, held_out=False), rng) for _ in range(300)]
    slips = sum(bool(re.search(r"wait, that is wrong|no, wait|hmm, no|redo this", text)) for text in texts)
    assert 20 < slips < 150


def test_reasonings_of_one_problem_differ():
    problem = drawn("equation", 1)[0]
    rng = random.Random(2)
    assert len({reasoning.write_reasoning(problem, rng) for _ in range(20)}) == 20


def test_same_seed_same_text():
    def text(seed: int) -> str:
        rng = random.Random(seed)
        problem = problems.draw_problem(rng, held_out=False)
        return problem.problem + reasoning.write_reasoning(problem, rng)

    assert text(3) == text(3)
    assert text(3) != text(4)


@pytest.mark.parametrize("family", problems.FAMILIES)
def test_split_is_disjoint(family):
    training = {problem.operands for problem in drawn(family, 200)}
    held_out = {problem.operands for problem in drawn(family, 20, held_out=True)}
    assert not training & held_out
    assert all(problems.is_held_out(family, operands) for operands in held_out)


def test_held_out_problems_are_different_and_stable():
    first = problems.held_out_problems(40, seed=1)
    assert first == problems.held_out_problems(40, seed=1)
    assert first[:10] == problems.held_out_problems(10, seed=1)
    assert len({(problem.family, problem.operands) for problem in first}) == 40
    assert first != problems.held_out_problems(40, seed=2)


def test_more_held_out_problems_than_there_are_are_refused():
    """They were looked for without end."""
    with pytest.raises(ValueError, match="got 1000, and `multiple` ends before; ask for 445 or fewer"):
        problems.held_out_problems(1000)
    assert len(problems.held_out_problems(445)) == 445


def test_problems_and_texts_stay_as_they_are():
    """The bundled models were trained on them, and held-out problems must stay unseen: no change may move one."""
    digest = hashlib.blake2b(digest_size=16)
    for seed in range(200):
        rng = random.Random(seed)
        problem = problems.draw_problem(rng, held_out=seed % 2 == 0)
        text = reasoning.write_reasoning(problem, rng)
        digest.update(repr((problem.problem, problem.answer, problem.family, problem.operands, text)).encode())
    for problem in problems.held_out_problems(130, seed=0):
        digest.update(repr((problem.problem, problem.answer, problem.family, problem.operands)).encode())
    assert digest.hexdigest() == "26ac8a2fdc4169602cbb43d5ea6dfa47"


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="family must be one of .* got 'algebra'"):
        problems.draw_problem(random.Random(0), held_out=False, family="algebra")
