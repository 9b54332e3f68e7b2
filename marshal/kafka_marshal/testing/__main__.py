"""``python -m kafka_marshal.testing``: download the local broker's jars to the cache and print their folder.

It also starts a broker once and keeps the classes that it has loaded, in an archive that Java writes and reads itself:
later starts take half the processor time. An archive of other jars or of another Java is ignored by Java. With PySpark
installed, it downloads Spark's Kafka connector too (its folder is printed second).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import time

from kafka_marshal.testing.broker import LocalBroker
from kafka_marshal.testing.errors import BrokerDiedError, LocalBrokerError
from kafka_marshal.testing.jars import broker_jars, connector_jars, find_java
from kafka_marshal.testing.layout import ready_classes

#: How long the broker may take to start, and then to end and write the archive: seconds on an idle machine.
_PATIENCE_S = 120.0


def main() -> int:
    """Returns 0, or 1 if the jars are unavailable."""
    try:
        sys.stdout.write(f"{broker_jars()[0].parent}\n")
        if "KAFKA_MARSHAL_JARS" not in os.environ:  # a folder of the user's is left as it is
            _make_classes_ready()
        if importlib.util.find_spec("pyspark") is not None:
            sys.stdout.write(f"{connector_jars()[0].parent}\n")
    except LocalBrokerError as error:
        sys.stderr.write(f"kafka-marshal: {error}\n")
        return 1
    return 0


def _make_classes_ready() -> None:
    kept = ready_classes(find_java(), broker_jars())
    if kept.exists():
        return
    scratch = kept.with_name(f".{kept.name}-{os.getpid()}")
    try:
        with LocalBroker(jvm_options=[f"-XX:ArchiveClassesAtExit={scratch}"], start_timeout_s=_PATIENCE_S) as broker:
            os.kill(broker.pid_of(1), signal.SIGTERM)
            until = time.monotonic() + _PATIENCE_S
            with contextlib.suppress(BrokerDiedError):  # the end that was asked for
                while time.monotonic() < until:
                    broker.check()
                    time.sleep(0.1)
        scratch.replace(kept)
    finally:
        scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
