"""The command's fixtures, for the audit's tests."""

from __future__ import annotations

from tests.cli.conftest import command, environment, kafka, log_topic

__all__ = ["command", "environment", "kafka", "log_topic"]
