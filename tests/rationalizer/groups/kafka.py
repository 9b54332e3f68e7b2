"""Kafka's own assignors, asked in a JVM that lives as long as a `with`."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kafka_marshal.testing.jars import broker_jars, find_java
from kafka_marshal.testing.layout import JVM_OPTIONS
from rationalizer.groups.assignors import NOBODY

PROGRAM = Path(__file__).with_name("KafkaAssignors.java")

#: Topic: slots.
Subscribers = Mapping[str, Sequence[int]]
#: Topic: the slot of each partition.
Assigned = Mapping[str, Sequence[int]]


class KafkaAssignors:
    """range, roundrobin and sticky as consumers have them, and the server's uniform. Members' names order as slots do.

    Raises:
        JavaMissingError: there is no Java with a compiler.
    """

    def __init__(self) -> None:
        java = find_java(module="jdk.compiler").path
        class_path = os.pathsep.join(map(str, broker_jars()))
        self._command = [str(java), *JVM_OPTIONS, "-cp", class_path, str(PROGRAM)]

    def __enter__(self) -> Self:
        self._said: IO[bytes] = tempfile.TemporaryFile()
        self._jvm = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, bufsize=1
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jvm.kill()
        self._jvm.communicate()
        self._said.close()

    def assign(self, assignor: str, subscribers: Subscribers, counts: Mapping[str, int], was: Assigned) -> Assigned:
        """The assignment; `was` is what members had and still subscribe to."""
        members: dict[str, dict[str, object]] = {}
        for slot in sorted({slot for slots in subscribers.values() for slot in slots}):
            topics = [topic for topic, slots in subscribers.items() if slot in slots]
            had = {topic: [n for n, other in enumerate(was.get(topic, ())) if other == slot] for topic in topics}
            members[f"m{slot:06}"] = {"topics": topics, "had": {topic: those for topic, those in had.items() if those}}
        assert self._jvm.stdin is not None
        assert self._jvm.stdout is not None
        self._jvm.stdin.write(json.dumps({"assignor": assignor, "counts": counts, "members": members}) + "\n")
        answer = self._jvm.stdout.readline()
        if not answer:
            self._said.seek(0)
            raise AssertionError(f"the JVM ended: {self._said.read().decode(errors='replace')}")
        found: dict[str, list[str | None]] = json.loads(answer)
        return {topic: [NOBODY if name is None else int(name[1:]) for name in names] for topic, names in found.items()}
