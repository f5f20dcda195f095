# Histories as windows, newest token first. Arrays are read directly: a typed view would take longer than a small draft.

from stand.trees.layouts import text_rows

cdef object C_TEXT_ROWS = text_rows.TextRows


cdef int32_t fill_window(history, int32_t limit, int32_t* window) except -1:
    """The last tokens of a history, newest first; returns how many."""
    cdef int32_t size
    cdef const int32_t* end
    if not cnp.PyArray_Check(history) or not _is_run(history):
        history = tail(history, limit)
    size = <int32_t> min(limit, cnp.PyArray_DIM(history, 0))
    end = <const int32_t*> cnp.PyArray_DATA(history) + cnp.PyArray_DIM(history, 0)
    _copy_newest(end, size, window)
    return size


cdef void _copy_newest(const int32_t* end, int32_t size, int32_t* window) except *:
    """The `size` tokens before `end`, newest first."""
    cdef int32_t age
    for age in range(size):
        if end[-1 - age] < 0:
            raise ValueError(f"token ids must not be negative, got {end[-1 - age]}; pass the tokens without padding")
        window[age] = end[-1 - age]


cdef bool_t _is_run(cnp.ndarray tokens):
    """Is this int32[:], one after the other in memory?"""
    cdef bool_t is_int32 = cnp.PyArray_TYPE(tokens) == cnp.NPY_INT32
    return is_int32 and cnp.PyArray_NDIM(tokens) == 1 and cnp.PyArray_ISCARRAY_RO(tokens)


cdef void fill_windows(histories, int32_t limit, vector[int32_t]& windows, vector[int32_t]& sizes) except *:
    """windows[B * limit] and how many tokens of each are filled; makes room for them."""
    cdef Py_ssize_t num_rows = len(histories), row
    if isinstance(histories, dict):
        raise ValueError("histories must be a list of token ids per row, got a dict; pass its values as a list")
    windows.resize(max(1, num_rows * limit))
    sizes.resize(max(1, num_rows))
    if type(histories) is C_TEXT_ROWS:
        _fill_from_rows(histories.tokens, histories.rows, histories.lengths, limit, windows, sizes)
        return
    for row in range(num_rows):
        sizes[row] = fill_window(histories[row], limit, &windows[row * limit])


cdef void _fill_from_rows(cnp.ndarray tokens, cnp.ndarray rows, cnp.ndarray lengths, int32_t limit,
                          vector[int32_t]& windows, vector[int32_t]& sizes) except *:
    """`fill_windows` of `TextRows`, whose kinds of arrays are checked."""
    cdef int64_t num_rows = cnp.PyArray_DIM(tokens, 0), width = cnp.PyArray_DIM(tokens, 1), text
    cdef const int64_t* row_numbers = <const int64_t*> cnp.PyArray_DATA(rows)
    cdef const int64_t* ends = <const int64_t*> cnp.PyArray_DATA(lengths)
    cdef const int32_t* end
    for text in range(cnp.PyArray_DIM(lengths, 0)):
        if not (0 <= row_numbers[text] < num_rows and 0 <= ends[text] <= width):
            raise ValueError(
                f"texts must lie in their array of {num_rows} rows and {width} columns, got row {row_numbers[text]} "
                f"and length {ends[text]}; lengths are those of the texts"
            )
        end = <const int32_t*> cnp.PyArray_DATA(tokens) + row_numbers[text] * width + ends[text]
        sizes[text] = <int32_t> min(<int64_t> limit, ends[text])
        _copy_newest(end, sizes[text], &windows[text * limit])


cdef StepView step_view(batch, histories, int32_t limit, vector[int32_t]& windows, vector[int32_t]& sizes) except *:
    """A step's drafts and the windows of the tokens before them, both checked; valid as long as all arguments live."""
    cdef StepView step
    cdef const int32_t[::1] token_ids, parents, offsets
    check_is_batch(batch)
    if len(histories) != len(batch):
        raise ValueError(f"histories must have one entry per row ({len(batch)}), got {len(histories)}; see DraftBatch")
    check_batch(batch)
    fill_windows(histories, limit, windows, sizes)
    token_ids, parents, offsets = batch.token_ids, batch.parents, batch.offsets
    step.num_rows = offsets.shape[0] - 1
    step.histories, step.history_sizes, step.history_limit = windows.data(), sizes.data(), limit
    if step.num_rows > 0:
        step.token_ids, step.parents, step.offsets = &token_ids[0], &parents[0], &offsets[0]
    return step
