"""The audit on a standalone Spark, a master and two workers; the command gets only the master's address."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit.logs import forged, random_log
from tests.spark_cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(420)]


def test_a_forged_snapshot_is_found_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    log = random_log(50, 400, partitions=4)
    log.store_snapshots(100)
    log.snapshots[3][1:2] = forged(log.world(3, 200))
    dump = log.write_dump(tmp_path / "log.jsonl")
    snapshots = log.write_snapshots(tmp_path / "snapshots.jsonl")
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "kafka_marshal", "audit", str(dump), "--snapshots", str(snapshots)),
            *("--master", cluster.url, "--work", str(tmp_path), "--out", str(tmp_path / "out"), "--json"),
        ],
        env={**cluster.environment, "SPARK_CONF_DIR": str(tmp_path)},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr.decode()[-3000:]
    found = json.loads(ran.stdout)
    assert {each["partition"]: each["digest"] for each in found["partitions"]} == log.digests()
    assert [(each["partition"], each["offset"]) for each in found["examples"]] == [(3, log.world(3, 200).next_offset)]
    assert "Registered app kafka-marshal audit" in cluster.log("master")
