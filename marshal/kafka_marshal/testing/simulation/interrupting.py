"""Ctrl-C in the middle of a story, as asyncio.run does it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupted_between"]


@contextmanager
def interrupted_between(tell: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A first Ctrl-C calls tell, and raises KeyboardInterrupt at the end of this; a second one raises it at once.

    Raised within a turn, KeyboardInterrupt would be a simulated worker's own: its ``with`` closes its consumer, time
    passes for that, and the story goes on. Raised where garbage is collected, it would be lost in some destructor.
    Where this is not the main thread, or SIGINT has a handler already that is not Python's own, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    is_asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tell()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_asked:
        raise KeyboardInterrupt
