# What lookup.pxi uses of the C++ headers of this folder.

cdef enum:
    MAX_WINDOW = 16  # at least MAX_DEPTH
    LAST_SCOPE = 254
    NO_BOUND = 2147483647  # of depths, nodes and widths
    MAX_ROWS = 1048576
    MOST_BLENDED = 64  # candidates

cdef extern from "blended/store/fair_mutex.h" namespace "stand" nogil:
    cdef cppclass FairMutex:
        void lock() except +
        void unlock()
        void close() except +
        void open()

cdef extern from "blended/store/odds.h" namespace "stand" nogil:
    const int32_t C_MAX_DEPTH "stand::MAX_DEPTH"
    const int32_t NUM_ORDERS

cdef extern from "blended/growth/evidence.h" namespace "stand" nogil:
    bool_t has_wide_vectors()

cdef extern from "blended/store/path_tree.h" namespace "stand" nogil:
    const int32_t NOWHERE

    cdef cppclass PathTree:
        int64_t num_rows()
        void add_row() except +
        int32_t add_node(int32_t parent, int32_t token) except +

cdef extern from "blended/store/outside_laws.h" namespace "stand" nogil:
    const int32_t C_ANY_TOKEN "stand::ANY_TOKEN"
    const int32_t C_NUM_SOURCES "stand::NUM_SOURCES"
    const int32_t C_MAX_LAW_SIZE "stand::MAX_LAW_SIZE"
    cdef cppclass COutsideLaws "stand::OutsideLaws":
        COutsideLaws(int32_t source) except +
        int64_t num_rows()
        int64_t num_nodes()
        void add_row() except +
        int32_t add_node(int32_t parent, int32_t token) except +
        bool_t add_token(uint32_t token, float probability) except +

cdef extern from "blended/store/outside_odds.h" namespace "stand" nogil:
    cdef cppclass OutsideOdds:
        OutsideOdds() except +
        void clear()

cdef extern from "blended/store/learning.h" namespace "stand" nogil:
    cdef cppclass LookupSettings:
        int32_t depth
        int64_t max_bytes
        float fade
        float rate
        bool_t learns_odds

    cdef cppclass Figures:
        int64_t num_contexts
        int64_t num_evicted
        int64_t nbytes

    cdef cppclass CLookup "stand::BlendedLookup":
        CLookup(const LookupSettings& settings) except +
        FairMutex mutex
        int32_t reach()
        Figures figures()
        void clear() except +
        const char* find_fault()
        @staticmethod
        int32_t max_entries(int32_t order)

    const int64_t MIN_BYTES "stand::BlendedLookup::MIN_BYTES"

    void learn_tokens(CLookup& lookup, uint8_t scope, const uint32_t* window, int32_t available, const int32_t* tokens,
                      int64_t num_tokens) except +
    cdef cppclass TextRows:
        const int32_t* tokens
        int64_t stride
        const int64_t* rows
        const int64_t* lengths
        const int64_t* num_new
        const uint8_t* scopes
        int64_t num_texts

    void learn_texts(CLookup& lookup, const TextRows& texts) except +
    void learn_laws(CLookup& lookup, uint8_t scope, uint32_t* window, int32_t available, const int32_t* tokens,
                    int64_t num_tokens, const int32_t* ids, const float* probs, int32_t width) except +
    void learn_nodes(CLookup& lookup, const StepView& step, const uint8_t* scopes, const int64_t* nodes,
                     int64_t num_nodes, const int32_t* ids, const float* probs, int32_t width,
                     const COutsideLaws* outside, OutsideOdds* odds) except +

cdef extern from "blended/store/soundness.h" nogil:
    pass

cdef extern from "blended/growth/blender.h" namespace "stand" nogil:
    cdef cppclass Candidate:
        uint32_t token
        float probability

    vector[Candidate] blended_law(const CLookup& lookup, const uint32_t* window, int32_t available, uint8_t scope,
                                  int32_t limit) except +

cdef extern from "blended/growth/masks.h" namespace "stand" nogil:
    cdef cppclass TokenMask:
        TokenMask()
        const uint32_t* words
        int32_t size
        bool_t allows_beyond

    cdef cppclass CTokenMasks "stand::TokenMasks":
        CTokenMasks(const TokenMask& first) except +
        PathTree tree

cdef extern from "blended/growth/growth.h" namespace "stand" nogil:
    cdef cppclass GrowthRequest:
        const int32_t* window
        int32_t window_size
        int32_t max_depth
        int32_t max_nodes
        uint8_t scope
        uint64_t key

    cdef cppclass GrowthSettings:
        DraftKind kind
        int32_t budget
        float floor
        int32_t width
        int32_t num_candidates
        const float* rises
        const COutsideLaws* outside
        const OutsideOdds* outside_odds
        const CTokenMasks* masks

    cdef cppclass Growth:
        Growth() except +
        vector[int32_t] row_sizes
        void grow(const CLookup& lookup, const vector[GrowthRequest]& requests,
                  const GrowthSettings& settings) except +

cdef extern from "blended/growth/draft_writer.h" namespace "stand" nogil:
    cdef cppclass DraftSink:
        const int32_t* offsets
        int32_t* token_ids
        int32_t* parents
        int32_t* depths
        int32_t* ranks
        float* path_probabilities
        float* path_estimates
        int32_t* support_ids
        float* law
        int32_t width

    int32_t law_width(const Growth& growth)
    void write_draft(const Growth& growth, const DraftSink& sink)

cdef extern from "blended/growth/outcome.h" namespace "stand" nogil:
    cdef cppclass Outcome:
        const int32_t* token_ids
        const int32_t* parents
        const int32_t* offsets
        const float* estimates
        const int32_t* accepted
        const int64_t* accepted_ends
        const int32_t* next_tokens
        int64_t num_rows

    int64_t first_broken_path(const Outcome& outcome)
    void c_record_outcome "stand::record_outcome"(const Outcome& outcome, DraftKind kind, CLookup& lookup) except +

cdef extern from "blended/store/snapshot.h" namespace "stand" nogil:
    cdef cppclass Snapshot:
        vector[uint32_t] roots
        vector[uint8_t] sizes
        vector[uint8_t] visits
        vector[uint32_t] tokens
        vector[uint16_t] weights
        vector[uint8_t] has_child
        vector[float] odds

    cdef cppclass SnapshotView:
        const uint32_t* roots
        const uint8_t* sizes
        const uint8_t* visits
        const uint32_t* tokens
        const uint16_t* weights
        const uint8_t* has_child
        const float* odds
        int64_t num_roots
        int64_t num_contexts
        int64_t num_entries

    cdef enum class Restored(int32_t):
        complete
        damaged
        too_large

    cdef cppclass SnapshotReader:
        SnapshotReader(const SnapshotView& snapshot, CLookup& lookup, bool_t is_its_cap) except +
        Restored read() except +

    const int64_t C_NUM_ODDS "stand::NUM_ODDS"
    void take_snapshot(const CLookup& lookup, Snapshot& snapshot) except +
