"""The kernels of recurrent layers as recurrences: a state for every token, made from its predecessor's."""

import torch
from torch.nn.functional import silu

from stand.forward.recurrent.gates import DeltaGates, StepSizes
from stand.forward.recurrent.linear_attention import NORM_EPSILON
from stand.gpu import kernel_scan


def use_plain_scans(monkeypatch) -> None:
    preparing = prepared, prepared_gated, prepared_steps
    for kernel in (*preparing, convolve, delta_updates, linear_attention, keep_states, keep_tails):
        monkeypatch.setattr(kernel_scan, kernel.__name__, kernel)


def convolve(inputs, tails, weight, bias, parents, depths, offsets, cache_rows, is_silu):
    mixed = torch.zeros(inputs.shape, dtype=weight.dtype)
    for first, end, place in rows(offsets, cache_rows):
        seen = {}
        for token in range(first, end):
            before = list(tails[place]) if token == first else seen[int(parents[token])]
            seen[token] = [*before, inputs[token]]
            newest = torch.stack(seen[token][-weight.shape[1] :]).float()
            total = (newest * weight.T.float()).sum(0)
            mixed[token] = total if bias is None else total + bias
    return silu(mixed) if is_silu else mixed


def keep_tails(inputs, tails, offsets, cache_rows, path) -> None:
    for row, (first, end, place) in enumerate(rows(offsets, cache_rows)):
        if first < end:
            kept = [first, *(first + node for node in path[row].tolist() if node >= 0)]
            tails[place] = torch.stack([*tails[place], *inputs[kept]])[-tails.shape[1] :]


def prepared(query, key, log_decay, ancestors, offsets):
    query, key = query.float(), key.float()
    query, key = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + NORM_EPSILON) for one in (query, key))
    return query * query.shape[2] ** -0.5, key, _sums(log_decay.float(), ancestors, offsets)


def prepared_gated(query, key, decay, rate, log_scale, bias, rate_scale, ancestors, offsets):
    gates = DeltaGates(decay, rate, log_scale, bias, rate_scale)
    return *prepared(query, key, gates.log_decay(), ancestors, offsets), gates.beta().float()


def prepared_steps(query, key, raw, bias, is_softplus, least, most, decay, ancestors, offsets):
    steps = StepSizes(raw, bias, is_softplus, (least, most), decay).values()
    return query.float(), key.float(), _sums(decay.float() * steps, ancestors, offsets), steps


def _sums(log_decay, ancestors, offsets):
    sums = log_decay.clone()
    for token, parent in enumerate(parents_of(ancestors, offsets)):
        sums[token] += 0.0 if parent is None else sums[parent]
    return sums


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


def linear_attention(queries, keys, updates, rates, sums, skip, states, ancestors, offsets, cache_rows, dtype):
    output, before, written = torch.zeros(updates.shape), parents_of(ancestors, offsets), _written(updates, rates)
    for first, end, place in rows(offsets, cache_rows):
        own = {}
        for token in range(first, end):
            fresh = _decayed(own, before[token], states[place], sums, token)
            own[token] = fresh + _of_heads(keys[token], len(fresh))[:, :, None] * written[token][:, None]
            output[token] = (own[token] * _of_heads(queries[token], len(fresh))[:, :, None]).sum(1)
            output[token] += 0.0 if skip is None else skip.float()[:, None] * updates[token].float()
    return output.to(dtype)


def keep_states(keys, updates, rates, sums, states, offsets, cache_rows, path) -> None:
    written = _written(updates, rates)
    for row, (first, end, place) in enumerate(rows(offsets, cache_rows)):
        if first < end:
            above = torch.zeros(len(states[place]))
            for node in [0, *(node for node in path[row].tolist() if node >= 0)]:
                states[place] *= torch.exp(sums[first + node] - above)[:, None, None]
                states[place] += _of_heads(keys[first + node], len(above))[:, :, None] * written[first + node][:, None]
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


def _written(updates, rates):
    """[M, H, V] float32."""
    return updates.float() if rates is None else updates.float() * rates[:, :, None]


def _decayed(own, parent, state, sums, token):
    """[H, K, V]: what the token's predecessor leaves, after its decay."""
    above = torch.zeros_like(sums[token]) if parent is None else sums[parent]
    return torch.exp(sums[token] - above)[:, None, None] * (state if parent is None else own[parent])


def _of_heads(vectors, num_heads):
    """[Hk, K] -> [H, K]."""
    return vectors.repeat_interleave(num_heads // len(vectors), dim=0)
