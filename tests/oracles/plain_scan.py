"""The kernels of recurrent layers as recurrences: a state for every token, made from its predecessor's."""

import torch

from stand.forward.linear_attention import NORM_EPSILON
from stand.gpu import kernel_scan


def use_plain_scans(monkeypatch) -> None:
    for kernel in (convolve, prepared, delta_updates, linear_attention, keep_states, keep_tails):
        monkeypatch.setattr(kernel_scan, kernel.__name__, kernel)


def convolve(inputs, tails, weight, bias, parents, depths, offsets, cache_rows):
    mixed = torch.zeros(inputs.shape, dtype=weight.dtype)
    for first, end, place in rows(offsets, cache_rows):
        seen = {}
        for token in range(first, end):
            before = list(tails[place]) if token == first else seen[int(parents[token])]
            seen[token] = [*before, inputs[token]]
            newest = torch.stack(seen[token][-weight.shape[1] :]).float()
            total = (newest * weight.T.float()).sum(0)
            mixed[token] = total if bias is None else total + bias
    return mixed


def keep_tails(inputs, tails, offsets, cache_rows, path) -> None:
    for row, (first, end, place) in enumerate(rows(offsets, cache_rows)):
        if first < end:
            kept = [first, *(first + node for node in path[row].tolist() if node >= 0)]
            tails[place] = torch.stack([*tails[place], *inputs[kept]])[-tails.shape[1] :]


def prepared(query, key, log_decay, ancestors, offsets, is_unit):
    query, key = query.float(), key.float()
    if is_unit:
        query, key = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + NORM_EPSILON) for one in (query, key))
        query = query * query.shape[2] ** -0.5
    sums, before = log_decay.float().clone(), parents_of(ancestors, offsets)
    for token, parent in enumerate(before):
        sums[token] += 0.0 if parent is None else sums[parent]
    return query, key, sums


def delta_updates(keys, value, sums, beta, states, ancestors, offsets, cache_rows):
    updates, before = torch.zeros(value.shape), parents_of(ancestors, offsets)
    for first, end, place in rows(offsets, cache_rows):
        own = {}
        for token in range(first, end):
            fresh = _decayed(own, before[token], states[place], sums, token)
            key = _of_heads(keys[token], len(fresh))
            read = (fresh * key[:, :, None]).sum(1)
            updates[token] = beta[token].float()[:, None] * (value[token].float() - read)
            own[token] = fresh + key[:, :, None] * updates[token][:, None]
    return updates


def linear_attention(queries, keys, updates, sums, states, ancestors, offsets, cache_rows):
    output, before = torch.zeros(updates.shape), parents_of(ancestors, offsets)
    for first, end, place in rows(offsets, cache_rows):
        own = {}
        for token in range(first, end):
            fresh = _decayed(own, before[token], states[place], sums, token)
            own[token] = fresh + _of_heads(keys[token], len(fresh))[:, :, None] * updates[token][:, None]
            output[token] = (own[token] * _of_heads(queries[token], len(fresh))[:, :, None]).sum(1)
    return output


def keep_states(keys, updates, sums, states, offsets, cache_rows, path) -> None:
    for row, (first, end, place) in enumerate(rows(offsets, cache_rows)):
        if first < end:
            above = torch.zeros(len(states[place]))
            for node in [0, *(node for node in path[row].tolist() if node >= 0)]:
                states[place] *= torch.exp(sums[first + node] - above)[:, None, None]
                states[place] += _of_heads(keys[first + node], len(above))[:, :, None] * updates[first + node][:, None]
                above = sums[first + node]


def rows(offsets, cache_rows):
    """(first token, end, cache row) of every row."""
    return zip(offsets[:-1].tolist(), offsets[1:].tolist(), cache_rows.tolist(), strict=True)


def parents_of(ancestors, offsets):
    """[M] packed; None at roots and padding."""
    before = [None] * len(ancestors)
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for token in range(first, end):
            words = [word % (1 << 64) for word in ancestors[token].tolist()]
            others = sum(word << (64 * place) for place, word in enumerate(words)) ^ (1 << (token - first))
            before[token] = first + others.bit_length() - 1 if others else None
    return before


def _decayed(own, parent, state, sums, token):
    """[H, K, V]: what the token's predecessor leaves, after its decay."""
    above = torch.zeros_like(sums[token]) if parent is None else sums[parent]
    return torch.exp(sums[token] - above)[:, None, None] * (state if parent is None else own[parent])


def _of_heads(vectors, num_heads):
    """[Hk, K] -> [H, K]."""
    return vectors.repeat_interleave(num_heads // len(vectors), dim=0)
