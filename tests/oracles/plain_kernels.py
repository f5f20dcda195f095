"""The step's kernels in plain PyTorch, so that whole generations run on a CPU in seconds.

The interpreter runs the real kernels, each against such a reference in its own test, but at about 30 ms per program.
"""

import numpy as np
import torch
from waitless_draws import draw_residuals_at

from stand.gpu import device_rule, kernel_attention, step_body
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.trees import compiled
from stand.verifiers.draw import tokens_at
from stand.verifiers.noise import uniforms_on_device


def use_plain_kernels(monkeypatch) -> None:
    monkeypatch.setattr(kernel_attention, "tree_attention", tree_attention)
    monkeypatch.setattr(step_body, "compact", compact)
    monkeypatch.setattr(step_body, "top_tokens", top_tokens)
    monkeypatch.setattr(step_body, "softmax_rows", softmax_rows)
    monkeypatch.setattr(step_body, "filter_rows", filter_rows)
    monkeypatch.setattr(device_rule, "race", race)
    monkeypatch.setattr(device_rule, "traverse", traverse)
    monkeypatch.setattr(device_rule, "draw_nodes", draw_nodes)
    monkeypatch.setattr(device_rule, "draw_residuals", draw_residuals)
    monkeypatch.setattr(device_rule, "follow", follow)


def tree_attention(
    query, keys, values, pages, ancestors, positions, items, partial_starts, partials, log_sums, scale,
    tile_tokens, window=0, softcap=0.0, sinks=None, is_latent=False,
):  # fmt: skip
    """All rows at once, as wide as the widest."""
    if is_latent:
        keys, values = torch.cat((keys, values), dim=-1), keys
    mixed = query.new_zeros(*query.shape[:2], values.shape[3])
    starts = partial_starts.tolist()
    last = [item for item in items.tolist() if item[2] and item[7] == starts[item[1] + 1] - starts[item[1]] - 1]
    if not last:
        return mixed  # a row's last split knows all that is visible: the prefix, and its own end
    row_first, first, count, cache_row, length, _, end, _ = torch.tensor(last).T[:, :, None]
    nodes, slots = torch.arange(int(count.max())), torch.arange(int(end.max()))
    is_node, own = nodes < count, (first + nodes).clamp(max=len(query) - 1)  # [R, m]
    behind = slots - length  # [R, s]: tokens of the step have 0 and more
    key, value = (rows_of(state, pages[cache_row[:, 0]], len(slots)) for state in (keys, values))
    value.masked_fill_((slots >= end)[:, None, :, None], 0.0)  # what nobody has written may be NaN
    asked = query[own].unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)  # [R, Hkv, heads of each, m, D]
    scores = (asked.flatten(2, 3) @ key.transpose(2, 3)).unflatten(2, asked.shape[2:4]) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    seen = _seen(ancestors)[own]
    places = behind.clamp(0, seen.shape[2] - 1)[:, None].expand(-1, len(nodes), -1)
    visible = (behind < 0)[:, None] | (seen.gather(2, places) & (slots < end)[:, None])
    if window:
        later = positions[(row_first + behind).clamp(0, len(positions) - 1)]
        visible &= torch.where(behind < 0, slots, later)[:, None] > positions[own][:, :, None] - window
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        beside = sinks.view(*asked.shape[1:3], 1, 1).expand(len(last), -1, -1, len(nodes), 1)
        scores = torch.cat([scores, beside], -1)
    weights = torch.softmax(scores, -1)[..., : len(slots)]
    found = (weights.flatten(2, 3) @ value).unflatten(2, asked.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3)
    mixed[own[is_node]] = found[is_node]
    return mixed


