"""The scene of the client's tests: a coordination topic, data topics and members on the session's real broker."""

from __future__ import annotations

from tests.client.conftest import scene

__all__ = ["scene"]
