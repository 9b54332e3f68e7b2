"""The scenes of the client's tests, for what goes wrong around it."""

from __future__ import annotations

from tests.client.conftest import scene

__all__ = ["scene"]