def rows_of(states, pages, end):
    """[P, Hkv, S, D] and rows' pages -> [R, Hkv, end, D]"""
    num_pages, heads = -(-end // states.shape[2]), torch.arange(states.shape[1])[:, None]
    chosen = pages[:, None, :num_pages].long().clamp(0, len(states) - 1)
    return states[chosen, heads].flatten(2, 3)[:, :, :end]


def compact(storage, pages, cache_rows, lengths, path) -> None:
    size, is_kept = storage.shape[3], path >= 0  # [C, P, Hkv, S, D]
    rows, _ = torch.nonzero(is_kept, as_tuple=True)
    ranks = (is_kept.cumsum(1) - 1)[is_kept]
    slots = lengths[rows] + 1 + ranks, lengths[rows] + path[is_kept]
    write, read = ((pages[cache_rows[rows].long(), where // size].long(), where % size) for where in slots)
    storage[:, write[0], :, write[1]] = storage[:, read[0], :, read[1]]


def top_tokens(probs, count):
    best = torch.topk(probs, count, dim=1)
    return best.indices.to(torch.int32), best.values


def softmax_rows(laws, logits, temperature) -> None:
    laws.copy_(torch.softmax(logits.float() / temperature, dim=-1))


def filter_rows(laws, top_k, top_p, min_p) -> None:
    law = TargetLaw(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    laws.copy_(torch.softmax(law.warp(laws.log()), dim=-1))


def race(probs, keys):
    unsigned = [key % (1 << 64) for key in keys.tolist()]
    noise = -uniforms_on_device(unsigned, probs.shape[1], device=probs.device).log()
    return (probs.double() / noise).argmax(dim=1)


def traverse(probs, token_ids, parents, offsets, support_ids, law, uniforms, turns, ancestors):
    num_nodes = int(offsets[-1])
    arrays = (token_ids.to(torch.int32), parents, offsets, support_ids, law)
    live = [array[:num_nodes].numpy() if array is not offsets else array.numpy() for array in arrays]
    thresholds, mass, scale = compiled.traversal_thresholds(*live, probs[:num_nodes].numpy())
    stops = torch.zeros(len(offsets) - 1, dtype=torch.int64)
    for row, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if first < end:
            stops[row] = first + first_passing(
                parents[first:end].tolist(), uniforms[first:end] < torch.from_numpy(thresholds)[first:end]
            )
    return stops, torch.from_numpy(mass), torch.from_numpy(scale), torch.from_numpy(thresholds)


def draw_nodes(probs, uniforms):
    return tokens_at(probs, uniforms)[0]


def draw_residuals(
    probs, stops, support_ids, mass, scale, uniforms, parents, depths, offsets, final_stops, next_tokens, is_broken,
    path,
) -> None:  # fmt: skip
    rows = probs.index_select(0, stops)
    final_stops.copy_(stops)
    next_tokens.copy_(draw_residuals_at(rows, support_ids[stops], mass[stops], scale[stops], uniforms))
    _write_rest(probs, parents, offsets, stops, is_broken, path)


def follow(drawn, laws, token_ids, parents, follows, offsets, stops, next_tokens, is_broken, path) -> None:
    stops.zero_()
    agrees = follows.bool() & (token_ids == drawn[parents.long().clamp(min=0)])
    agrees, above = agrees.tolist(), parents.tolist()
    for row, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        node, below = first, [first] if first < end else []
        while below:
            node = stops[row] = below[0]
            below = [child for child in range(node + 1, end) if above[child] == node and agrees[child]]
    next_tokens.copy_(drawn[stops])
    _write_rest(laws, parents, offsets, stops, is_broken, path)


def _write_rest(laws, parents, offsets, stops, is_broken, path) -> None:
    """Kept paths of rows that stop at `stops`, and whether a law of theirs is not finite."""
    above, bounds, kept = parents.tolist(), offsets.tolist(), np.full(path.shape, -1)
    for row, node in enumerate(stops.tolist()):
        first, nodes = bounds[row], []
        while first < bounds[row + 1] and node > first:
            nodes.insert(0, node - first)
            node = above[node]
        kept[row, : len(nodes)] = nodes
    path.copy_(torch.from_numpy(kept))
    num_broken = np.append(0, laws.isnan().any(1).numpy().cumsum())[bounds]  # before each row, and after the last one
    is_broken.copy_(torch.from_numpy(np.diff(num_broken) > 0))


def first_passing(parents, passes) -> int:
    """Row-local: the first node in post-order that passes; the root always does."""

    def visit(node):
        for child in (place for place, parent in enumerate(parents) if parent == node):
            found = visit(child)
            if found is not None:
                return found
        return node if node == 0 or passes[node] else None

    return visit(0)


def _seen(ancestors):
    """[n, W] int64 words -> [n, 64 W] bool, bit 0 of word 0 first."""
    return ((ancestors[:, :, None] >> torch.arange(64)) & 1).bool().flatten(1)
