"""Fixtures of other folders: the command, and a log in memory with its snapshots."""

from tests.cli.conftest import command, environment, terminal
from tests.snapshots.conftest import story

__all__ = ["command", "environment", "story", "terminal"]
