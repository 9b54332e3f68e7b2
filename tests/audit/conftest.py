"""The command's fixtures, and a Spark cluster, for the audit's tests."""

from __future__ import annotations

from tests.cli.conftest import command, environment, kafka, log_topic
from tests.spark_cluster import cluster

__all__ = ["cluster", "command", "environment", "kafka", "log_topic"]
