"""Products of a few tokens with a matrix, and with keys and values, compiled: product.py and
attention.py check the arguments."""

from libc.stdint cimport int32_t, int64_t


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
        const C_Matrix* matrices, Py_ssize_t num_matrices, Py_ssize_t depth, C_Numbers numbers, C_Vectors vectors,
        int num_threads, C_RunInThreads in_threads
    ) except +

    void C_multiply_groups "stand::multiply_groups" (
        const C_Matrix& whole, const int64_t* ends, Py_ssize_t num_groups, Py_ssize_t depth, C_Numbers numbers,
        C_Vectors vectors, int num_threads, C_RunInThreads in_threads
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


cdef extern from "../../../trees/include/compact_wrappers.h":
    pass


cdef enum:
    MOST_PRODUCTS = 4

HAS_PAIRS = C_has_pairs()  # whether `multiply` takes `numbers` 2
HAS_TILES = C_has_tiles()  # and 3
IS_INTEL = C_is_intel()  # the processor


def multiply(Py_ssize_t tokens, tuple weights, tuple results, Py_ssize_t num_tokens, Py_ssize_t depth,
             Py_ssize_t numbers, Py_ssize_t vectors, Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """results[i] [num_tokens, N] = tokens [num_tokens, depth] @ weights [N, depth]^T + bias [N], up to four of them.

    weights[i]: addresses of weights and bias, 0 for none, and N; results[i] an address. All are in C order; `numbers`:
    0 for float32, 1 for bfloat16, 2 for bfloat16 by instructions that take pairs, 3 by a matrix unit (AMX). `vectors`:
    a place in stand.laws.filters.VECTORS. `in_threads`: the address of GOMP_parallel, or 0 for the calling thread
    alone.
    """
    cdef C_Matrix[MOST_PRODUCTS] matrices
    cdef Py_ssize_t i, address, bias, num_rows, num_products = len(weights)
    if not 1 <= num_products <= MOST_PRODUCTS or num_products != len(results):
        raise ValueError(
            f"one to {MOST_PRODUCTS} weights must have a result each, got {num_products} and {len(results)}; "
            "multiply more of them by further calls"
        )
    for i in range(num_products):
        address, bias, num_rows = weights[i]
        matrices[i].weights, matrices[i].bias, matrices[i].num_rows = <void*> address, <void*> bias, num_rows
        address = results[i]
        matrices[i].results, matrices[i].tokens, matrices[i].num_tokens = <void*> address, <void*> tokens, num_tokens
    with nogil:
        C_multiply(
            matrices, num_products, depth, <C_Numbers> <int> numbers, <C_Vectors> <int> vectors, <int> num_threads,
            <C_RunInThreads> in_threads)


def multiply_groups(tuple addresses, Py_ssize_t num_groups, Py_ssize_t num_rows, Py_ssize_t depth, Py_ssize_t numbers,
                    Py_ssize_t vectors, Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """results [M, N] = each group of tokens [M, depth] times weights of its own [G, N, depth], plus bias [G, N].

    addresses: of tokens, ends, weights, bias or 0, and results; ends [G] int64: where each group's tokens end, the
    first one's begin at 0. The rest as in `multiply`.
    """
    cdef C_Matrix whole
    cdef Py_ssize_t tokens, ends, weights, bias, results
    tokens, ends, weights, bias, results = addresses
    whole.tokens, whole.weights, whole.bias = <void*> tokens, <void*> weights, <void*> bias
    whole.results, whole.num_rows = <void*> results, num_rows
    with nogil:
        C_multiply_groups(
            whole, <int64_t*> ends, num_groups, depth, <C_Numbers> <int> numbers, <C_Vectors> <int> vectors,
            <int> num_threads, <C_RunInThreads> in_threads)


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
