"""Slow twins: the lookup tree, its drafts and its noise in plain Python, written for reading, not for speed."""

import itertools
import math

import numpy as np

WORD = 2**64
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
DRAFT_STREAM = 1
TARGET_STREAM = 4


def finalise(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
    return word ^ (word >> 31)


def chain_key(key: int, word: int) -> int:
    return finalise((key + GOLDEN_GAMMA * (word + 1)) % WORD)


def uniform(seed: int, stream: int, row: int, step: int, node: int, slot: int = 0) -> float:
    key = chain_key(chain_key(finalise(seed), stream), row << 32 | step)
    return ((chain_key(key, node << 32 | slot) >> 12) + 0.5) * 2.0**-52


class ReferenceLookup:
    """context (tuple) -> (row: list of (token, probability) best first, count)."""

    def __init__(self, *, orders=(1, 2, 3, 4), num_candidates=10, min_rate=0.1):
        self.orders, self.num_candidates, self.min_rate = orders, num_candidates, min_rate
        self.contexts: dict[tuple[int, ...], tuple[list[tuple[int, float]], int]] = {}

    def observe(self, history, row):
        row = [(token, float(probability)) for token, probability in row if token >= 0]
        if sum(probability for _, probability in row) <= 0.0:
            return
        for order in self.orders:
            if order <= len(history):
                context = tuple(history[len(history) - order :])
                old, count = self.contexts.get(context, ([], 0))
                self.contexts[context] = (self._blended(old, count, row), count + 1)

    def _blended(self, old, count, new):
        rate = 1.0 if count == 0 else max(1.0 / (count + 1), self.min_rate)
        mass = {token: (1.0 - rate) * probability for token, probability in old}
        for token, probability in new:
            mass[token] = mass.get(token, 0.0) + rate * probability
        rounded = [(token, float(np.float32(probability))) for token, probability in mass.items()]
        ranked = sorted(rounded, key=lambda entry: (-entry[1], entry[0]))
        return [entry for entry in ranked[: self.num_candidates] if entry[1] > 0.0]

    def learn(self, context, token_ids, *, top_ids=None, top_probs=None):
        history = list(context)
        for position, token in enumerate(token_ids):
            row = [(token, 1.0)]
            if top_ids is not None:
                row = list(zip(top_ids[position], top_probs[position], strict=True))
            self.observe(history, row)
            history.append(token)

    def learn_batch(self, batch, histories, top_ids, top_probs, nodes=None):
        nodes = range(batch.num_nodes) if nodes is None else nodes
        for node in nodes:
            row = int(np.searchsorted(batch.offsets, node, side="right")) - 1
            draft, local = batch[row], node - int(batch.offsets[row])
            context = list(histories[row]) + path_tokens(draft, local)
            self.observe(context, list(zip(top_ids[node].tolist(), top_probs[node].tolist(), strict=True)))

    def lookup(self, context, floor_order=1):
        for order in sorted(self.orders, reverse=True):
            if floor_order <= order <= len(context):
                row, count = self.contexts.get(tuple(context[len(context) - order :]), ([], 0))
                if row:
                    return order, row, count
        return None

    def draft(self, history, parents, *, seed, row, step, kind, floor_order=1, noise=uniform):
        """Nodes as dicts in slot order: token, parent (node index), slot, law {token: probability}."""
        nodes = [{"token": int(history[-1]), "parent": -1, "slot": 0, "law": {}, "path": [int(history[-1])]}]
        node_of_slot, children = {0: 0}, {}
        for slot in range(1, len(parents)):
            parent_slot = int(parents[slot])
            if parent_slot not in node_of_slot:
                continue
            parent = node_of_slot[parent_slot]
            if parent_slot not in children:
                found = self.lookup(list(history[:-1]) + nodes[parent]["path"], floor_order)
                wanted = int(np.sum(np.asarray(parents) == parent_slot))
                if kind == "coupled":  # the target's noise, by absolute position and token
                    place = len(history) + len(nodes[parent]["path"]) - 1
                    numbers = [noise(seed, TARGET_STREAM, row, place, token) for token, _ in found[1]] if found else []
                else:
                    width = max(self.num_candidates, wanted)
                    numbers = [noise(seed, DRAFT_STREAM, row, step, parent_slot, j) for j in range(width)]
                children[parent_slot] = drawn_children(found[1] if found else [], numbers, wanted, kind)
            if children[parent_slot]:
                token, law = children[parent_slot].pop(0)
                node_of_slot[slot] = len(nodes)
                path = nodes[parent]["path"] + [token]
                nodes.append({"token": token, "parent": parent, "slot": slot, "law": law, "path": path})
        return nodes


def path_tokens(draft, node):
    path = []
    while node >= 0:
        path.append(int(draft.token_ids[node]))
        node = int(draft.parents[node])
    return path[::-1]


def drawn_children(row, numbers, num_children, kind):
    """[(token, law)] in reveal order; numbers: one uniform per candidate, in row order."""
    if kind == "deterministic":
        return [(token, {token: 1.0}) for token, _ in row[:num_children]]
    if kind == "independent":
        mass = math.fsum(probability for _, probability in row)
        law = {token: probability / mass for token, probability in row}
        bounds = list(itertools.accumulate(probability for _, probability in row))
        picks = [sum(number * mass >= bound for bound in bounds[:-1]) for number in numbers[:num_children]]
        return [(row[pick][0], law) for pick in picks] if row else []
    if kind == "mixed":
        top = row[: num_children - 1]
        rest, rest_numbers = row[num_children - 1 :], numbers[num_children - 1 :]
        return gumbel_top_k(rest, rest_numbers, 1) + [(token, {token: 1.0}) for token, _ in top]
    return gumbel_top_k(row, numbers, num_children)


def gumbel_top_k(row, numbers, num_children):
    """The textbook form: the k largest log p + Gumbel, in that order, with laws without replacement."""
    scores = [math.log(p) - math.log(-math.log(u)) for (_, p), u in zip(row, numbers, strict=False)]
    order = sorted(range(len(row)), key=lambda j: (-scores[j], j))[:num_children]
    children, left = [], dict(row)
    for j in order:
        mass = math.fsum(left.values())
        children.append((row[j][0], {token: probability / mass for token, probability in left.items()}))
        del left[row[j][0]]
    return children


def sequence_law(probabilities, num_children):
    """{picks: probability} of drawing without replacement, by enumeration."""
    law = {}
    for picks in itertools.permutations(range(len(probabilities)), num_children):
        chance, left = 1.0, math.fsum(probabilities)
        taken: list[int] = []
        for pick in picks:
            left = math.fsum(p for j, p in enumerate(probabilities) if j not in taken)
            chance *= probabilities[pick] / left
            taken.append(pick)
        law[picks] = chance
    return law


def chi_square_bound(num_degrees, false_alarm):
    """A value that chi-square exceeds with at most the given odds (Laurent and Massart 2000, Lemma 1)."""
    x = -math.log(false_alarm)
    return num_degrees + 2.0 * math.sqrt(num_degrees * x) + 2.0 * x
