"""The step's kernels in plain PyTorch, so that whole generations run on a CPU in seconds.

The interpreter runs the real kernels, each against such a reference in its own test, but at about 30 ms per program.
"""

import torch
from waitless_draws import draw_residuals_at

from stand.gpu import device_rule, kernel_attention, step_body
from stand.sampling import SamplingParams, TargetLaw
from stand.verifiers.draw import tokens_at
from stand.verifiers.noise import uniforms_on_device
from stand.verifiers.rules import traversal_compiled


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
    query, keys, values, pages, ancestors, positions, items, partial_starts, partials, log_sums, arrivals, scale,
    tile_tokens, window=0, softcap=0.0, sinks=None,
):  # fmt: skip
    mixed = torch.zeros_like(query, memory_format=torch.contiguous_format)
    groups = query.shape[1] // keys.shape[1]
    seen = _seen(ancestors)
    for row_first, first, count, cache_row, length, _, end, split in items.tolist():
        if count == 0 or split != int(partial_starts[first + 1] - partial_starts[first]) - 1:
            continue  # a row's last split knows all that is visible: the prefix, and its own end
        own = slice(first, first + count)
        key, value = (row_of(state, pages[cache_row], end).repeat_interleave(groups, 0) for state in (keys, values))
        scores = torch.einsum("mhd,hsd->hms", query[own], key) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        tail = seen[own, : end - length]
        visible = torch.cat([torch.ones(count, length, dtype=torch.bool), tail], 1)
        if window:
            places = torch.cat([torch.arange(length), positions[row_first : row_first + end - length]])
            visible &= places[None] > positions[own, None] - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, count, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :end]
        mixed[own] = torch.einsum("hms,hsd->mhd", weights, value)
    return mixed


def row_of(states, pages, end):
    """[P, Hkv, S, D] and a row's pages -> [Hkv, end, D]"""
    num_pages = -(-end // states.shape[2])
    return states[pages[:num_pages].long()].transpose(0, 1).flatten(1, 2)[:, :end]


def compact(storage, pages, cache_rows, lengths, path) -> None:
    size = storage.shape[3]
    for row, length, nodes in zip(cache_rows.tolist(), lengths.tolist(), path, strict=True):
        kept = nodes[nodes >= 0]
        slots = torch.arange(length + 1, length + 1 + len(kept)), length + kept
        write, read = ((pages[row, where // size].long(), where % size) for where in slots)
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
    thresholds, mass, scale = traversal_compiled.thresholds(*live, probs[:num_nodes].numpy())
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
    for row, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        node, below = first, [first] if first < end else []
        while below:
            node = stops[row] = below[0]
            below = [
                child for child in range(node + 1, end)
                if parents[child] == node and follows[child] and token_ids[child] == drawn[node]
            ]  # fmt: skip
    next_tokens.copy_(drawn[stops])
    _write_rest(laws, parents, offsets, stops, is_broken, path)


def _write_rest(laws, parents, offsets, stops, is_broken, path) -> None:
    """Kept paths of rows that stop at `stops`, and whether a law of theirs is not finite."""
    path.fill_(-1)
    for row, node in enumerate(stops.tolist()):
        first, end = offsets[row : row + 2].tolist()
        nodes = []
        while first < end and node > first:
            nodes.insert(0, node - first)
            node = int(parents[node])
        path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
        is_broken[row] = int(laws[first:end].isnan().any())


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
