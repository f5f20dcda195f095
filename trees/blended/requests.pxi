# Arguments of a draft and of its outcome, row by row.

cdef int64_t checked_cap(max_bytes) except -1:
    if type(max_bytes) is float and max_bytes.is_integer():  # 4e9
        max_bytes = int(max_bytes)
    return within(max_bytes, "max_bytes", MIN_BYTES, 2**40 - 1, DEFAULT_MAX_BYTES)


cdef uint8_t scope_of(scope) except? 255:
    cdef int64_t number
    try:
        number = scope if type(scope) is int else whole(scope, "scope")
    except OverflowError:
        number = -1
    if not 0 <= number <= LAST_SCOPE:
        raise ValueError(f"scope must be in [0, {MAX_SCOPE}], got {scope}; take the number modulo {MAX_SCOPE + 1}")
    return <uint8_t> number


cdef void fill_scopes(scopes, Py_ssize_t num_rows, vector[uint8_t]& numbers) except *:
    """One per row; None for 0."""
    cdef Py_ssize_t row
    cdef const int64_t* given
    numbers.resize(max(1, num_rows), 0)
    if scopes is None:
        return
    _check_number(scopes, "scopes", num_rows)
    given = _int64s(scopes)
    for row in range(num_rows):
        if given != NULL and 0 <= given[row] <= LAST_SCOPE:
            numbers[row] = <uint8_t> given[row]
        else:
            numbers[row] = scope_of(scopes[row])


cdef void _check_number(values, name, Py_ssize_t num_rows) except *:
    cdef Py_ssize_t length = -1
    try:
        length = len(values)
    except TypeError:
        pass
    if length != num_rows or isinstance(values, dict):
        raise ValueError(f"{name} must hold one number per row ({num_rows}), got {values!r}; pass a list or an array")


cdef const int64_t* _int64s(values):
    """Where the numbers of an array lie that can be read directly, else NULL: a number of Python for every row takes
    as long as the row's share of a small draft."""
    if not cnp.PyArray_Check(values) or not _is_int64(values) or cnp.PyArray_NDIM(values) != 1:
        return NULL
    return <const int64_t*> cnp.PyArray_DATA(values)


cdef void set_scopes(scopes, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    cdef vector[uint8_t] numbers
    fill_scopes(scopes, requests.size(), numbers)
    for row in range(requests.size()):
        requests[row].scope = numbers[row]


cdef void set_depths(max_depths, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    cdef const int64_t* given
    _check_number(max_depths, "max_depths", requests.size())
    given = _int64s(max_depths)
    for row in range(requests.size()):
        if given != NULL and given[row] >= 0:
            requests[row].max_depth = <int32_t> min(given[row], <int64_t> NO_BOUND)
        else:
            requests[row].max_depth = _bound_of(max_depths[row], "max_depths", 0)


cdef void set_caps(max_nodes, vector[GrowthRequest]& requests) except *:
    """max_nodes: one number for all rows, or one per row."""
    cdef size_t row
    cdef bool_t is_one = type(max_nodes) is int or isinstance(max_nodes, (int, np.integer))
    if not is_one:
        _check_number(max_nodes, "max_nodes", requests.size())
    for row in range(requests.size()):
        requests[row].max_nodes = _bound_of(max_nodes if is_one else max_nodes[row], "max_nodes", 0)


cdef int32_t _bound_of(value, name, int32_t least) except -1:
    number = whole(value, name)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}; None is no bound")
    return min(number, NO_BOUND)


cdef int32_t checked_width(width, kind) except -1:
    """Children that a node may have; None for no bound."""
    if width is None:
        return NO_BOUND
    if width == 1 and kind == "mixed":
        raise ValueError("width must be at least 2 with mixed drafts, got 1; ask for sampled or deterministic chains")
    return _bound_of(width, "width", 1)


cdef bool_t _is_int64(cnp.ndarray values):
    """Is this int64[...], one after the other in memory?"""
    return cnp.PyArray_TYPE(values) == cnp.NPY_INT64 and cnp.PyArray_ISCARRAY_RO(values)


cdef DraftKind kind_of(kind, remedy) except *:
    if kind not in C_KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}; {remedy}")
    return <DraftKind> <int32_t> C_KIND_NUMBERS[kind]


