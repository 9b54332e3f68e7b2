"""The broker's classes, made ready once for one Java and kept beside the jars: a start takes half the processor time.

Java writes and reads such an archive itself (-XX:ArchiveClassesAtExit). One of other jars or of another Java is ignored
by Java, so that it never keeps a broker from starting.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from kafka_marshal.testing.broker import LocalBroker
from kafka_marshal.testing.errors import BrokerDiedError
from kafka_marshal.testing.jars import broker_jars
from kafka_marshal.testing.java import find_java
from kafka_marshal.testing.layout import ready_classes

__all__ = ["make_classes_ready"]

#: How long the broker may take to end and to write the archive: seconds on an idle machine.
_WRITTEN_WITHIN_S = 120.0


def make_classes_ready() -> None:
    """Start a broker and keep the classes that it has loaded (*blocking*), unless they are there.

    A folder of the user's (KAFKA_MARSHAL_JARS) is left as it is.

    Raises:
        LocalBrokerError: (or a subclass) the broker did not start.
    """
    if "KAFKA_MARSHAL_JARS" in os.environ:
        return
    kept = ready_classes(find_java(), broker_jars())
    if kept.exists():
        return
    scratch = kept.with_name(f".{kept.name}-{os.getpid()}")
    try:
        with LocalBroker(jvm_options=[f"-XX:ArchiveClassesAtExit={scratch}"], start_timeout_s=120.0) as broker:
            os.kill(broker.pid_of(1), signal.SIGTERM)
            until = time.monotonic() + _WRITTEN_WITHIN_S
            with suppress(BrokerDiedError):  # as it was told
                while time.monotonic() < until:
                    broker.check()
                    time.sleep(0.1)
        scratch.replace(kept)
    finally:
        scratch.unlink(missing_ok=True)
