"""Memory of a run's keys and values, as the system counts it."""

from long_runs.resident_memory import resident_bytes

from stand.forward.cache.paged_cache import PagedCache, PromptRoom
from stand.scheduling.run import Run


def cache_bytes(run: Run) -> int:
    """Of all live rows and of all prompts that wait or are shared, between two steps."""
    call = run._call
    cache: PagedCache = call._step.cache
    rooms = {id(begun[0]): begun[0] for begun in cache._begun if begun is not None}
    rooms |= {id(prompt.keys): prompt.keys for prompt in call._prompts._prompts.values()}
    blocks = [block for room in rooms.values() if isinstance(room, PromptRoom) for block in room._blocks.values()]
    return resident_bytes([(space.start, space.nbytes) for space in (*cache.spaces, *blocks)])
