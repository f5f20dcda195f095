# Arguments of a draft and of its outcome, row by row.

cdef int64_t checked_cap(max_bytes) except -1:
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


cdef cnp.ndarray checked_array(tokens):
    """int32[R, L], C-contiguous, as it was given: a copy of what an engine holds would take longer than learning."""
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 2:
        raise ValueError(f"tokens must be an int32[R, L] array, got {getattr(tokens, 'dtype', type(tokens))}; fill one")
    if not tokens.flags.c_contiguous:
        raise ValueError("tokens must be C-contiguous, got strides of another order; pass the whole array and rows")
    return tokens


cdef void fill_numbers(values, name, Py_ssize_t length, vector[int64_t]& numbers) except *:
    """numbers[length], copied. Arrays of int64 are read directly: a typed view would take longer than a text."""
    cdef const int64_t* first
    if not cnp.PyArray_Check(values) or not _is_int64(values):
        array = np.ascontiguousarray(values)
        if array.dtype.kind not in "iu" and array.size:
            raise ValueError(
                f"{name} must hold one whole number per text ({length}), got {values!r}; give each its own"
            )
        values = array.astype(np.int64)
    if cnp.PyArray_NDIM(values) != 1 or cnp.PyArray_DIM(values, 0) != length:
        raise ValueError(f"{name} must hold one whole number per text ({length}), got {values!r}; give each its own")
    first = <const int64_t*> cnp.PyArray_DATA(values)
    numbers.assign(first, first + length)


cdef bool_t _is_int64(cnp.ndarray values):
    """Is this int64[...], one after the other in memory?"""
    return cnp.PyArray_TYPE(values) == cnp.NPY_INT64 and cnp.PyArray_ISCARRAY_RO(values)


cdef void check_texts(const TextRows& texts, Py_ssize_t num_rows, Py_ssize_t most_tokens, int32_t reach) except *:
    """ValueError where a text is not in the array, or where what would be read is no token."""
    cdef int64_t text, first, at
    cdef const int32_t* tokens
    for text in range(texts.num_texts):
        if not 0 <= texts.rows[text] < num_rows:
            raise ValueError(f"rows must be in [0, {num_rows}), got {texts.rows[text]}; count the rows of tokens")
        if not 0 <= texts.num_new[text] <= texts.lengths[text] <= most_tokens:
            raise ValueError(
                f"texts must have 0 <= num_new <= length <= {most_tokens}, got num_new {texts.num_new[text]} and "
                f"length {texts.lengths[text]}; lengths count the new tokens too"
            )
        tokens = texts.tokens + texts.rows[text] * texts.stride
        first = max(0, texts.lengths[text] - texts.num_new[text] - reach)
        for at in range(first, texts.lengths[text] if texts.num_new[text] > 0 else first):
            if tokens[at] < 0:
                raise ValueError(f"tokens must not be negative, got {tokens[at]}; lengths must end before the padding")


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
