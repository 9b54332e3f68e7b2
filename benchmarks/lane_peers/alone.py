"""The work without Kafka, to measure how precisely this machine sleeps."""

from __future__ import annotations

import asyncio
import threading
import time

__all__ = ["of_coroutines", "of_threads"]

#: Sleeps of each handler.
TIMES = 400


def of_threads(handlers: int, work_s: float) -> float:
    """Requested sleep ÷ real time, in threads."""

    def sleep() -> None:
        for _ in range(TIMES):
            time.sleep(work_s)

    threads = [threading.Thread(target=sleep) for _ in range(handlers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return TIMES * work_s / (time.perf_counter() - began)


def of_coroutines(handlers: int, work_s: float) -> float:
    """The same in tasks of one event loop."""

    async def sleep() -> None:
        for _ in range(TIMES):
            await asyncio.sleep(work_s)

    async def all_of_them() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(sleep() for _ in range(handlers)))
        return TIMES * work_s / (time.perf_counter() - began)

    return asyncio.run(all_of_them())
