"""Problems with integer answers and varied written-out reasoning, for the bundled model.

Every family draws small operands, states a problem in one of several phrasings and knows two ways to work it
out. `write_reasoning` picks an order of the ways, a wording for every step, an occasional slip that is noticed
and corrected, and a recheck. Trajectories of one problem therefore repeat themselves and each other without
being equal, as those of a large reasoning model do.

A text reads

    <|problem|>STATEMENT<|think|>REASONING</think>
    Answer: N<|end|>

and a prompt is the part up to and including `<|think|>`. Problems are split by a hash of family and operands:
one in `HELD_OUT_ONE_IN` is held out, whatever its phrasing, and is never trained on.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

PROBLEM_TOKEN = "<|problem|>"
THINK_TOKEN = "<|think|>"
THINK_END = "</think>"
END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"

HELD_OUT_ONE_IN = 12
SLIP_RATE = 0.025  # probability that a computed fact is first written down wrongly, then corrected
SHORTEST_REASONING = 130  # in pieces of `count_pieces`; a shorter reasoning is rechecked once more
LONGEST_REASONING = 560


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its statement, its integer answer, its family and the operands it was drawn with."""

    problem: str
    answer: int
    family: str
    operands: tuple[int, ...]


class Scratch:
    """A sheet of scratch paper: words are chosen at random, numbers are computed."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.slip_left = rng.random() < 0.5

    def pick(self, *templates: str) -> str:
        """One of the templates, evenly."""
        return templates[self.rng.randrange(len(templates))]

    def fact(self, left: str, value: int) -> str:
        """`left = value`, now and then with a slip that is noticed at once."""
        if not self.slip_left or self.rng.random() >= SLIP_RATE:
            return f"{left} = {value}"
        self.slip_left = False
        wrong = value + self.rng.choice((-10, -2, -1, 1, 2, 10))
        if wrong < 0:
            wrong = value + 1
        regret = self.pick("wait, that is wrong,", "no, wait,", "hmm, no,", "wait, let me redo this,")
        return f"{left} = {wrong}, {regret} {left} = {value}"

    def add(self, first: int, second: int) -> str:
        """`first + second`, through the tens when the second is large."""
        tens, units = second - second % 10, second % 10
        if tens == 0 or units == 0 or first < 10:
            return self.fact(f"{first} + {second}", first + second)
        steps = self.fact(f"{first} + {tens}", first + tens)
        return f"{steps}, {self.fact(f'{first + tens} + {units}', first + second)}"

    def subtract(self, first: int, second: int) -> str:
        """`first - second`, through the tens when the second is large."""
        tens, units = second - second % 10, second % 10
        if tens == 0 or units == 0 or first < 20:
            return self.fact(f"{first} - {second}", first - second)
        steps = self.fact(f"{first} - {tens}", first - tens)
        return f"{steps}, {self.fact(f'{first - tens} - {units}', first - second)}"

    def multiply(self, first: int, second: int) -> str:
        """`first * second`, with the larger factor split into tens and units."""
        small, large = min(first, second), max(first, second)
        tens, units = large - large % 10, large % 10
        if large <= 10 or units == 0 or small == 1:
            return self.fact(f"{first} * {second}", first * second)
        parts = f"{self.fact(f'{small} * {tens}', small * tens)}, {self.fact(f'{small} * {units}', small * units)}"
        total = self.fact(f"{small * tens} + {small * units}", small * large)
        return f"{parts}, {total}"

    def divide(self, dividend: int, divisor: int) -> str:
        """Long division: tens of the quotient first, then units, then the remainder."""
        quotient, remainder = divmod(dividend, divisor)
        if quotient == 0:
            return f"{dividend} is less than {divisor}, so the quotient is 0 and the remainder is {dividend}"
        steps, left = [], dividend
        for part in (quotient - quotient % 10, quotient % 10):
            if part:
                steps.append(self.fact(f"{part} * {divisor}", part * divisor))
                steps.append(self.fact(f"{left} - {part * divisor}", left - part * divisor))
                left -= part * divisor
        return f"{', '.join(steps)}, so the quotient is {quotient} and the remainder is {remainder}"


# --- remainder of a * b + c --------------------------------------------------------------------------------


def draw_remainder(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(2, 9), rng.randint(11, 19), rng.randint(2, 30), rng.randint(4, 12)


def state_remainder(scratch: Scratch, a: int, b: int, c: int, m: int) -> str:
    return scratch.pick(
        f"What is the remainder when {a} * {b} + {c} is divided by {m}?",
        f"Find the remainder of {a} * {b} + {c} on division by {m}.",
        f"Compute ({a} * {b} + {c}) mod {m}.",
    )


def answer_remainder(a: int, b: int, c: int, m: int) -> int:
    return (a * b + c) % m


def remainder_by_value(scratch: Scratch, a: int, b: int, c: int, m: int) -> str:
    value = a * b + c
    first = scratch.pick("First the product:", "Start with the product:", "Let me compute the number itself:")
    then = scratch.pick("Now add", "Then add", "Next add")
    divide = scratch.pick("Divide by", "Now divide by", "Next, divide by")
    return (
        f"{first} {scratch.multiply(a, b)}. {then} {c}: {scratch.add(a * b, c)}. "
        f"{divide} {m}: {scratch.divide(value, m)}."
    )


def remainder_by_parts(scratch: Scratch, a: int, b: int, c: int, m: int) -> str:
    reduced = [a % m, b % m, c % m]
    first = scratch.pick("Reduce every number first:", "I can reduce each number:", "Work with remainders:")
    rests = ", ".join(f"{number} mod {m} = {rest}" for number, rest in zip((a, b, c), reduced, strict=True))
    product = reduced[0] * reduced[1]
    total = product % m + reduced[2]
    return (
        f"{first} {rests}. {scratch.multiply(reduced[0], reduced[1])}, and {product} mod {m} = {product % m}. "
        f"{scratch.pick('Then', 'Adding,', 'Now')} {scratch.add(product % m, reduced[2])}, "
        f"and {total} mod {m} = {total % m}."
    )


# --- remainder of a power ----------------------------------------------------------------------------------


def power_order(base: int, m: int) -> int:
    """The least k >= 1 with base^k = 1 (mod m); base and m must be coprime."""
    value, order = base % m, 1
    while value != 1:
        value, order = value * base % m, order + 1
    return order


def draw_power(rng: random.Random) -> tuple[int, ...]:
    while True:
        base, exponent, m = rng.randint(2, 9), rng.randint(6, 40), rng.randint(4, 11)
        if gcd(base, m) == 1 and base % m != 1 and power_order(base, m) <= 6:
            return base, exponent, m


def state_power(scratch: Scratch, base: int, exponent: int, m: int) -> str:
    return scratch.pick(
        f"What is the remainder when {base}^{exponent} is divided by {m}?",
        f"Find {base}^{exponent} mod {m}.",
        f"Compute the remainder of {base}^{exponent} on division by {m}.",
    )


def answer_power(base: int, exponent: int, m: int) -> int:
    return pow(base, exponent, m)


def list_powers(scratch: Scratch, base: int, m: int, count: int) -> str:
    value, steps = base % m, [f"{base}^1 = {base % m}"]
    for k in range(2, count + 1):
        product = value * base
        steps.append(f"{base}^{k}: {scratch.fact(f'{value} * {base}', product)} = {product % m}")
        value = product % m
    return f"mod {m}, {'; '.join(steps)}"


def power_by_cycle(scratch: Scratch, base: int, exponent: int, m: int) -> str:
    order = power_order(base, m)
    rest = exponent % order
    first = scratch.pick("Look for a cycle of the powers:", "List the powers:", "The powers must repeat:")
    found = scratch.pick(
        f"So the powers repeat every {order} steps.",
        f"The cycle has length {order}.",
        f"After {order} steps we are back at 1.",
    )
    use = scratch.pick("Divide the exponent:", "Reduce the exponent:", "Now the exponent:")
    end = f"{base}^{rest} = {pow(base, rest, m)}" if rest else "a full cycle gives 1"
    return (
        f"{first} {list_powers(scratch, base, m, order)}. {found} {use} "
        f"{scratch.divide(exponent, order)}. The remainder is {rest}, and {end}."
    )


def power_by_full_cycles(scratch: Scratch, base: int, exponent: int, m: int) -> str:
    order = power_order(base, m)
    whole = exponent - exponent % order
    first = scratch.pick("Take out full cycles:", "Another way to see it:", "Split the exponent:")
    return (
        f"{first} {base}^{order} = 1 mod {m}, and {whole} is a multiple of {order}. So {base}^{whole} = 1. "
        f"{scratch.subtract(exponent, whole)}, so {base}^{exponent} = {base}^{exponent - whole} "
        f"= {pow(base, exponent, m)} mod {m}."
    )


# --- greatest common divisor -------------------------------------------------------------------------------


def draw_divisor(rng: random.Random) -> tuple[int, ...]:
    while True:
        common, first, second = rng.randint(1, 20), rng.randint(2, 14), rng.randint(2, 14)
        low, high = sorted((common * first, common * second))
        if 10 <= low < high <= 160 and high // low <= 6:
            return high, low


def state_divisor(scratch: Scratch, a: int, b: int) -> str:
    return scratch.pick(
        f"What is the greatest common divisor of {a} and {b}?",
        f"Find gcd({a}, {b}).",
        f"What is the largest number that divides both {b} and {a}?",
    )


def answer_divisor(a: int, b: int) -> int:
    return gcd(a, b)


def divisor_by_euclid(scratch: Scratch, a: int, b: int) -> str:
    first = scratch.pick("Use the Euclidean algorithm.", "Divide with remainder again and again.", "By Euclid:")
    high, low, steps = a, b, []
    while low:
        quotient, rest = divmod(high, low)
        product = scratch.multiply(quotient, low) if quotient > 1 else f"1 * {low} = {low}"
        steps.append(f"{product}, {scratch.fact(f'{high} - {quotient * low}', rest)}, remainder {rest}.")
        high, low = low, rest
    last = scratch.pick("The last divisor is", "The remainder is 0, so the gcd is", "It stops here with")
    return f"{first} {' '.join(steps)} {last} {high}."


def divisor_by_cofactors(scratch: Scratch, a: int, b: int) -> str:
    common = gcd(a, b)
    test = scratch.pick("Does it divide both?", "Test the value:", "It must divide both numbers:")
    shared = scratch.pick("have no common factor", "share no factor above 1", "are coprime")
    return (
        f"{test} {common} * {a // common} = {a} and {common} * {b // common} = {b}. "
        f"{a // common} and {b // common} {shared}, so nothing larger than {common} divides both."
    )


# --- least common multiple ---------------------------------------------------------------------------------


def draw_multiple(rng: random.Random) -> tuple[int, ...]:
    while True:
        low, high = sorted((rng.randint(4, 36), rng.randint(6, 48)))
        if low < high and high // gcd(low, high) >= 2 and low // gcd(low, high) <= 7:
            return high, low


def state_multiple(scratch: Scratch, a: int, b: int) -> str:
    return scratch.pick(
        f"What is the least common multiple of {a} and {b}?",
        f"Find lcm({a}, {b}).",
        f"What is the smallest positive number that both {a} and {b} divide?",
    )


def answer_multiple(a: int, b: int) -> int:
    return a * b // gcd(a, b)


def multiple_by_list(scratch: Scratch, a: int, b: int) -> str:
    first = scratch.pick("Go through the multiples of", "List the multiples of", "Try the multiples of")
    steps, value = [], a
    while value % b:
        steps.append(f"{value} mod {b} = {value % b}, no.")
        steps.append(f"{scratch.add(value, a)}.")
        value += a
    return f"{first} {a}: {' '.join(steps)} {value} mod {b} = 0, yes. {scratch.pick('So it is', 'We stop at')} {value}."


def multiple_by_divisor(scratch: Scratch, a: int, b: int) -> str:
    common = gcd(a, b)
    use = scratch.pick("Use the gcd.", "The gcd helps.", "With the gcd:")
    product = scratch.multiply(a, b // common)
    return (
        f"{use} gcd({a}, {b}) = {common}, and {b} / {common} = {b // common}. "
        f"The lcm is {a} * {b // common}: {product}."
    )


# --- linear equations --------------------------------------------------------------------------------------


def draw_equation(rng: random.Random) -> tuple[int, ...]:
    a, x, b = rng.randint(2, 9), rng.randint(2, 20), rng.randint(2, 40)
    return a, b, a * x + b


def state_equation(scratch: Scratch, a: int, b: int, c: int) -> str:
    return scratch.pick(
        f"Solve {a}x + {b} = {c} for x.",
        f"If {a}x + {b} = {c}, what is x?",
        f"A number is multiplied by {a} and then {b} is added. The result is {c}. What is the number?",
    )


def answer_equation(a: int, b: int, c: int) -> int:
    return (c - b) // a


def equation_by_isolating(scratch: Scratch, a: int, b: int, c: int) -> str:
    first = scratch.pick(f"Subtract {b} from both sides:", f"Take {b} away:", f"Move {b} to the other side:")
    then = scratch.pick(f"So {a}x = {c - b}.", f"This leaves {a}x = {c - b}.", f"Now {a}x = {c - b}.")
    divide = scratch.pick(f"Divide by {a}:", f"Now divide by {a}:", f"Next we divide by {a}:")
    return (
        f"{first} {scratch.subtract(c, b)}. {then} {divide} {scratch.divide(c - b, a)}. "
        f"{scratch.pick('So', 'Hence', 'Thus')} x = {(c - b) // a}."
    )


def equation_by_substituting(scratch: Scratch, a: int, b: int, c: int) -> str:
    x = (c - b) // a
    first = scratch.pick(f"Put x = {x} into the equation:", f"Insert x = {x}:", f"Test x = {x}:")
    return (
        f"{first} {scratch.multiply(a, x)}. {scratch.pick('Then', 'Next', 'And')} {scratch.add(a * x, b)}. "
        f"{scratch.pick(f'That is {c}, as it should be.', f'We need {c}, good.', f'This matches {c}.')}"
    )


# --- digit sums --------------------------------------------------------------------------------------------


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


# --- arithmetic sequences ----------------------------------------------------------------------------------


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


# --- sums of sequences -------------------------------------------------------------------------------------


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


# --- recursions --------------------------------------------------------------------------------------------


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


# --- counting multiples ------------------------------------------------------------------------------------


def draw_count(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(10, 60), rng.randint(70, 199), rng.randint(4, 12)


def state_count(scratch: Scratch, low: int, high: int, k: int) -> str:
    return scratch.pick(
        f"How many multiples of {k} are there from {low} to {high}?",
        f"Count the numbers from {low} to {high} that are divisible by {k}.",
        f"How many integers n with {low} <= n <= {high} are divisible by {k}?",
    )


def answer_count(low: int, high: int, k: int) -> int:
    return high // k - (low - 1) // k


def count_by_difference(scratch: Scratch, low: int, high: int, k: int) -> str:
    below = low - 1
    first = scratch.pick(f"Count up to {high} first:", f"Up to {high}:", f"Divide {high} by {k}:")
    then = scratch.pick(f"Now those up to {below}:", f"Up to {below}:", f"Then divide {below} by {k}:")
    return (
        f"{first} {scratch.divide(high, k)}. {then} {scratch.divide(below, k)}. "
        f"{scratch.pick('Subtract:', 'The difference:', 'Take the difference:')} "
        f"{scratch.subtract(high // k, below // k)}."
    )


def count_by_ends(scratch: Scratch, low: int, high: int, k: int) -> str:
    first, last = (low + k - 1) // k, high // k
    begin = scratch.pick("Find the first and the last one.", "Look at both ends.", "Use the ends of the list.")
    return (
        f"{begin} The first one is {first} * {k} = {first * k}, the last one is {last} * {k} = {last * k}. "
        f"So the factors run from {first} to {last}: {scratch.subtract(last, first)}, "
        f"{scratch.fact(f'{last - first} + 1', last - first + 1)}."
    )


# --- counting divisors -------------------------------------------------------------------------------------


def draw_factors(rng: random.Random) -> tuple[int, ...]:
    primes = sorted(rng.sample((2, 3, 5, 7, 11, 13), 3))
    exponents = [rng.randint(1, 5) for _ in primes]
    return tuple(value for pair in zip(primes, exponents, strict=True) for value in pair)


def write_factors(operands: tuple[int, ...]) -> str:
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return " * ".join(f"{prime}^{exponent}" for prime, exponent in pairs)


def state_factors(scratch: Scratch, *operands: int) -> str:
    number = write_factors(operands)
    return scratch.pick(
        f"How many positive divisors does {number} have?",
        f"Count the divisors of {number}.",
        f"Let n = {number}. How many positive integers divide n?",
    )


def answer_factors(*operands: int) -> int:
    total = 1
    for exponent in operands[1::2]:
        total *= exponent + 1
    return total


def factors_in_order(scratch: Scratch, operands: tuple[int, ...]) -> str:
    choices = [exponent + 1 for exponent in operands[1::2]]
    steps = [
        f"{scratch.pick('For', 'With')} the prime {prime} there are {exponent} + 1 = {exponent + 1} choices."
        for prime, exponent in zip(operands[::2], operands[1::2], strict=True)
    ]
    product = choices[0] * choices[1]
    return (
        f"{' '.join(steps)} {scratch.pick('Multiply:', 'The product:', 'Now multiply:')} "
        f"{scratch.multiply(choices[0], choices[1])}. {scratch.multiply(product, choices[2])}."
    )


def factors_forward(scratch: Scratch, *operands: int) -> str:
    first = scratch.pick("A divisor chooses an exponent for every prime.", "Go prime by prime.", "Use the exponents.")
    return f"{first} {factors_in_order(scratch, operands)}"


def factors_backward(scratch: Scratch, *operands: int) -> str:
    pairs = list(zip(operands[::2], operands[1::2], strict=True))
    turned = tuple(value for pair in reversed(pairs) for value in pair)
    first = scratch.pick("Take the primes in reverse order.", "Now from the last prime.", "The other way round.")
    return f"{first} {factors_in_order(scratch, turned)}"


# --- stories -----------------------------------------------------------------------------------------------

PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Felix")
THINGS = ("pencils", "apples", "stickers", "marbles", "cards")


def draw_story(rng: random.Random) -> tuple[int, ...]:
    boxes, each = rng.randint(3, 9), rng.randint(11, 24)
    return boxes, each, rng.randint(5, boxes * each - 5 if boxes * each < 60 else 49)


def state_story(scratch: Scratch, boxes: int, each: int, given: int) -> str:
    person, thing = scratch.pick(*PEOPLE), scratch.pick(*THINGS)
    return scratch.pick(
        f"{person} has {boxes} boxes with {each} {thing} each and gives away {given} {thing}. "
        f"How many {thing} are left?",
        f"There are {boxes} bags of {each} {thing}. {person} takes {given} of them. How many {thing} remain?",
        f"{person} buys {boxes} packs of {each} {thing} and loses {given}. How many {thing} does {person} have now?",
    )


def answer_story(boxes: int, each: int, given: int) -> int:
    return boxes * each - given


def story_by_total(scratch: Scratch, boxes: int, each: int, given: int) -> str:
    first = scratch.pick("First the total:", "How many are there at the start?", "Count everything first:")
    then = scratch.pick(f"Then {given} are gone:", f"Now take away {given}:", f"Subtract the {given}:")
    return f"{first} {scratch.multiply(boxes, each)}. {then} {scratch.subtract(boxes * each, given)}."


def story_by_adding_back(scratch: Scratch, boxes: int, each: int, given: int) -> str:
    left = boxes * each - given
    first = scratch.pick("Put them back:", f"Add the {given} again:", "Going back:")
    return (
        f"{first} {scratch.add(left, given)}. {scratch.pick('And', 'Compare with')} "
        f"{boxes} * {each}: {scratch.multiply(boxes, each)}. {scratch.pick('It fits.', 'The same.', 'Good.')}"
    )


# --- heads and legs ----------------------------------------------------------------------------------------


def draw_animals(rng: random.Random) -> tuple[int, ...]:
    heads = rng.randint(8, 48)
    return heads, 2 * heads + 2 * rng.randint(2, min(heads - 2, 30))


def state_animals(scratch: Scratch, heads: int, legs: int) -> str:
    return scratch.pick(
        f"A farm has chickens and rabbits, {heads} heads and {legs} legs in all. How many rabbits are there?",
        f"Chickens and rabbits together have {heads} heads and {legs} legs. How many are rabbits?",
        f"In a yard there are {heads} animals, chickens and rabbits, with {legs} legs. Find the number of rabbits.",
    )


def answer_animals(heads: int, legs: int) -> int:
    return legs // 2 - heads


def animals_by_surplus(scratch: Scratch, heads: int, legs: int) -> str:
    first = scratch.pick("If all were chickens:", "Suppose that all are chickens:", "Give every animal 2 legs:")
    then = scratch.pick("Legs left over:", "The surplus:", "What is missing:")
    surplus = legs - 2 * heads
    return (
        f"{first} {scratch.multiply(2, heads)}. {then} {scratch.subtract(legs, 2 * heads)}. "
        f"{scratch.pick('Every rabbit has 2 more legs:', 'A rabbit adds 2 legs:')} "
        f"{surplus} / 2 = {surplus // 2}."
    )


def animals_by_counting(scratch: Scratch, heads: int, legs: int) -> str:
    rabbits = legs // 2 - heads
    chickens = heads - rabbits
    first = scratch.pick(f"Suppose {rabbits} rabbits.", f"With {rabbits} rabbits:", f"Take {rabbits} rabbits.")
    return (
        f"{first} {scratch.subtract(heads, rabbits)}, so {chickens} chickens. Rabbit legs: "
        f"{scratch.multiply(4, rabbits)}. Chicken legs: {scratch.multiply(2, chickens)}. "
        f"{scratch.pick('Together', 'In all')} {scratch.add(4 * rabbits, 2 * chickens)}."
    )


# --- the families together ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """How to draw operands, state a problem, answer it, and work it out: from the start, and as a check."""

    draw: Callable[[random.Random], tuple[int, ...]]
    state: Callable[..., str]
    answer: Callable[..., int]
    solve: Callable[..., str]
    check: Callable[..., str]
    check_may_lead: bool  # the check does not use the answer, so it may come first


FAMILIES: dict[str, Family] = {
    "remainder": Family(
        draw_remainder, state_remainder, answer_remainder, remainder_by_value, remainder_by_parts, True
    ),
    "power": Family(draw_power, state_power, answer_power, power_by_cycle, power_by_full_cycles, False),
    "divisor": Family(draw_divisor, state_divisor, answer_divisor, divisor_by_euclid, divisor_by_cofactors, False),
    "multiple": Family(draw_multiple, state_multiple, answer_multiple, multiple_by_list, multiple_by_divisor, False),
    "equation": Family(
        draw_equation, state_equation, answer_equation, equation_by_isolating, equation_by_substituting, False
    ),
    "digits": Family(draw_digits, state_digits, answer_digits, digits_forward, digits_backward, True),
    "sequence": Family(draw_sequence, state_sequence, answer_sequence, sequence_by_formula, sequence_by_tenth, True),
    "series": Family(draw_series, state_series, answer_series, series_by_adding, series_by_pairing, True),
    "recursion": Family(
        draw_recursion, state_recursion, answer_recursion, recursion_by_terms, recursion_backwards, False
    ),
    "count": Family(draw_count, state_count, answer_count, count_by_difference, count_by_ends, False),
    "factors": Family(draw_factors, state_factors, answer_factors, factors_forward, factors_backward, True),
    "story": Family(draw_story, state_story, answer_story, story_by_total, story_by_adding_back, False),
    "animals": Family(draw_animals, state_animals, answer_animals, animals_by_surplus, animals_by_counting, False),
}


def is_held_out(family: str, operands: tuple[int, ...]) -> bool:
    """Whether a problem belongs to the held-out part; depends on family and operands alone."""
    key = json.dumps([family, *operands]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % HELD_OUT_ONE_IN == 0


def draw_problem(rng: random.Random, *, held_out: bool, family: str | None = None) -> Problem:
    """One problem of the training or held-out part, of the given family or of a random one."""
    if family is None:
        family = rng.choice(list(FAMILIES))
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}; choose one of these")
    rules = FAMILIES[family]
    while True:
        operands = rules.draw(rng)
        if is_held_out(family, operands) == held_out:
            statement = rules.state(Scratch(rng), *operands)
            return Problem(statement, rules.answer(*operands), family, operands)


def held_out_problems(count: int, *, seed: int = 0) -> list[Problem]:
    """`count` different held-out problems, the families in turn; the same for the same seed."""
    rng = random.Random(f"held-out {seed}")
    names, found = list(FAMILIES), {}
    while len(found) < count:
        problem = draw_problem(rng, held_out=True, family=names[len(found) % len(names)])
        found.setdefault((problem.family, problem.operands), problem)
    return list(found.values())


def count_pieces(text: str) -> int:
    """Digits, words and runs of signs in a text: close to its number of tokens."""
    return len(re.findall(r"\d|[A-Za-z]+|[^\sA-Za-z\d]+", text))


def open_reasoning(scratch: Scratch, problem: Problem) -> str:
    """How the reasoning starts: plain, or with the problem said again."""
    start = scratch.pick("Okay.", "Let me think.", "Okay, let me see.", "Alright.", "Let me work this out.")
    if scratch.rng.random() < 0.4:
        echo = scratch.pick("The problem:", "We are asked this:", "The question is this:")
        return f"{start} {echo} {problem.problem}"
    return start


def write_once(problem: Problem, rng: random.Random) -> str:
    """One reasoning: the ways of the family in some order, rechecked until it is long enough."""
    rules, scratch = FAMILIES[problem.family], Scratch(rng)
    lead_with_check = rules.check_may_lead and rng.random() < 0.35
    ways = [rules.check, rules.solve] if lead_with_check else [rules.solve, rules.check]
    answer = problem.answer
    paragraphs = [open_reasoning(scratch, problem), ways[0](scratch, *problem.operands)]
    paragraphs[-1] += " " + scratch.pick(
        f"So the answer should be {answer}.", f"This gives {answer}.", f"So I get {answer}.", f"That makes {answer}."
    )
    turn = 1
    while turn == 1 or count_pieces("\n".join(paragraphs)) < SHORTEST_REASONING or rng.random() < 0.12:
        doubt = scratch.pick(
            "Let me check this.", "Wait, let me double-check.", "Hmm, let me verify that.", "Is this right?"
        )
        again = scratch.pick(
            f"Good, {answer} again.", f"So {answer} is right.", f"Yes, it is {answer}.", f"That confirms {answer}."
        )
        paragraphs.append(f"{doubt} {ways[turn % 2](scratch, *problem.operands)} {again}")
        turn += 1
    paragraphs.append(
        scratch.pick(f"So the answer is {answer}.", f"The final answer is {answer}.", f"I am confident: {answer}.")
    )
    return "\n".join(paragraphs)


def write_reasoning(problem: Problem, rng: random.Random) -> str:
    """A reasoning for the problem of bounded length, ending with `</think>` and the answer line."""
    while True:
        text = write_once(problem, rng)
        if count_pieces(text) <= LONGEST_REASONING:
            return f"{text}\n{THINK_END}\nAnswer: {problem.answer}"


def write_prompt(statement: str) -> str:
    """The prompt of a statement, as the tokenizer's chat template builds it too."""
    return f"{PROBLEM_TOKEN}{statement}{THINK_TOKEN}"
