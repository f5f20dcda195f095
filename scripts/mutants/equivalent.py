"""Changes that leave the behaviour as it is: (file, source line, change) and why. They are not judged.

Of equal lines all are meant, or the nth alone: (file, source line, change, nth).
"""

from __future__ import annotations

from mutants.equivalent_headers import OF_FILTERS, OF_GROWTH

_LAYERS = "self.layers = nn.ModuleList([type(decoder.layers[0])(self.config, layer_idx=0)])"
_CHUNK = "end = min(start + PROMPT_CHUNK, length - 1)"
_ONE_CLASS = "all layers of a served target are of one class"
_LAST = "last = target.get_decoder().layers[-1]"
_ONE_MORE = "one pair more is computed, whose keys the next run overwrites"

OF_TRAINED: dict[str, dict[tuple[str | int, ...], str]] = {
    "eagle/head.py": {
        (_LAYERS, "0 -> 1"): _ONE_CLASS,
        (_LAYERS, "0 -> 1 #2"): "a cache gives a layer's number the next place, whatever it is",
    },
    "eagle/mtp_head.py": {(_LAST, "1 -> 0"): _ONE_CLASS, (_LAST, "drop USub"): _ONE_CLASS},
    "eagle/followed_rows.py": {(_CHUNK, "Sub -> Add"): _ONE_MORE, (_CHUNK, "1 -> 0"): _ONE_MORE},
    "streams/rider.py": {
        (
            "self.last_seconds = 0.0  # that the run at a step's end took",
            "0.0 -> 1.0",
        ): "it is read where there are laws, and the run that made them has set it",
        (
            "while len(self._laws) > max(MOST_HELD, len(live.histories)):",
            "Gt -> GtE",
        ): "laws that are held for texts that may come back, one less of thousands",
    },
}

_GLANCE = "return (of_row + self._row_pages_ahead) * num_rows + of_drafts + others <= self.pages.num_free"

_CAPPED = "return chance if chance < 1.0 else 1.0 if chance >= 1.0 else 0.0"

_EMPTY_CONTEXT = "the first context of a file is the empty one, below which nothing lies"

_REFILLED = "rows that the cache does not know are filled anew, whatever it is said to hold of them"
_HAS_A_TOKEN = "every vocabulary has a token 1"
_UNREAD = "what is there of a text is neither new nor read"

OF_FOREIGN: dict[str, dict[tuple[str | int, ...], str]] = {
    "llama_cpp/sequences.py": {
        ("super().__init__(0, 0)", "0 -> 1"): "storage of another kind of cache, which is not used",
        ("super().__init__(0, 0)", "0 -> 1 #2"): "storage of another kind of cache, which is not used",
        ("if plan.is_prompt or end - first == 1:", "Sub -> Add"): "a shortcut: one node is a tree, too",
        ("if row.end > kept:", "Gt -> GtE"): "nothing is there to be removed",
        ("if row.end > length:", "Gt -> GtE"): "nothing is there to be removed",
    },
    "foreign/model.py": {
        (
            "self.nothing = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)"
            "  # says device and dtype",
            "0 -> 1",
        ): "its number is never read",
    },
    "mlx/attention.py": {
        (
            "if plan.num_tokens == plan.num_rows == 1 and window is None:",
            "1 -> 0",
        ): "a shortcut: a mask of a token that sees all says the same",
    },
    "mlx/recurrent.py": {
        (
            "stored = [None if array is None else array + 0 for array in layer.stored]",
            "Add -> Sub",
        ): "a copy either way",
    },
    "llama_cpp/backend.py": {
        ("return max(context.num_slots - filled, 0)", "0 -> 1"): "neither is a page",
    },
    "foreign/tree_check.py": {
        ("if not difference <= tolerance:", "LtE -> Lt"): "a measured number that is exactly the bound",
    },
}

