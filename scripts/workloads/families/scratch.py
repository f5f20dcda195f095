"""Scratch paper that arithmetic is written out on: words are chosen at random, numbers are computed."""

from __future__ import annotations

import random

SLIP_RATE = 0.025  # probability that a computed fact is first written down wrongly, then corrected


class Scratch:
    """One sheet for one statement or reasoning."""

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
