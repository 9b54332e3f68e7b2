"""The scenes of the client's tests, for Spark."""

from __future__ import annotations

from tests.client.conftest import scene
from tests.spark_cluster import cluster

__all__ = ["cluster", "scene"]
