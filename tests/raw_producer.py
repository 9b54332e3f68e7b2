"""Records as programs in C or PHP may write them, with librdkafka itself: header names that are no UTF-8."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import confluent_kafka

#: (name, value); None: null.
RawHeaders = Sequence[tuple[bytes, bytes | None]]

_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _TIMESTAMP, _HEADER, _END = 1, 3, 4, 5, 7, 8, 9, 0
_COPY = 2


def produce_raw(
    bootstrap: str, topic: str, records: Sequence[tuple[bytes | None, bytes | None, RawHeaders]], *, at_ms: int = 0
) -> None:
    """Write (key, value, headers) to partition 0, in order. at_ms: their timestamp; 0: now."""
    (path,) = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
    settings, error = ctypes.c_void_p(library.rd_kafka_conf_new()), ctypes.create_string_buffer(512)
    library.rd_kafka_conf_set(settings, b"bootstrap.servers", bootstrap.encode(), error, 512)
    client = ctypes.c_void_p(library.rd_kafka_new(0, settings, error, 512))
    for key, value, headers in records:
        args: list[object] = [_TOPIC, topic.encode(), _PARTITION, 0, _FLAGS, _COPY]
        for kind, each in ((_KEY, key), (_VALUE, value)):
            args += [] if each is None else [kind, each, ctypes.c_size_t(len(each))]
        for name, text in headers:
            args += [_HEADER, name, text, ctypes.c_ssize_t(-1 if text is None else len(text))]
        args += [_TIMESTAMP, ctypes.c_int64(at_ms)] if at_ms else []
        assert library.rd_kafka_producev(client, *args, _END) == 0
    assert library.rd_kafka_flush(client, 15_000) == 0
    library.rd_kafka_destroy(client)
