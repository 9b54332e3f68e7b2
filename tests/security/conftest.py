"""The command, as the tests of the command have it."""

from tests.cli.conftest import command, environment

__all__ = ["command", "environment"]
