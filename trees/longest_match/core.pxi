# What lookup.pxi uses of the C++ headers of this folder.

cdef enum:
    MOST_KEPT = 256  # candidates of a context

cdef extern from "<mutex>" namespace "std" nogil:
    cdef cppclass mutex:
        void lock() except +
        void unlock()

cdef extern from "include/noise.h" namespace "stand" nogil:
    uint64_t stream_key(uint64_t seed, uint64_t stream)

cdef extern from "include/sampling.h" namespace "stand" nogil:
    cdef cppclass Children:
        vector[int32_t] picks
        vector[float] laws

    void c_draw_children "stand::draw_children"(DraftKind kind, const float* probabilities, const double* uniforms,
                                                int32_t size, int32_t num_children, Children& children) except +

cdef extern from "longest_match/table.h" namespace "stand" nogil:
    cdef cppclass Law:
        const int32_t* token_ids
        const float* probabilities
        int32_t size
        int32_t order
        uint32_t count

    cdef cppclass OrderTable:
        int32_t order
        vector[int32_t] keys
        vector[uint32_t] counts
        vector[int32_t] top_ids
        vector[float] top_probs
        int64_t size()

    cdef cppclass Lookup:
        Lookup(const vector[int32_t]& orders, int32_t num_candidates, double min_rate) except +
        vector[OrderTable] tables
        mutex mutex
        int32_t max_order()
        int64_t size()
        int64_t nbytes()
        void clear() except +
        void assign(const Lookup& other) except +
        Law copy_longest(const int32_t* window, int32_t available, int32_t floor_order, vector[int32_t]& token_ids,
                         vector[float]& probabilities) except +

    bool_t restore_table(OrderTable& table, int64_t num_contexts, const int32_t* keys, const uint32_t* counts,
                         const int32_t* top_ids, const float* top_probs) except +

cdef extern from "longest_match/learning.h" namespace "stand" nogil:
    void learn_run(Lookup& lookup, const int32_t* tokens, int64_t num_before, int64_t num_scored,
                   const int32_t* ids, const float* probs, int32_t width) except +
    void learn_nodes(Lookup& lookup, const StepView& step, const int64_t* nodes, int64_t num_nodes,
                     const int32_t* ids, const float* probs, int32_t width) except +

cdef extern from "longest_match/fill_shape.h" namespace "stand" nogil:
    cdef cppclass ShapeView:
        const int32_t* parents
        int32_t num_slots

    cdef cppclass ShapeArrays:
        int32_t* token_ids
        int32_t* parents
        int32_t* depths
        int32_t* ranks
        int32_t* slots
        int32_t* support_ids
        float* law
        int64_t num_nodes

    cdef cppclass DraftRequest:
        DraftKind kind
        int32_t floor_order
        const int32_t* window
        int32_t window_size
        uint64_t key
        uint64_t target_key
        uint64_t row
        uint64_t position

    bool_t shape_is_sound(const ShapeView& shape)
    void draft_rows(const Lookup& lookup, const vector[ShapeView]& shapes, const vector[DraftRequest]& requests,
                    ShapeArrays& sink) except +