OF_SHARING: dict[str, dict[tuple[str | int, ...], str]] = {
    "exchange.py": {
        (
            "Finalize(self, _finish, (self._own, self._process), exitpriority=0)",
            "0 -> 1",
        ): "nothing else that ends with a process needs these files",
        ("self._next_look = 0.0", "0.0 -> 1.0"): "the clock is beyond the first second of its machine",
        (
            'return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little") | 1',
            "1 -> 0",
        ): "a digest is 0 with a chance of 2**-64",
        ("self._num_taught = 0  # calls that learn", "0 -> 1"): "where a count begins does not matter",
        ("if time.monotonic() >= self._next_look:", "GtE -> Gt"): "an instant later",
    },
    "news.py": {
        ("tokens[columns >= self.lengths[:, None]] = 0", "0 -> 1"): _UNREAD,
        ("tokens[~is_told] = 0", "0 -> 1"): _UNREAD,
        (
            "return max(int(ids.max(initial=0)) for ids in (self.batch.token_ids, self.top_ids, *self.befores))",
            "0 -> 1",
        ): _HAS_A_TOKEN,
        ("return int(self.tokens.max(initial=0))", "0 -> 1"): _HAS_A_TOKEN,
    },
    "peer_file.py": {("return self._place > FILE_BYTES", "Gt -> GtE"): "as in own_files.py"},
    "own_files.py": {
        (
            "if self._size > FILE_BYTES:  # at once: who has read the last piece looks for the next file",
            "Gt -> GtE",
        ): "a file may be one byte shorter",
        ("self._num_begun = self._size = 0  # the latter of the newest file", "0 -> 1"): "where files' numbers begin",
    },
}

OF_SCHEDULING: dict[str, dict[tuple[str | int, ...], str]] = {
    "prefilled.py": {
        ("most = max(min(source.done, len(target.token_ids)), 0)", "0 -> 1"): "one token is no piece",
    },
    "job_reader.py": {
        (
            "elif self._counted and self._counted[-1].stop == rows.start:",
            "1 -> 0",
        ): "numbers that follow the first ones alone become one range: those after others stay apart",
    },
    "within_pages.py": {
        (_GLANCE, "LtE -> Lt"): "a glance that does not see enough leaves the answer to `_fit`",
        ("self._let_take(owner, 0, row.num_cached)", "0 -> 1"): "a new owner holds no page that it could share",
        (
            "return self._is_plenty(len(live), 1) or self._fit(live, 0)",
            "1 -> 0",
        ): "one token needs one page at most and its draft another: the glance still asks for no less than `_fit`",
        (
            "self.pages.write(owner, 0, row.num_cached)",
            "0 -> 1",
        ): "who holds no page yet takes new ones for all of its slots",
    },
    "sample_steps.py": {
        (
            "noise = VerifierNoise(seed=0, rows=live.indices, steps=live.steps, positions=live.lengths + 1)",
            "Add -> Sub",
        ): "other random numbers",
    },
    "scheduler.py": {("self._num_entered = 0", "0 -> 1"): "turns are only compared with each other"},
}

_ONE_INPUT = "inputs = several[0] if len(several) == 1 else torch.cat(several, dim=1)"
_GROUP = 'weight, group = self.module.weight, getattr(self.module, "group_size", hidden_states.shape[-1])'

OF_RECURRENT: dict[tuple[str | int, ...], str] = {
    ("stand/fusion/forwards/delta_layer.py", _ONE_INPUT, "1 -> 0 #2"): "one tensor is copied",
    ("stand/fusion/forwards/gated_norm.py", _GROUP, "drop USub"): "states have two dimensions",
    ("stand/gpu/kernel_scan.py", "kept = RecurrentStates(1)", "1 -> 0"): "nobody asks a chain for its number of rows",
    ("stand/forward/cache/key_shape.py", "_STATES[model] = cache.recurrent.like(0)", "0 -> 1"): "only shapes are read",
}

_GENERATOR = (
    'layer, weight, generator = self._layer, self._layer.kv_b_proj.weight, torch.Generator("cpu").manual_seed(0)'
)
_NO_STATES = "self.recurrent = RecurrentStates(0) if recurrent is None else recurrent"
_TYPE = "dtype, device = prefilled.keys[0].dtype, prefilled.keys[0].device"

OF_KINDS: dict[tuple[str | int, ...], str] = {
    ("stand/forward/latent_keys.py", _GENERATOR, "0 -> 1"): "other random numbers",
    ("stand/gpu/device_cache.py", _NO_STATES, "0 -> 1"): "no layer has states",
    ("stand/gpu/device_cache.py", _TYPE, "0 -> 1"): "all have one type",
    ("stand/gpu/device_cache.py", _TYPE, "0 -> 1 #2"): "and lie on one device",
}

_BEST = "return np.where(sums > 0.0, np.take_along_axis(ids, best, axis=1), NO_TOKEN), sums.clip(max=1.0)"
_PADDED = "(self.top_ids, others.top_ids, NO_TOKEN), (self.top_probs, others.top_probs, 0.0)"

