# Texts in one array, as serving engines hold them.

cdef TextRows rows_of_texts(
    tokens, lengths, num_new, rows, vector[int64_t]& row_numbers, vector[int64_t]& sizes, vector[int64_t]& fresh
) except *:
    """Views of `tokens` and of the three vectors, which are filled; without scopes, and nothing of it checked but the
    kinds of arrays."""
    cdef TextRows texts
    cdef Py_ssize_t num_texts = len(lengths)
    cdef cnp.ndarray array = checked_array(tokens)
    fill_numbers(np.arange(num_texts) if rows is None else rows, "rows", num_texts, row_numbers)
    fill_numbers(lengths, "lengths", num_texts, sizes)
    fill_numbers(num_new, "num_new", num_texts, fresh)
    texts.tokens, texts.stride = <const int32_t*> cnp.PyArray_DATA(array), cnp.PyArray_DIM(array, 1)
    texts.rows, texts.lengths, texts.num_new = row_numbers.data(), sizes.data(), fresh.data()
    texts.num_texts = num_texts
    return texts


cdef bool_t holds_any(const TextRows& texts, cnp.ndarray tokens, int32_t reach) except *:
    """Whether there is anything to learn. Raises ValueError as `check_texts` where there is."""
    cdef int64_t num_rows = cnp.PyArray_DIM(tokens, 0)
    if texts.num_texts == 0 or num_rows == 0 or texts.stride == 0:
        return False
    check_texts(texts, num_rows, texts.stride, reach)
    return True


cdef uint64_t digest_of_texts(uint64_t digest, const TextRows& texts) except? 0:
    """That of a lookup which has learned their new tokens too."""
    cdef int64_t text, first
    for text in range(texts.num_texts):
        if texts.num_new[text] > 0:
            first = texts.rows[text] * texts.stride + texts.lengths[text] - texts.num_new[text]
            digest = extended_digest(digest, texts.tokens + first, texts.num_new[text])
    return digest


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
