# Arguments of a draft and of its outcome, row by row.

cdef uint8_t scope_of(scope) except? 255:
    cdef int64_t number
    try:
        number = whole(scope, "scope")
    except OverflowError:
        number = -1
    if not 0 <= number <= LAST_SCOPE:
        raise ValueError(f"scope must be in [0, {MAX_SCOPE}], got {scope}; take the number modulo {MAX_SCOPE + 1}")
    return <uint8_t> number


cdef vector[uint8_t] scopes_of(scopes, Py_ssize_t num_rows) except *:
    """One per row; None for 0."""
    cdef vector[uint8_t] numbers
    cdef Py_ssize_t row
    numbers.resize(max(1, num_rows), 0)
    if scopes is None:
        return numbers
    _check_number(scopes, num_rows)
    for row in range(num_rows):
        numbers[row] = scope_of(scopes[row])
    return numbers


cdef void _check_number(scopes, Py_ssize_t num_rows) except *:
    if len(scopes) != num_rows or isinstance(scopes, dict):
        raise ValueError(f"scopes must hold one number per row ({num_rows}), got {len(scopes)}")


cdef void set_scopes(scopes, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    _check_number(scopes, requests.size())
    for row in range(requests.size()):
        requests[row].scope = scope_of(scopes[row])


cdef void set_depths(max_depths, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    if len(max_depths) != <Py_ssize_t> requests.size() or min(max_depths) < 0:
        raise ValueError(f"max_depths must hold one number >= 0 per row ({requests.size()}), got {max_depths}")
    for row in range(requests.size()):
        requests[row].max_depth = min(whole(max_depths[row], "max_depths"), NO_BOUND)


cdef void set_keys(const uint64_t[::1] keys, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    if keys.shape[0] != <Py_ssize_t> requests.size():
        raise ValueError(f"rows and steps must hold one number per history ({requests.size()}), got {keys.shape[0]}")
    for row in range(requests.size()):
        requests[row].key = keys[row]


cdef object prices_of(rises, budget):
    """float32[at least the budget]."""
    prices = np.ascontiguousarray(rises, dtype=np.float32)
    if prices.ndim != 1 or len(prices) < budget:
        raise ValueError(f"rises must hold one entry per node of the budget ({budget}), got shape {prices.shape}")
    return prices


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
