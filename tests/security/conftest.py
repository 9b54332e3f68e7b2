"""The command, as the tests of the command have it."""

from tests.cli.conftest import command, environment, terminal

__all__ = ["command", "environment", "terminal"]
