"""What can be seen of a Marshal from outside its loops: health, metrics, probes."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from kafka_marshal.client.ending import Ending
from kafka_marshal.client.handling import Hooks
from kafka_marshal.client.health import Health
from kafka_marshal.errors import ClosedError, SnapshotDifferenceError
from kafka_marshal.metrics.measure import Meter
from kafka_marshal.metrics.rows import Metrics

if TYPE_CHECKING:
    from kafka_marshal.metrics.server import MetricsServer


class Watched:
    """The part of a Marshal that only reads: at once, from any thread, without a lock."""

    _meter: Meter
    _closed: bool
    _ending: Ending

    def health(self) -> Health:
        """The present state of this member: for probes, and for people (``str()`` of it).

        Returns at once, from any thread, also in a signal handler: it takes no lock and waits for no thread. Use
        ``health().ready`` for a readiness probe, ``not health().needs_restart`` for a liveness probe.
        """
        return self._meter.health(closed=self._closed)

    def metrics(self) -> Metrics:
        """The present measurements: lag, leases, messages, the log, handlers (docs/metrics.md).

        Returns at once, from any thread. A metric that is not read costs nothing.
        """
        return self._meter.read(closed=self._closed)

    def timing(self) -> Hooks:
        """Hooks for ``run(…, hooks=[marshal.timing()])``: ``metrics().processing`` has how long handlers take."""
        return self._meter.timing()

    def serve(self, port: int, host: str = "127.0.0.1") -> MetricsServer:
        """Answer over HTTP: ``/metrics`` (for Prometheus), ``/livez``, ``/readyz``, and ``/lag`` (JSON, of the group).

        It runs on separate threads, which no handler and no outage of Kafka can block, until this Marshal ends or
        ``close()`` of the result. ``port`` 0: a free one, given by ``.port`` and ``.url``. ``host``: loopback by
        default; at another address, everyone on that network can read what is served. ``/metrics`` needs the extra
        ``[prometheus]``. Raises ConfigurationError if the server can't listen on the address, ClosedError.
        """
        from kafka_marshal.metrics.server import MetricsServer, checked_address  # not for a Marshal that serves nothing

        port, host = checked_address(port, host)
        self._meter.driver.refuse_fork()
        if self._closed or self._meter.driver.is_over:
            raise ClosedError("this Marshal is closed; make a new one")
        mine = ref(self)
        server = MetricsServer(self._meter, port, host, lambda: (marshal := mine()) is None or marshal._closed)
        self._ending.servers.append(server)
        return server

    @property
    def alarms(self) -> tuple[SnapshotDifferenceError, ...]:
        """Snapshots that contradict this member's replica, each reported once. Also logged as errors."""
        return tuple(self._meter.driver.upkeep.snapshots.alarms)
