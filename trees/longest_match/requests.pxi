# Arguments of a draft, row by row.

cdef enum:
    LARGEST_POSITION = 2147483648  # leaves room for the deepest draft below 2**32


cdef void view_shapes(list shapes, list held, vector[ShapeView]& views) except *:
    """Views into arrays that `held` keeps."""
    cdef ShapeView view
    cdef const int32_t[::1] parents
    for shape in shapes:
        if not hasattr(shape, "parents"):
            raise TypeError(f"shape must be a TreeShape or one per history, got {type(shape).__name__}; see TreeShape")
        numbers = shape.parents
        held.append(numbers)
        parents = numbers
        if parents.shape[0] == 0:
            raise ValueError("a shape must hold at least the root, got no slot; use TreeShape.empty()")
        view.parents, view.num_slots = &parents[0], parents.shape[0]
        if not shape_is_sound(view):
            raise ValueError(
                f"a shape must have parents[0] = -1 and 0 <= parents[i] < i, got {numbers}; see TreeShape.check()"
            )
        views.push_back(view)


cdef void set_requests(
    vector[int32_t]& windows, vector[int32_t]& sizes, const uint64_t[::1] keys, vector[DraftRequest]& requests
) except *:
    """One per row, its kind and floor still unset."""
    cdef size_t row, limit = windows.size() // sizes.size()
    if keys.shape[0] != <Py_ssize_t> sizes.size():
        raise ValueError(
            f"rows and steps must hold one number per history ({sizes.size()}), got {keys.shape[0]}; number them from 0"
        )
    requests.resize(sizes.size())
    for row in range(sizes.size()):
        if sizes[row] == 0:
            raise ValueError("every history must end with the pending token, got an empty one; pass at least one token")
        requests[row].window, requests[row].window_size = &windows[row * limit], sizes[row]
        requests[row].key = keys[row]


cdef void share_noise(vector[DraftRequest]& requests, uint64_t seed, rows, positions) except *:
    """Give every request the key of the noise that the verifier draws its row's next tokens with."""
    cdef const int64_t[::1] row_numbers = int64_array(rows, "rows")
    cdef const int64_t[::1] first_positions = int64_array(positions, "positions")
    cdef size_t row
    if first_positions.shape[0] != <Py_ssize_t> requests.size():
        raise ValueError(
            f"positions must hold one number per history ({requests.size()}), got {len(positions)}; "
            "None is the histories' lengths"
        )
    for row in range(requests.size()):
        if not 0 <= first_positions[row] < LARGEST_POSITION:
            raise ValueError(f"positions must be in [0, 2**31), got {first_positions[row]}; count tokens from 0")
        requests[row].target_key = stream_key(seed, TARGET)
        requests[row].row, requests[row].position = row_numbers[row], first_positions[row]
