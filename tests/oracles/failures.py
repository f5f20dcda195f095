"""Work that fails after a while, to be put in the place of what works, and what work fails by."""

from collections.abc import Callable


def failing_after(count, work, error, *, times=10**6):
    """`work`, until it was called `count` times; it fails so many times."""
    calls = []

    def call(*arguments, **options):
        calls.append(1)
        if count < len(calls) <= count + times:
            raise type(error)(*error.args)  # one of its own, whose traceback keeps nothing alive
        return work(*arguments, **options)

    return call


def failure_of(work: Callable[[], object]) -> str:
    """Kind and message; empty where it does not fail."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
