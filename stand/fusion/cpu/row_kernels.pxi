"""Norms, gates and rotary positions, compiled for CPUs: part of stand.step_compiled. kernels.py checks the arguments.

Addresses are of float32, or of bfloat16 if `is_narrow` (slots: int64), strides are in numbers. rule: a place in
stand.fusion.formulas.RULES. `vectors`: a place in stand.laws.filters.VECTORS.
`in_threads`: the address of GOMP_parallel, or 0 for the calling thread alone.
"""

from libc.stdint cimport int64_t

cdef extern from "fusion/cpu/rows/jobs.h" namespace "stand" nogil:
    cdef enum class C_Vectors "stand::Vectors":
        pass

    cdef enum class C_Activation "stand::Activation":
        pass

    cdef enum class C_Rule "stand::Rule":
        pass

    ctypedef void (*C_RunInThreads "stand::RunInThreads")(void (*)(void*), void*, unsigned, unsigned)

    cdef cppclass C_Norm "stand::Norm":
        const void* states
        const void* change
        const void* weight
        void* total
        void* output
        Py_ssize_t states_stride
        Py_ssize_t change_stride
        Py_ssize_t size
        double epsilon
        C_Rule rule

    cdef cppclass C_Gate "stand::Gate":
        const void* gate
        const void* up
        void* output
        Py_ssize_t gate_stride
        Py_ssize_t up_stride
        Py_ssize_t size
        C_Activation activation

    cdef cppclass C_Heads "stand::Heads":
        const void* query
        const void* key
        const void* value
        const void* cosines
        const void* sines
        const void* query_weight
        const void* key_weight
        const int64_t* slots
        void* output
        void* keys
        void* values
        Py_ssize_t query_stride
        Py_ssize_t key_stride
        Py_ssize_t value_stride
        Py_ssize_t cosine_stride
        Py_ssize_t sine_stride
        Py_ssize_t second
        Py_ssize_t heads
        Py_ssize_t key_heads
        Py_ssize_t size
        Py_ssize_t half
        Py_ssize_t row_stride
        Py_ssize_t head_stride
        Py_ssize_t slot_stride
        Py_ssize_t room
        double epsilon
        C_Rule rule

    void C_run "stand::run" [Job](
        const Job& job, Py_ssize_t num_rows, Py_ssize_t row_size, bint is_narrow, C_Vectors vectors, int num_threads,
        C_RunInThreads in_threads)
    bint C_are_inside "stand::are_inside" (const int64_t* slots, Py_ssize_t num_tokens, Py_ssize_t num_slots)


def norm_rows(Py_ssize_t states, Py_ssize_t change, Py_ssize_t weight, Py_ssize_t total, Py_ssize_t output,
              Py_ssize_t states_stride, Py_ssize_t change_stride, Py_ssize_t num_rows, Py_ssize_t size, double epsilon,
              Py_ssize_t rule, bint is_narrow, Py_ssize_t vectors, Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """output [num_rows, size]: `states`, or total = states + change where there is a change, normed and scaled."""
    cdef C_Norm job
    job.states, job.change, job.weight = <void*> states, <void*> change, <void*> weight
    job.total, job.output = <void*> total, <void*> output
    job.states_stride, job.change_stride, job.size = states_stride, change_stride, size
    job.epsilon, job.rule = epsilon, <C_Rule> <int> rule
    with nogil:
        C_run(job, num_rows, size, is_narrow, <C_Vectors> <int> vectors, <int> num_threads, <C_RunInThreads> in_threads)


def gate_rows(Py_ssize_t gate, Py_ssize_t up, Py_ssize_t output, Py_ssize_t gate_stride, Py_ssize_t up_stride,
              Py_ssize_t num_rows, Py_ssize_t size, Py_ssize_t activation, bint is_narrow, Py_ssize_t vectors,
              Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """output [num_rows, size] = activation(gate) * up."""
    cdef C_Gate job
    job.gate, job.up, job.output = <void*> gate, <void*> up, <void*> output
    job.gate_stride, job.up_stride, job.size = gate_stride, up_stride, size
    job.activation = <C_Activation> <int> activation
    with nogil:
        C_run(job, num_rows, size, is_narrow, <C_Vectors> <int> vectors, <int> num_threads, <C_RunInThreads> in_threads)


def turn_rows(tuple addresses, tuple strides, Py_ssize_t num_rows, Py_ssize_t heads, Py_ssize_t key_heads,
              Py_ssize_t size, Py_ssize_t half, Py_ssize_t room, Py_ssize_t num_slots, double epsilon,
              Py_ssize_t rule, bint is_narrow,
              Py_ssize_t vectors, Py_ssize_t num_threads, Py_ssize_t in_threads, /):
    """Heads normed and turned, keys and values in the cache. False: a slot is beyond `num_slots`; nothing was written.

    addresses: query, key, value, cosines, sines, weights of queries and keys (or 0), slots, output, keys, values.
    strides: of the tokens of query, key, value, cosines and sines; from a first half's factors to the second's; of the
    cache's rows, heads and slots.
    """
    cdef C_Heads job
    cdef Py_ssize_t query, key, value, cosines, sines, query_weight, key_weight, slots, output, keys, values
    query, key, value, cosines, sines, query_weight, key_weight, slots, output, keys, values = addresses
    job.query, job.key, job.value = <void*> query, <void*> key, <void*> value
    job.cosines, job.sines = <void*> cosines, <void*> sines
    job.query_weight, job.key_weight = <void*> query_weight, <void*> key_weight
    job.slots, job.output = <const int64_t*> slots, <void*> output
    job.keys, job.values = <void*> keys, <void*> values
    (job.query_stride, job.key_stride, job.value_stride, job.cosine_stride, job.sine_stride, job.second,
     job.row_stride, job.head_stride, job.slot_stride) = strides
    job.heads, job.key_heads, job.size, job.half, job.room = heads, key_heads, size, half, room
    job.epsilon, job.rule = epsilon, <C_Rule> <int> rule
    if not C_are_inside(<const int64_t*> slots, num_rows, num_slots):
        return False
    with nogil:
        C_run(job, num_rows, (heads + 2 * key_heads) * size, is_narrow, <C_Vectors> <int> vectors, <int> num_threads,
              <C_RunInThreads> in_threads)
    return True
