"""What belongs to the process that made it, and can't be sent to another one."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["OneProcess"]


class OneProcess:
    """Refuses to be pickled, and to be copied: connections, threads and leases belong to one object of one process."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"a {name} can't be pickled or copied: its connections, threads and leases belong to the process that made "
            "it. Nothing was sent. Pass on what it takes to make one (bootstrap servers, group_id, topics), and make a "
            "Marshal in each process. A function for Spark's executors must not mention it"
        )
