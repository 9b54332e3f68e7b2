"""Runs the demo, with Spark drivers or with plain workers."""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from flights.errors import DemoError
from flights.options import DemoOptions

__all__ = ["run"]

#: Columns of what is written to a file or a pipe.
PLAIN_WIDTH: Final = 110

#: Modules of the extra [demo] that are loaded late: looked for before anything is started.
_NEEDED: Final = ("rich", "matplotlib")


def run(options: DemoOptions) -> int:
    """Run the demo: 0 if the workers' result equals the file's, else 1.

    Blocks the calling thread, which should be the main one: then SIGTERM and SIGHUP end it as Ctrl-C does, in order.

    Raises:
        MarshalError: (one of its kinds) it could not be done; what that means stands in the message. Nothing runs on.
        KeyboardInterrupt: likewise, and the database says so.
    """
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise DemoError(
                f"The demo needs the package {name!r}, which is not installed. Nothing was started. Install it: pip "
                "install 'kafka-marshal[demo]'"
            )
    from rich.console import Console

    from flights.job import Job
    from flights.plain import PlainJob
    from flights.screen import Screen

    console = Console(highlight=False, emoji=False, markup=False, stderr=options.json)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with _signals_as_interrupts(), Screen(console) as screen:
        return (PlainJob if options.plain else Job)(options, screen).run()


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
