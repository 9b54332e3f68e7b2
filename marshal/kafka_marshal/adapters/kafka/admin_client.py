"""An AdminClient that is destroyed at a known place: on close, or by a thread of the library.

librdkafka aborts the process if one of its threads destroys a client. An AdminClient left to the garbage
collector risks that: its futures are resolved on such a thread, and a collection may start there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from confluent_kafka.admin import AdminClient

from kafka_marshal.errors import ClosedError

#: librdkafka's default of metadata.max.age.ms.
METADATA_MAX_AGE_MS = 900_000


class SharedAdmin:
    """One AdminClient for any number of threads. The last use that ends after close() destroys it."""

    def __init__(self, properties: Mapping[str, object]) -> None:
        """Connect in the background; raises what AdminClient raises."""
        self._admin = AdminClient(cast("dict[str, Any]", dict(properties)))
        #: For how long it keeps what it knows of a topic, s.
        self.metadata_age_s: float = float(str(properties.get("metadata.max.age.ms", METADATA_MAX_AGE_MS))) / 1000
        self._lock = threading.Lock()
        self._uses = 0
        self._closed = False
        # It also keeps the AdminClient out of the collector's reach.
        self._unclosed = weakref.finalize(self, _destroy_elsewhere, self._admin)
        self._unclosed.atexit = False

    @contextmanager
    def use(self) -> Iterator[AdminClient]:
        """The client, which stays alive until the block is left. Raises ClosedError after close()."""
        with self._lock:
            self.check_open()
            self._uses += 1
        try:
            yield self._admin
        finally:
            self._leave()

    def check_open(self) -> None:
        """Raise ClosedError after close()."""
        if self._closed:
            raise ClosedError("The cluster was closed; nothing was asked. Open a new one.")

    def _leave(self) -> None:
        with self._lock:
            self._uses -= 1
            is_last = self._closed and self._uses == 0
        if is_last:
            self._destroy()

    def close(self) -> None:
        """Destroy the client, now or when it is no longer used. Idempotent."""
        with self._lock:
            is_last = not self._closed and self._uses == 0
            self._closed = True
        if is_last:
            self._destroy()

    def _destroy(self) -> None:
        self._unclosed.detach()
        _destroy(self._admin)


def _destroy(admin: AdminClient) -> None:
    admin.__exit__(None, None, None)  # confluent-kafka has no other name for it


def _destroy_elsewhere(admin: AdminClient) -> None:
    """Of a holder that was never closed: the collector may be running on a thread of librdkafka."""
    threading.Thread(target=_destroy, args=(admin,), name="kafka-marshal-destroy", daemon=True).start()
