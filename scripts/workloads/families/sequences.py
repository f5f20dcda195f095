"""Problems about sums and sequences: digits, arithmetic sequences, recursions, with their written-out solutions."""

from __future__ import annotations

import random

from workloads.families.family import Family
from workloads.families.scratch import Scratch

# --- digit sums ------------------------------------------------------------------------------------------


def draw_digits(rng: random.Random) -> tuple[int, ...]:
    return (rng.randint(10_000, 999_999),)


def state_digits(scratch: Scratch, number: int) -> str:
    return scratch.pick(
        f"What is the sum of the digits of {number}?",
        f"Find the digit sum of {number}.",
        f"Add all digits of {number}. What do you get?",
    )


def answer_digits(number: int) -> int:
    return sum(int(digit) for digit in str(number))


def running_sum(scratch: Scratch, terms: list[int]) -> str:
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(scratch.fact(f"{total} + {term}", total + term))
        total += term
    return ", ".join(steps)


def digits_forward(scratch: Scratch, number: int) -> str:
    digits = [int(digit) for digit in str(number)]
    first = scratch.pick("The digits are", "Write out the digits:", "Reading from the left, the digits are")
    then = scratch.pick("Add them one by one:", "Running total:", "Add step by step:")
    return f"{first} {', '.join(map(str, digits))}. {then} {running_sum(scratch, digits)}."


def digits_backward(scratch: Scratch, number: int) -> str:
    digits = [int(digit) for digit in reversed(str(number))]
    first = scratch.pick("From the right, the digits are", "Backwards the digits are", "In reverse order:")
    then = scratch.pick("Add them one by one:", "Running total:", "Add step by step:")
    return f"{first} {', '.join(map(str, digits))}. {then} {running_sum(scratch, digits)}."


DIGITS = Family(draw_digits, state_digits, answer_digits, digits_forward, digits_backward, True)


# --- arithmetic sequences --------------------------------------------------------------------------------