cdef GrowthSettings growth_settings(kind, budget, floor, width) except *:
    """Those that are numbers; no laws from outside, no rises."""
    cdef GrowthSettings settings
    settings.kind = kind_of(kind, "deterministic is usual")
    budget, floor = whole(budget, "budget"), real(floor, "floor")
    if not 0 <= budget <= 2**20 or not 0.0 <= floor <= 1.0:
        raise ValueError(
            f"budget must be in [0, 2**20] and floor in [0, 1], got {budget} and {floor}; a floor of 0 is none"
        )
    settings.budget, settings.floor, settings.width = budget, floor, checked_width(width, kind)
    return settings


cdef int32_t checked_limit(limit) except -1:
    """Tokens of a law at most."""
    limit = whole(limit, "limit")
    if not 0 <= limit < 2**31:
        raise ValueError(f"limit must be in [0, 2**31), got {limit}; 10 is usual")
    return limit


cdef void set_keys(const uint64_t[::1] keys, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    if keys.shape[0] != <Py_ssize_t> requests.size():
        raise ValueError(
            f"rows and steps must hold one number per history ({requests.size()}), got {keys.shape[0]}; number them "
            "from 0"
        )
    for row in range(requests.size()):
        requests[row].key = keys[row]


cdef void set_windows(
    vector[int32_t]& windows, vector[int32_t]& sizes, int32_t reach, vector[GrowthRequest]& requests
) except *:
    """One request per row, with its window [reach], in scope 0 and without bounds or noise."""
    requests.resize(sizes.size())
    for row in range(sizes.size()):
        if sizes[row] == 0:
            raise ValueError("every history must end with the pending token, got an empty one; pass it at least")
        requests[row].window, requests[row].window_size = &windows[row * reach], sizes[row]
        requests[row].max_depth, requests[row].max_nodes = NO_BOUND, NO_BOUND
        requests[row].scope, requests[row].key = 0, 0


cdef object checked_rises(rises, budget):
    """float32[at least the budget]."""
    rises = np.ascontiguousarray(rises, dtype=np.float32)
    if rises.ndim != 1 or len(rises) < budget:
        raise ValueError(
            f"rises must hold one entry per node of the budget ({budget}), got shape {rises.shape}; lower the budget"
        )
    return rises


cdef void fill_paths(paths, vector[int32_t]& nodes, vector[int64_t]& ends) except *:
    """The nodes of all paths, one path after the other, and where each begins and ends."""
    cdef const int32_t[::1] one
    cdef Py_ssize_t i
    ends.push_back(0)
    for path in paths:
        one = int32_vector(path, "accepted")
        for i in range(one.shape[0]):
            nodes.push_back(one[i])
        ends.push_back(nodes.size())


cdef void check_outcomes(Py_ssize_t num_rows, Py_ssize_t num_paths, Py_ssize_t num_tokens) except *:
    if num_paths != num_rows or num_tokens != num_rows:
        raise ValueError(
            f"accepted and next_tokens must have one entry per row of the batch ({num_rows}), "
            f"got {num_paths} and {num_tokens}; give a row that kept nothing an empty path"
        )


cdef void check_paths(const Outcome& outcome, accepted) except *:
    cdef int64_t broken = first_broken_path(outcome)
    if broken >= 0:
        raise ValueError(
            f"accepted[{broken}] must be a path of nodes from a child of the root down, "
            f"got {list(accepted[broken])}; leave out the root"
        )


cdef LookupSettings lookup_settings(int depth, int64_t max_bytes, double fade, double rate):
    cdef LookupSettings settings
    settings.depth, settings.max_bytes, settings.fade, settings.rate = depth, max_bytes, fade, rate
    settings.learns_odds = rate > 0.0
    return settings
