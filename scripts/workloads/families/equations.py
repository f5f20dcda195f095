"""Problems with an unknown: equations, stories, heads and legs, with their written-out solutions."""

from __future__ import annotations

import random

from workloads.families.family import Family
from workloads.families.scratch import Scratch

# --- linear equations ------------------------------------------------------------------------------------


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


EQUATION = Family(
    draw_equation, state_equation, answer_equation, equation_by_isolating, equation_by_substituting, False
)


# --- stories ---------------------------------------------------------------------------------------------


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


STORY = Family(draw_story, state_story, answer_story, story_by_total, story_by_adding_back, False)


# --- heads and legs --------------------------------------------------------------------------------------


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


ANIMALS = Family(draw_animals, state_animals, answer_animals, animals_by_surplus, animals_by_counting, False)