def draw_sequence(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(1, 30), rng.randint(2, 9), rng.randint(6, 20)


def state_sequence(scratch: Scratch, start: int, step: int, count: int) -> str:
    return scratch.pick(
        f"An arithmetic sequence starts {start}, {start + step}, {start + 2 * step}. What is term {count}?",
        f"The first term of an arithmetic sequence is {start} and the difference is {step}. Find term {count}.",
        f"Start at {start} and add {step} at every step. Which number is term {count}?",
    )


def answer_sequence(start: int, step: int, count: int) -> int:
    return start + (count - 1) * step


def sequence_by_formula(scratch: Scratch, start: int, step: int, count: int) -> str:
    first = scratch.pick(
        f"The difference is {step}, and from term 1 to term {count} there are {count} - 1 = {count - 1} steps.",
        f"Term {count} is {count - 1} steps after the first term, and every step adds {step}.",
        f"We add {step} exactly {count - 1} times.",
    )
    then = scratch.pick("Add the first term:", "Add the start:", "Now add the first term:")
    return f"{first} {scratch.multiply(count - 1, step)}. {then} {scratch.add((count - 1) * step, start)}."


def sequence_by_tenth(scratch: Scratch, start: int, step: int, count: int) -> str:
    begin, value = (6, start + 5 * step) if count < 12 else (11, start + 10 * step)
    first = scratch.pick(f"Go through term {begin}:", f"Use term {begin}:", f"Start from term {begin}:")
    jump = f"{begin - 1} * {step} = {(begin - 1) * step}, {scratch.add((begin - 1) * step, start)}"
    steps = []
    for index in range(begin + 1, count + 1):
        steps.append(f"term {index}: {scratch.fact(f'{value} + {step}', value + step)}")
        value += step
    walk = f" {scratch.pick('Then', 'Now walk on:', 'From there')} {', '.join(steps)}." if steps else ""
    return f"{first} {jump}.{walk}"


SEQUENCE = Family(draw_sequence, state_sequence, answer_sequence, sequence_by_formula, sequence_by_tenth, True)


# --- sums of sequences -----------------------------------------------------------------------------------


def draw_series(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(1, 12), rng.randint(1, 6), rng.randint(4, 8)


def state_series(scratch: Scratch, start: int, step: int, count: int) -> str:
    return scratch.pick(
        f"Find the sum of the first {count} terms of the sequence {start}, {start + step}, {start + 2 * step}, ...",
        f"An arithmetic sequence has first term {start} and difference {step}. "
        f"What do its first {count} terms add up to?",
        f"Add {count} numbers that start at {start} and grow by {step}. What is the total?",
    )


def answer_series(start: int, step: int, count: int) -> int:
    return sum(range(start, start + step * count, step))


def series_by_adding(scratch: Scratch, start: int, step: int, count: int) -> str:
    terms = [start + step * index for index in range(count)]
    first = scratch.pick("The terms are", "Write out the terms:", f"The {count} terms are")
    then = scratch.pick("Add them one by one:", "Running total:", "Add step by step:")
    return f"{first} {', '.join(map(str, terms))}. {then} {running_sum(scratch, terms)}."


def series_by_pairing(scratch: Scratch, start: int, step: int, count: int) -> str:
    last = start + step * (count - 1)
    first = scratch.pick("Use first plus last.", "Pair the first and the last term.", "There is a formula for this.")
    total = (start + last) * count
    return (
        f"{first} The last term is {last}, and {scratch.add(last, start)}. "
        f"Times {count}: {scratch.multiply(count, start + last)}. Half of {total} is {total // 2}."
    )


SERIES = Family(draw_series, state_series, answer_series, series_by_adding, series_by_pairing, True)


# --- recursions ------------------------------------------------------------------------------------------


def draw_recursion(rng: random.Random) -> tuple[int, ...]:
    while True:
        operands = rng.randint(1, 9), rng.randint(2, 3), rng.randint(1, 9), rng.randint(3, 6)
        if answer_recursion(*operands) <= 300:
            return operands


def state_recursion(scratch: Scratch, start: int, factor: int, shift: int, count: int) -> str:
    return scratch.pick(
        f"A sequence starts with {start}. Every next term is {factor} times the last one plus {shift}. "
        f"What is term {count}?",
        f"Let x1 = {start} and let each new term be {factor} * x + {shift}. Find x{count}.",
        f"Begin with {start}. Multiply by {factor} and add {shift}, {count - 1} times in all. What is the result?",
    )


def answer_recursion(start: int, factor: int, shift: int, count: int) -> int:
    for _ in range(count - 1):
        start = start * factor + shift
    return start


def recursion_by_terms(scratch: Scratch, start: int, factor: int, shift: int, count: int) -> str:
    first = scratch.pick("Go term by term.", "Just compute the terms.", "Follow the rule step by step.")
    value, steps = start, [f"x1 = {start}."]
    for index in range(2, count + 1):
        product = scratch.multiply(factor, value)
        steps.append(f"x{index}: {product}, {scratch.fact(f'{value * factor} + {shift}', value * factor + shift)}.")
        value = value * factor + shift
    return f"{first} {' '.join(steps)}"


def recursion_backwards(scratch: Scratch, start: int, factor: int, shift: int, count: int) -> str:
    value, steps = answer_recursion(start, factor, shift, count), []
    first = scratch.pick(f"Go back from {value}:", f"Undo the steps from {value}:", f"Walk backwards from {value}:")
    for _ in range(count - 1):
        before = (value - shift) // factor
        steps.append(f"{scratch.fact(f'{value} - {shift}', value - shift)}, {value - shift} / {factor} = {before}.")
        value = before
    return f"{first} {' '.join(steps)} {scratch.pick('We are back at', 'That is the start,')} {start}."


RECURSION = Family(draw_recursion, state_recursion, answer_recursion, recursion_by_terms, recursion_backwards, False)
