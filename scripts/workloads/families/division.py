"""Problems about division: remainders, powers, divisors and multiples, with their written-out solutions."""

from __future__ import annotations

import random
from math import gcd

from workloads.families.family import Family
from workloads.families.scratch import Scratch

# --- remainder of a * b + c ------------------------------------------------------------------------------


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


REMAINDER = Family(draw_remainder, state_remainder, answer_remainder, remainder_by_value, remainder_by_parts, True)


# --- remainder of a power --------------------------------------------------------------------------------


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


POWER = Family(draw_power, state_power, answer_power, power_by_cycle, power_by_full_cycles, False)


# --- greatest common divisor -----------------------------------------------------------------------------


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


DIVISOR = Family(draw_divisor, state_divisor, answer_divisor, divisor_by_euclid, divisor_by_cofactors, False)


# --- least common multiple -------------------------------------------------------------------------------


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


MULTIPLE = Family(draw_multiple, state_multiple, answer_multiple, multiple_by_list, multiple_by_divisor, False)


# --- counting multiples ----------------------------------------------------------------------------------


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


COUNT = Family(draw_count, state_count, answer_count, count_by_difference, count_by_ends, False)


# --- counting divisors -----------------------------------------------------------------------------------


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


FACTORS = Family(draw_factors, state_factors, answer_factors, factors_forward, factors_backward, True)
