"""What a Marshal is told, checked before anything is sent."""

from __future__ import annotations

import os
import socket
import uuid

from kafka_marshal.errors import ConfigurationError
from rationalizer import ClaimingPartition, InvalidRecordError

__all__ = ["check_ids", "new_client_id"]


def new_client_id() -> str:
    """A client_id for those who do not give one: readable, and unique. It can't be taken over after a restart (C7)."""
    host = "".join(c if c.isalnum() or c in "-._" else "-" for c in socket.gethostname())[:60]
    return f"{host or 'host'}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def check_ids(group_id: str, client_id: str, heartbeat_interval_ms: int) -> None:
    """Refuse what no replica would accept (E2); raises ConfigurationError."""
    if isinstance(heartbeat_interval_ms, bool) or not isinstance(heartbeat_interval_ms, int):
        raise ConfigurationError(
            f"heartbeat_interval_ms must be an int (milliseconds), not {heartbeat_interval_ms!r}. Nothing was sent"
        )
    try:
        ClaimingPartition("instance", client_id, group_id, "topic", 0, heartbeat_interval_ms)
    except InvalidRecordError as error:
        raise ConfigurationError(f"no member would accept records with these settings: {error}") from error
