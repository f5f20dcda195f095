"""Products of a few tokens with a matrix, and with keys and values, compiled: few_token_product.py and
few_token_attention.py check the arguments."""

from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector


cdef extern from "dots/product.h" namespace "stand" nogil:
    cdef enum class C_Vectors "stand::Vectors":
        pass

    ctypedef void (*C_RunInThreads "stand::RunInThreads")(void (*)(void*), void*, unsigned, unsigned)

    cdef enum class C_Numbers "stand::Numbers":
        pass

    cdef cppclass C_Matrix "stand::Matrix":
        const void* tokens
        const void* weights
        const void* bias
        void* results
        Py_ssize_t num_tokens
        Py_ssize_t num_rows

    bint C_has_pairs "stand::dots::has_pairs" ()
    bint C_has_tiles "stand::dots::matrix_unit::is_there" ()
    bint C_is_intel "stand::dots::is_intel" ()

    void C_multiply "stand::multiply" (
        const vector[C_Matrix]& matrices, Py_ssize_t depth, C_Numbers numbers, C_Vectors vectors, int num_threads,
        C_RunInThreads in_threads
    ) except +

cdef extern from "dots/attention.h" namespace "stand" nogil:
    cdef cppclass C_Attention "stand::Attention":
        const void* queries
        const void* keys
        const void* values
        void* mixed
        const int64_t* offsets
        const int64_t* lengths
        const int64_t* tails
        const int64_t* path_offsets
        const int32_t* paths
        Py_ssize_t query_stride
        Py_ssize_t query_head_stride
        Py_ssize_t row_stride
        Py_ssize_t head_stride
        Py_ssize_t num_rows
        Py_ssize_t num_key_heads
        Py_ssize_t groups
        Py_ssize_t size
        Py_ssize_t window
        float scale

    void C_attend "stand::attend" (
        const C_Attention& step, bint is_narrow, C_Vectors vectors, int num_threads, C_RunInThreads in_threads
    ) except +


HAS_PAIRS = C_has_pairs()  # whether `multiply` takes `numbers` 2
HAS_TILES = C_has_tiles()  # and 3
IS_INTEL = C_is_intel()  # the processor


def multiply(Py_ssize_t tokens, tuple weights, tuple results, Py_ssize_t num_tokens, Py_ssize_t depth,
             Py_ssize_t numbers, Py_ssize_t vectors, Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """results[i] [num_tokens, N] = tokens [num_tokens, depth] @ weights [N, depth]^T + bias [N].

    weights[i]: addresses of weights and bias, 0 for none, and N; results[i] an address. All are in C order; `numbers`:
    0 for float32, 1 for bfloat16, 2 for bfloat16 by instructions that take pairs, 3 by a matrix unit (AMX). `vectors`:
    a place in stand.laws.filters.VECTORS. `in_threads`: the address of GOMP_parallel, or 0 for the calling thread alone.
    """
    cdef vector[C_Matrix] matrices
    cdef C_Matrix one
    cdef Py_ssize_t i, address, bias, num_rows
    if len(weights) != len(results):
        raise ValueError(f"weights must have a result each, got {len(weights)} and {len(results)}; give as many")
    for i in range(len(weights)):
        address, bias, num_rows = weights[i]
        one.tokens, one.weights, one.bias = <void*> tokens, <void*> address, <void*> bias
        address = results[i]
        one.results, one.num_tokens, one.num_rows = <void*> address, num_tokens, num_rows
        matrices.push_back(one)
    with nogil:
        C_multiply(
            matrices, depth, <C_Numbers> <int> numbers, <C_Vectors> <int> vectors, <int> num_threads,
            <C_RunInThreads> in_threads)


def multiply_groups(Py_ssize_t tokens, Py_ssize_t ends, Py_ssize_t num_groups, Py_ssize_t weights, Py_ssize_t bias,
                    Py_ssize_t results, Py_ssize_t num_rows, Py_ssize_t depth, Py_ssize_t numbers, Py_ssize_t vectors,
                    Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """results [M, N] = each group of tokens [M, depth] times weights of its own [G, N, depth], plus bias [G, N].

    ends: address of [G] int64: where each group's tokens end; the first one's begin at 0. The rest as in `multiply`.
    """
    cdef vector[C_Matrix] matrices
    cdef C_Matrix one
    cdef const int64_t* own_ends = <const int64_t*> ends
    cdef Py_ssize_t size = 4 if numbers == 0 else 2  # bytes of a number
    cdef Py_ssize_t group, first = 0
    one.bias, one.num_rows = NULL, num_rows
    for group in range(num_groups):
        if own_ends[group] > first:
            one.tokens = <void*> (tokens + first * depth * size)
            one.weights = <void*> (weights + group * num_rows * depth * size)
            if bias:
                one.bias = <void*> (bias + group * num_rows * size)
            one.results = <void*> (results + first * num_rows * size)
            one.num_tokens = own_ends[group] - first
            first = own_ends[group]
            matrices.push_back(one)
    with nogil:
        C_multiply(
            matrices, depth, <C_Numbers> <int> numbers, <C_Vectors> <int> vectors, <int> num_threads,
            <C_RunInThreads> in_threads)


def attend(Py_ssize_t queries, Py_ssize_t keys, Py_ssize_t values, Py_ssize_t mixed, tuple tokens, tuple strides,
           tuple sizes, double scale, bint is_narrow, Py_ssize_t vectors, Py_ssize_t num_threads,
           Py_ssize_t in_threads, /):
    """mixed [M, H, D] = attention of queries [M, H, D] over keys and values [A, Hkv, slots, D].

    Addresses of float32, or of bfloat16 if `is_narrow`. `tokens`: addresses of offsets [A + 1], lengths [A], tails [A]
    and path_offsets [M + 1], int64, and of paths, int32. `strides`: numbers between queries' tokens and heads, and
    between keys' rows and heads, as between values'. `sizes`: A, Hkv, H / Hkv, D (a multiple of 16), window or 0. The
    rest as in `multiply`.
    """
    cdef C_Attention step
    cdef Py_ssize_t offsets, lengths, tails, path_offsets, paths
    step.queries, step.keys, step.values = <void*> queries, <void*> keys, <void*> values
    step.mixed = <void*> mixed
    offsets, lengths, tails, path_offsets, paths = tokens
    step.offsets, step.lengths, step.tails = <int64_t*> offsets, <int64_t*> lengths, <int64_t*> tails
    step.path_offsets, step.paths = <int64_t*> path_offsets, <int32_t*> paths
    step.query_stride, step.query_head_stride, step.row_stride, step.head_stride = strides
    step.num_rows, step.num_key_heads, step.groups, step.size, step.window = sizes
    step.scale = <float> scale
    with nogil:
        C_attend(step, is_narrow, <C_Vectors> <int> vectors, <int> num_threads, <C_RunInThreads> in_threads)
