"""What the compiled filters of laws take."""


def check_filters(
    size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    count: int,
    vectors: str | None,
    known_vectors: tuple[str, ...],
) -> None:
    """Raise ValueError where `filter_laws` cannot filter laws over `size` tokens with these arguments."""
    if size < 1:
        raise ValueError("scores must have at least one column, got 0; pass [M, V] with V >= 1")
    if not 1e-30 <= temperature <= 1e30:
        raise ValueError(
            f"temperature must be in [1e-30, 1e30], got {temperature}; take the best token for greedy decoding"
        )
    if not (top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
        raise ValueError(
            f"top_k must be >= 0, top_p in (0, 1], min_p in [0, 1], got {top_k}, {top_p} and {min_p}; "
            "0, 1 and 0 switch them off"
        )
    if not 0 <= count <= size:
        raise ValueError(f"count must be in [0, {size}], the number of tokens, got {count}; ask for fewer")
    if vectors is not None and vectors not in known_vectors:
        raise ValueError(f"vectors must be one of {known_vectors}, got {vectors!r}; leave it out for the widest")