OF_NEIGHBOURS: dict[str, dict[tuple[str | int, ...], str]] = {
    "laws.py": {
        ("drawn = np.random.default_rng(0).standard_normal((sizes[0], self.dim), dtype=np.float32)", "0 -> 1 #2"): (
            "other random numbers"
        ),
        ("befores[start] = 0.0 if before is None else before", "0.0 -> 1.0"): "what is not known is left out",
    },
    "memory.py": {
        (_PADDED, "0.0 -> 1.0"): "a law's padding is no token, whose chance is not read",
        (
            "shares = np.exp(SHARPNESS * (cosines - cosines[:, :1]))  # 0 where there is no neighbour",
            "Sub -> Add",
        ): "shares are divided by their sum: a common factor",
        (_BEST, "drop clip"): "shares of laws add up to 1 at most: a guard for rounding",
        ("lengths = np.linalg.norm(centred, axis=-1, keepdims=True)", "drop USub"): "states have two dimensions",
    },
}

_SAME_FILES = "if timed is not None and self._timed is not None and timed.path(1) == self._timed.path(1):"

EQUIVALENT: dict[tuple[str | int, ...], str] = {
    (
        "stand/media/check.py",
        "drawn = np.random.default_rng(0).choice(tokens, len(CHECK_PARENTS) - 1)",
        "0 -> 1",
    ): "a tree of other tokens tells as much",
    (
        "stand/media/check.py",
        "cache = TreeCache(num_rows=1, room=len(token_ids) + DRAFT_ROOM)",
        "Add -> Sub",
    ): "a room grows where it must",
    (
        "stand/media/media.py",
        "return cls(inputs, types, positions, int(offsets[-1, -1]), start, _digest(named))",
        "1 -> 0 #2",
    ): "all rows agree at the last token",
    **{
        (
            "stand/media/check.py",
            "tree = DraftBatch.concatenate([check_tree(_tokens_of_text(model, token_ids[-1]))])",
            change,
        ): "its root may be any token of text"
        for change in ("drop USub", "1 -> 0")
    },
    (
        "stand/media/check.py",
        "if not difference <= tolerance:",
        "LtE -> Lt",
    ): "a measured number that is exactly the bound",
    (
        "stand/gpu/packets/packing.pxi",
        "cdef Py_ssize_t row, place, first, end = 0",
        "0 -> 1",
    ): "paths begin one place later in an array that has room for the root, which no path has",
    (
        "stand/gpu/packets/packing.pxi",
        "for node in range(support_ids.shape[0] if width else 0):",
        "0 -> 1",
    ): "nothing is copied of a law without a width",
    (
        "stand/gpu/packets/packing.pxi",
        "cdef int64_t splits = max(row_items // max(tiles, 1), 1)",
        "max -> its argument 1 #2",
    ): "every row that is given has a tile",
    (
        "stand/gpu/packets/work_list.py",
        "most = tiling.most_items(int(offsets[-1]), len(lengths), int(lengths.max(initial=0)))",
        "0 -> 1",
    ): "a list of no rows has no items",
    (
        "stand/gpu/tuning/attention_tiles.py",
        "choices = [[one for one in tile if 0 < limits.needs(one) <= limits.shared_bytes] for tile in tiles]",
        "0 -> 1",
    ): "no tile needs a single byte",
    (
        "stand/gpu/packets/packing.pxi",
        "for node in range(1, count):",
        "1 -> 0",
        2,
    ): "no node has the root's round, whose places are none",
    (
        "stand/drafters/costs/step_cost.py",
        "return seconds if (seconds[1:] > JUMP * curve).any() else None",
        "Gt -> GtE",
    ): "measured numbers that are exactly the bound",
    (
        "verifiers/operands.py",
        "leaves[parents[parents >= 0]] = False",
        "GtE -> Gt",
    ): "only the first root is taken for a leaf; roots pass whatever their threshold, and their prefix is 1",
    (
        "verifiers/operands.py",
        "leaves[parents[parents >= 0]] = False",
        "0 -> 1",
    ): "only the first root is taken for a leaf; roots pass whatever their threshold, and their prefix is 1",
    (
        "verifiers/rules/spectr.py",
        "law = operands.module.zeros_like(operands.law)  # [M, S] per parent: what its children were drawn from",
        "law -> target",
    ): "zeros of the same shape and type",
    (
        "verifiers/walk.py",
        "length = [0] * len(passed)",
        "0 -> 1",
    ): "lengths are only compared with each other, and all are one longer",
    ("trees/include/noise.pxi", "return 0", "0 -> 1"): "every number but -1 says that nothing was wrong",
    (
        "trees/include/noise.pxi",
        "cdef uint64_t key = stream_key(seed, stream), row_key, step, bits = 0",
        "0 -> 1",
    ): "only bits from the 32nd on are asked for",
    ("verifiers/operands.py", "return self.target * 1.0", "Mult -> Div"): "times or divided by 1",
    (
        "verifiers/set_law.py",
        "step = np.where(left > 0, law[:, columns] / np.where(left > 0, left, 1.0), 0.0)",
        "Gt -> GtE #2",
    ): "where nothing is left outside a set, the law of what is drawn next is 0 too",
    ("stand/forward/recurrent/tree_scan.py", "size = chunk[0].shape[2]", "0 -> 1"): "keys are as many as queries",
    (
        "verifiers/draw.py",
        "from_rows = _token_at(rows, sums, (points - on_support) / torch.where(scale > 0, scale, 1.0))",
        "1.0 -> 0.0",
    ): "with scale 0 all weight lies on the support: this token is not looked at",
    (
        "verifiers/draw.py",
        "from_rows = _token_at(rows, sums, (points - on_support) / torch.where(scale > 0, scale, 1.0))",
        "Gt -> GtE",
    ): "with scale 0 all weight lies on the support: this token is not looked at",
    (
        "verifiers/draw.py",
        "blocks = torch.searchsorted(sums, points, right=True).clip(max=sums.shape[1] - 1)",
        "drop clip",
    ): "a point lies below the total, so a block is always found: a guard for NaN only",
    (
        "verifiers/draw.py",
        "blocks = torch.searchsorted(sums, points, right=True).clip(max=sums.shape[1] - 1)",
        "Sub -> Add",
    ): "a point lies below the total, so a block is always found: a guard for NaN only",
    (
        "verifiers/draw.py",
        "blocks = torch.searchsorted(sums, points, right=True).clip(max=sums.shape[1] - 1)",
        "1 -> 0",
    ): "a point lies below the total, so a block is always found: a guard for NaN only",
    (
        "verifiers/draw.py",
        "return ids.gather(1, within.clip(max=BLOCK_SIZE - 1))[:, 0]",
        "drop clip",
    ): "a point lies below its block's sum, so a token is always found: a guard for NaN only",
    (
        "verifiers/draw.py",
        "return ids.gather(1, within.clip(max=BLOCK_SIZE - 1))[:, 0]",
        "Sub -> Add",
    ): "a point lies below its block's sum, so a token is always found: a guard for NaN only",
    (
        "verifiers/draw.py",
        "return ids.gather(1, within.clip(max=BLOCK_SIZE - 1))[:, 0]",
        "1 -> 0",
    ): "a point lies below its block's sum, so a token is always found: a guard for NaN only",
    (
        "verifiers/verdict_compiled.pxi",
        "if failure <= TINY:",
        "<= -> <",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/verdict_compiled.pxi",
        "if total > 0 and support[slot] >= 0 and mass[slot] > 0 and not found:",
        "> -> >=",
    ): "a total of 0 has no positive mass in it",
    ("verifiers/verdict_compiled.pxi", "if total > 0 and not found:", "> -> >="): "a total of 0 has no weight in it",
    ("verifiers/verdict_compiled.pxi", _CAPPED, "< -> <="): "a chance of 1 is 1 in either branch",
    (
        "verifiers/verdict_compiled.pxi",
        _CAPPED,
        "1.0 -> 0.0 #3",
    ): "chances below 1 never come here, only NaN fails both",
    (
        "verifiers/verdict_compiled.pxi",
        "probs, nodes, np.empty((size, 0), dtype=np.int32), np.empty((size, 0)), np.ones(size), uniforms",
        "0 -> 1 #2",
    ): "masses are read where there is a support, of which there is none",
    (
        "verifiers/verdict_compiled.pxi",
        "for token in range(chosen * BLOCK_SIZE, min(probs.shape[0], <Py_ssize_t> (chosen + 1) * BLOCK_SIZE)):",
        "min -> its argument 1",
    ): "the block outweighs the point; two orders of addition may differ in the last bit, then the next token is taken",
    (
        "verifiers/verdict_compiled.pxi",
        "cdef cpp_vector[double] sums = cpp_vector[double]((probs.shape[1] + BLOCK_SIZE - 1) // BLOCK_SIZE)",
        "- -> +",
    ): "a further block has no tokens, and so no weight",
    (
        "verifiers/verdict_compiled.pxi",
        "cdef cpp_vector[double] sums = cpp_vector[double]((probs.shape[1] + BLOCK_SIZE - 1) // BLOCK_SIZE)",
        "1 -> 0",
    ): "a further block has no tokens, and so no weight",
    (
        "verifiers/rules/traversal.py",
        "possible = failure > operands.tiny",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/rules/rrs.py",
        "possible = total > operands.tiny  # else the child always passes, and no row uses the mass",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/rules/ot_traversal.py",
        "inherited = operands.ratio(weights, np.where(left > operands.tiny, left, 0.0))",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/rules/ot_traversal.py",
        "if failure <= operands.tiny:",
        "LtE -> Lt",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/transport.py",
        "for other in np.flatnonzero(movable[column] > ROUNDING).tolist():",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/transport.py",
        "if spare[column] > ROUNDING:",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/transport.py",
        "previous = {int(column): -1 for column in np.flatnonzero(entry > ROUNDING)}",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/transport.py",
        "slack = np.maximum(supply - flow.sum(axis=1), 0.0)",
        "drop maximum",
    ): "removes rounding below 0",
    (
        "verifiers/transport.py",
        "spare = np.maximum(capacity - flow.sum(axis=0), 0.0)",
        "drop maximum",
    ): "removes rounding below 0",
    (
        "verifiers/transport.py",
        "flow = np.maximum(flow + change, 0.0)",
        "drop maximum",
    ): "removes rounding below 0",
    (
        "verifiers/requirements.py",
        "departs[children] = np.abs(batch.law[children] - expected).max(axis=1) > LAW_TOLERANCE",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/rules/spectr.py",
        "meets = 1.0 - (1.0 - accepted) ** num_children <= middle * accepted",
        "LtE -> Lt",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "verifiers/rules/spectr.py",
        "low, high = operands.ones(), num_children.clip(min=1.0)",
        "drop clip",
    ): "for nodes without children, whose rho meets no law",
    (
        "verifiers/rules/spectr.py",
        "low, high = operands.ones(), num_children.clip(min=1.0)",
        "1.0 -> 0.0",
    ): "for nodes without children, whose rho meets no law",
    (
        "verifiers/draw.py",
        "cdf = torch.where(inside, rows.gather(1, ids).double(), 0.0).cumsum(1)",
        "0.0 -> 1.0",
    ): "weight behind the row's end, and points lie before it",
    (
        "verifiers/rules/spectr.py",
        "mass = (operands.target - common * kept[:, None]).clip(min=0.0)",
        "drop clip",
    ): "removes rounding below 0",
    (
        "verifiers/rules/rrs.py",
        "mass[parents] = module.where(possible[:, None], rest / divisor[:, None], mass[parents])",
        "parents -> children",
    ): "where it differs the child always passes, and no row uses the mass",
    (
        "stand/laws/sampling.py",
        "softmax = torch.softmax(self.warp(scores), dim=-1)",
        "drop USub",
    ): "scores have 2 dimensions",
    ("stand/laws/sampling.py", "best = torch.topk(softmax, num_top, dim=-1)", "drop USub"): "laws have 2 dimensions",
    ("stand/laws/sampling.py", "best = scores.argmax(dim=-1, keepdim=True)", "drop USub"): "scores have 2 dimensions",
    ("stand/laws/sampling.py", "best = scores.amax(dim=-1)", "drop USub"): "scores have 2 dimensions",
    (
        "stand/laws/sampling.py",
        "best = scores.amax(dim=-1)",
        "1 -> 0",
    ): "names NaN where there is one, else +inf where there is one: the same by rows and by columns",
    (
        "stand/laws/sampling.py",
        'kind = "NaN" if bool(torch.isnan(broken).any()) else "+inf" if bool((broken > 0).any()) else "only -inf"',
        "Gt -> GtE",
    ): "what is compared is not finite",
    (
        "stand/laws/sampling.py",
        'kind = "NaN" if bool(torch.isnan(broken).any()) else "+inf" if bool((broken > 0).any()) else "only -inf"',
        "0 -> 1",
    ): "what is compared is not finite",
    (
        "stand/laws/sampling.py",
        "if bool(torch.isnan(laws.probabilities[:, 0]).any()):",
        "0 -> 1",
    ): "a broken row is NaN throughout, so every column tells",
    ("stand/laws/sampling.py", "if params.temperature != 1.0:", "1.0 -> 0.0"): "a temperature of 1 divides by 1",
    ("stand/laws/sampling.py", "if params.min_p > 0.0:", "Gt -> GtE"): "min_p 0 takes no token out",
    (
        "stand/laws/grammars/matchers.py",
        "matcher = self._line[-1].deep_copy() if self._copies else self._line[-1]",
        "1 -> 0",
    ): "without copies there is one matcher",
    ("stand/laws/grammars/masks.py", "if 32 * words.shape[1] <= num_tokens:", "LtE -> Lt"): "a copy of the same masks",
    (
        "stand/laws/grammars/masks.py",
        "num_beyond = -(-scores.shape[1] // 32) - words.shape[1]",
        "Sub -> Add",
    ): "words that are too many are cut",
    ("stand/laws/grammars/masks.py", "if num_beyond > 0:", "Gt -> GtE"): "none are added",
    (
        "stand/laws/grammars/masks.py",
        'if is_open.any() and scores.device.type == "cpu":  # a GPU masks all lines before it could learn which ones',
        "Eq -> NotEq",
    ): "all lines are masked, open ones by masks of all bits",
    (
        "stand/laws/grammars/matchers.py",
        "self._last = 0  # token taken",
        "0 -> 1",
    ): "no grammar ends before its first token",
    (
        "stand/laws/grammars/masks.py",
        "same = len(commonprefix([current, path[:-1]]))",
        "1 -> 0",
    ): "it goes back further than it must, and takes the same tokens again",
    (
        "stand/laws/grammars/masks.py",
        "same = len(commonprefix([current, path[:-1]]))",
        "drop USub",
    ): "it goes back further than it must, and takes the same tokens again",
    (
        "trees/draft.py",
        "if abs(law.sum(dtype=np.float64) - 1.0) > LAW_TOLERANCE:",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "trees/include/noise.pxi",
        "cdef uint64_t words = 0, key = stream_key(seed, stream)",
        "0 -> 1",
    ): "only bits above 32 count",
    (
        "trees/include/noise.pxi",
        "cdef uint64_t key = stream_key(seed, stream), bits = 0",
        "0 -> 1",
    ): "only bits above 32 count",
    (
        "stand/drafters/blended.py",
        "return lookup.draft([tokens], 4, seed=0, rows=row, steps=row, kind=self.kind)",
        "0 -> 1",
    ): "any seed shows the kind of draft",
    (
        "stand/drafters/growing_draft.py",
        "draft = GrowingDraft(np.full(3, 0.5), max_depth=2, is_greedy=False, token_ids=[0])",
        "0 -> 1",
    ): "any pending token shows the kind of draft",
    ("stand/drafters/blended.py", _SAME_FILES, "1 -> 0"): "a call of no rows would have the file of one",
    ("stand/drafters/blended.py", _SAME_FILES, "1 -> 0 #2"): "a call of no rows would have the file of one",
    (
        "stand/drafters/law_trees.py",
        "for node in range(1, int(planned.offsets[row + 1]) - first):",
        "1 -> 0 #2",
    ): "the root's parent is no node, so the root is passed over",
    ("stand/drafters/costs/step_cost.py", "if time.perf_counter() > end:", "Gt -> GtE"): "an instant earlier",
    (
        "stand/drafters/fixed_shape.py",
        "return lookup.draft([tokens], self.shape, seed=0, rows=row, steps=row, kind=self.kind)",
        "0 -> 1",
    ): "any seed shows the kind of draft",
    (
        "stand/drafters/blended.py",
        "if len(self._known_rises) > MOST_RISES:",
        "Gt -> GtE",
    ): "what is forgotten is worked out again",
    (
        "stand/drafters/blended.py",
        "if len(self._known_rises) > MOST_RISES:",
        "Gt -> LtE",
    ): "what is forgotten is worked out again",
    (
        "stand/drafters/check.py",
        "if batch.num_nodes > len(batch):",
        "Gt -> GtE",
    ): "roots alone with right tokens have no fault, so this is not asked",
    (
        "stand/drafters/check.py",
        "if not np.all(np.abs(sums - 1.0) <= SUM_TOLERANCE):",
        "LtE -> Lt",
    ): "differs where both sides are equal to the last bit",
    (
        "stand/drafters/check.py",
        "least = min(int(batch.token_ids.min()), 0)",
        "0 -> 1",
    ): "only what is below 0 counts",
    (
        "stand/drafters/check.py",
        "most = max(int(batch.token_ids.max()), int(batch.support_ids.max(initial=-1)))",
        "1 -> 0",
    ): "tokens are at least 0 where this decides",
    (
        "stand/drafters/check.py",
        "most = max(int(batch.token_ids.max()), int(batch.support_ids.max(initial=-1)))",
        "drop USub",
    ): "every vocabulary has a token 1",
    (
        "stand/drafters/draft_model.py",
        "self._cache = TreeCache(num_rows=0, room=0)",
        "0 -> 1",
    ): "the first draft fills a cache of its own",
    (
        "stand/drafters/draft_model.py",
        "self._cache = TreeCache(num_rows=0, room=0)",
        "0 -> 1 #2",
    ): "the first draft fills a cache of its own",
    (
        "stand/drafters/drafter.py",
        "lookup.learn(context[:1], np.append(context[1:], np.int32(token)))",
        "1 -> 0",
    ): "the context goes on in the same two ways",
    (
        "stand/drafters/drafter.py",
        "lookup.learn(context[:1], np.append(context[1:], np.int32(token)))",
        "1 -> 0 #2",
    ): "the context is one token longer and goes on in the same two ways",
    (
        "stand/drafters/fixed_shape.py",
        "if depth >= self.shape.max_depth:",
        "GtE -> Gt",
    ): "a shape cut at its own depth is the whole shape",
    (
        "stand/drafters/costs/step_cost.py",
        "size, last = num_rows, 0.0",
        "0.0 -> 1.0",
    ): "it is set before it decides",
    (
        "stand/drafters/token_recycling.py",
        "for slot in range(1, self.shape.num_nodes):",
        "1 -> 0",
    ): "the root's parent is no slot, so the root is passed over",
    (
        "stand/drafters/costs/known.py",
        'return names[0] if names else kernel_value("machdep.cpu.brand_string") or platform.processor() or '
        "platform.machine()",
        "0 -> 1",
    ): "all cores of a machine have one name",
    (
        "trees/include/noise.pxi",
        "check_stream(seed, 0)",
        "0 -> 1",
    ): "both are streams; the seed is checked",
    (
        "trees/include/noise.pxi",
        "cdef uint64_t key, bits = 0",
        "0 -> 1",
    ): "only bits above 32 count",
    (
        "verifiers/rules/ot_traversal.py",
        "rest[support] = np.maximum(mass[support] - plan.sum(axis=0), 0.0)",
        "drop maximum",
    ): "removes rounding below 0",
    (
        "verifiers/rules/ot_traversal.py",
        "inherited = operands.ratio(weights, np.where(left > operands.tiny, left, 0.0))",
        "0.0 -> 1.0",
    ): "where nothing is left no weight is left either: they sum to at most 1",
    (
        "verifiers/rules/ranked_traversal.py",
        "children = np.flatnonzero((batch.depths > 0) & (place[parents] >= 0))",
        "Gt -> GtE",
    ): "a root's parent, -1, looks up the last node, which has no children",
    (
        "verifiers/rules/traversal.py",
        "threshold = (mass.sum(axis=1) + scale * operands.tail).clip(max=1.0)",
        "drop clip",
    ): "what is owed is at most 1: removes rounding above it, and a uniform is below 1",
    (
        "stand/drafters/draft_model.py",
        "self._cache = TreeCache(num_rows=len(rows), room=max(map(len, histories)) + self.gamma)",
        "Add -> Sub",
    ): "a cache without room grows when it is written to",
    (
        "stand/forward/packed_plan.py",
        "seen.append((seen[first + parent] if parent >= 0 else 0) | 1 << node)",
        "0 -> 1",
    ): "a root is node 0, whose bit is set in any case",
    (
        "stand/forward/packed_plan.py",
        "return bool((self._counts == self.width).all())",
        "Eq -> NotEq",
    ): "rows of one width are padded by nothing: slower, and the same",
    (
        "stand/forward/cache/tree_cache.py",
        "self._grow(max(plan.kv_length, min(2 * self.room, self.most_room or 2 * self.room)))",
        "Or -> And",
    ): "how much room a cache grows by at a time, not what is in it",
    (
        "stand/forward/cache/tree_cache.py",
        "self._grow(max(plan.kv_length, min(2 * self.room, self.most_room or 2 * self.room)))",
        "Mult -> Div",
    ): "how much room a cache grows by at a time, not what is in it",
    (
        "stand/forward/cache/tree_cache.py",
        "self._grow(max(plan.kv_length, min(2 * self.room, self.most_room or 2 * self.room)))",
        "Mult -> Div #2",
    ): "how much room a cache grows by at a time, not what is in it",
    (
        "stand/forward/cache/tree_cache.py",
        "if length > self.room:",
        "Gt -> GtE",
    ): "how much room a cache grows by at a time, not what is in it",
    (
        "stand/forward/packed_plan.py",
        "padded[:, :, 0] = True",
        "0 -> 1",
    ): "a place without a token may look at any slot, and rows of unequal width have two",
    (
        "stand/forward/cache/tree_cache.py",
        "self.most_room = 0  # rooms that double stop here, where set; a longer row still gets what it needs",
        "0 -> 1",
    ): "how much room a cache grows by at a time, not what is in it",
    (
        "stand/drafters/growing_draft.py",
        "width = max((len(opened.law) for opened in self.nodes.values()), default=1)",
        "1 -> 0",
    ): "a draft of the root alone has no law whose width could matter",
    **{(f"trees/blended/growth/{file}", line, change): why for (file, line, change), why in OF_GROWTH.items()},
    **{(f"stand/laws/{file}", *change): why for file, of in OF_FILTERS.items() for change, why in of.items()},
    **OF_RECURRENT,
    **OF_KINDS,
    **{(f"stand/drafters/{file}", *change): why for file, of in OF_TRAINED.items() for change, why in of.items()},
    (
        "trees/blended/merging.py",
        "needed = largest = 0",
        "0 -> 1",
    ): "a byte of a cap that has room for a quarter more",
    (
        "trees/blended/merging.py",
        'num_children = np.concatenate([[0], np.cumsum(arrays["has_child"], dtype=np.int64)])[self._starts]',
        "0 -> 1",
    ): _EMPTY_CONTEXT,
    (
        "trees/blended/merging.py",
        "for context in range(len(num_children) - 1, -1, -1):",
        "1 -> 0 #2",
    ): _EMPTY_CONTEXT,
    (
        "stand/drafters/draft_model.py",
        "self._held = [history[:0] for history in histories]",
        "0 -> 1",
    ): _REFILLED,
    (
        "stand/drafters/draft_model.py",
        "history[:0] if source is None else history[: _common_length(self._held[source], history[:-1])]",
        "0 -> 1",
    ): _REFILLED,
    (
        "stand/drafters/check.py",
        "is_taken = is_taken and (law.dtype == FLOAT32 or law.dtype == FLOAT64)",
        "Or -> And",
    ): "what is not taken at once is asked array by array, which finds no fault",
    ("stand/laws/logprobs.py", "total = torch.logsumexp(scores, dim=-1)", "drop USub"): "the last of two axes",
    ("stand/laws/logprobs.py", "if end > len(own):", "Gt -> GtE"): "arrays grow a token earlier",
    ("stand/laws/logprobs.py", "top = torch.topk(values, self.count, dim=-1)", "drop USub"): "the last of two axes",
    (
        "stand/texts/stop.py",
        "self._window = max((len(text.encode()) for text in stop_strings), default=0) + 4",
        "0 -> 1",
    ): "without stop strings nobody asks for it",
    ("stand/texts/stop.py", "before = row.prompt[-1:].tolist()", "1 -> 0"): "the same text behind a longer beginning",
    (
        "stand/texts/stop.py",
        "texts += [self._tokenizer.decode(recent[first:]) for first in range(1, 4)]",
        "1 -> 0",
    ): "the whole text is among them already",
    **{(f"stand/sharing/{file}", *change): why for file, of in OF_SHARING.items() for change, why in of.items()},
    **{(f"stand/plugins/{file}", *change): why for file, of in OF_FOREIGN.items() for change, why in of.items()},
    **{(f"stand/scheduling/{file}", *change): why for file, of in OF_SCHEDULING.items() for change, why in of.items()},
    **{
        (f"stand/drafters/neighbours/{file}", *change): why
        for file, of in OF_NEIGHBOURS.items()
        for change, why in of.items()
    },
}
