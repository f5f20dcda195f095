# cython: binding=False, embedsignature=False
"""Products of a few tokens with all rows of a matrix, compiled: few_token_product.py checks the arguments."""

cdef extern from "dots/product.h" namespace "stand" nogil:
    cdef enum class C_Vectors "stand::Vectors":
        pass

    ctypedef void (*C_RunInThreads "stand::RunInThreads")(void (*)(void*), void*, unsigned, unsigned)

    cdef cppclass C_Product "stand::Product":
        const float* tokens
        const float* weights
        const float* bias
        float* results
        Py_ssize_t num_tokens
        Py_ssize_t num_rows
        Py_ssize_t depth

    void C_multiply "stand::multiply" (
        const C_Product& product, C_Vectors vectors, int num_threads, C_RunInThreads in_threads)


def multiply(Py_ssize_t tokens, Py_ssize_t weights, Py_ssize_t bias, Py_ssize_t results, Py_ssize_t num_tokens,
             Py_ssize_t num_rows, Py_ssize_t depth, Py_ssize_t vectors, Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """results [num_tokens, num_rows] = tokens [num_tokens, depth] @ weights [num_rows, depth]^T + bias [num_rows].

    Addresses of float32 in C order; 0 for no bias. `vectors`: a place in stand.laws.filters.VECTORS. `in_threads`: the
    address of GOMP_parallel, or 0 for the calling thread alone.
    """
    cdef C_Product product
    product.tokens, product.weights, product.bias = <float*> tokens, <float*> weights, <float*> bias
    product.results = <float*> results
    product.num_tokens, product.num_rows, product.depth = num_tokens, num_rows, depth
    with nogil:
        C_multiply(product, <C_Vectors> <int> vectors, <int> num_threads, <C_RunInThreads> in_threads)
