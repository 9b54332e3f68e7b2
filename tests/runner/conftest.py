"""Fixtures of the tests of worker processes."""

from tests.client.conftest import scene as scene
