"""The dashboard and the alert rules of docs/monitoring: each metric exists, and Prometheus accepts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.metrics.rows import CATALOGUE, prometheus_label
from kafka_marshal.testing.layout import free_ports
from tests.client.conftest import Scene, wait_until
from tests.metrics.conftest import ServingWorker

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "monitoring" / "dashboard.json"
ALERTS = DOCS / "monitoring" / "alerts.yaml"

SERIES = {name: metric for metric in CATALOGUE for name in metric.series}
METRIC = re.compile(r"\b(?:kafka_marshal|kafka_consumer_group|messaging)_\w+")

has_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not on PATH (Debian: apt-get install prometheus)",
)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def queries() -> list[str]:
    """The dashboard's queries, with variables substituted."""
    found = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    return [text.replace("$group", ".*").replace("$__rate_interval", "1m") for text in found]


def rules() -> list[str]:
    """The alerts' expressions, without a YAML parser: each begins after ``expr:``, folded or not."""
    text = ALERTS.read_text(encoding="utf-8")
    return [" ".join(found.split()) for found in re.findall(r"expr: (?:>\n)?(.*?)\n +(?:for|labels):", text, re.DOTALL)]


def labels_in(query: str) -> set[str]:
    matched = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=)", query))
    return matched | {name.strip() for by in re.findall(r"by \(([^)]*)\)", query) for name in by.split(",")}


@pytest.mark.parametrize("query", [*queries(), *rules()])
def test_each_metric_exists_with_each_label(query: str) -> None:
    names = METRIC.findall(re.sub(r"by \([^)]*\)|\{[^}]*\}", "", query))
    assert names, query
    assert [name for name in names if name not in SERIES] == []
    known = {prometheus_label(label) for name in names for label in SERIES[name].labels} | {"le"}
    assert labels_in(query) - known == set()


def test_the_dashboard_shows_every_metric_once_and_its_panels_do_not_overlap() -> None:
    shown = set(METRIC.findall(" ".join(re.sub(r"by \([^)]*\)|\{[^}]*\}", "", query) for query in queries())))
    assert {metric.prometheus for metric in CATALOGUE} == {SERIES[name].prometheus for name in shown}
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))


def test_what_a_legend_names_is_a_label() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {
                prometheus_label(label) for metric in CATALOGUE for label in metric.labels
            }


def test_the_page_has_every_metric_as_it_is() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert listed == [(metric.prometheus, metric.kind) for metric in CATALOGUE]


@has_prometheus
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


@has_prometheus
def test_a_real_prometheus_scrapes_a_worker_and_answers_every_query(
    scene: Scene, serving: Callable[..., ServingWorker], tmp_path: Path
) -> None:
    topic = scene.topic(2, 20)
    worker = serving(topic, run=True)
    worker.order("consume")
    worker.order("go")
    wait_until(lambda: worker.values().get("kafka_marshal_processed_messages_total") == 40)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "w", "static_configs": [{"targets": [worker.url.removeprefix("http://")]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    (port,) = free_ports(1)
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command = ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    prometheus = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def ask(path: str, **arguments: str) -> Any:
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
            try:
                with urllib.request.urlopen(url, timeout=10) as found:
                    return json.load(found)["data"]
            except (urllib.error.URLError, ConnectionError):
                return None

        def value(query: str) -> float | None:
            found = ask("query", query=query)
            return float(found["result"][0]["value"][1]) if found and found["result"] else None

        wait_until(lambda: value("kafka_marshal_leases") == 2, 180)
        assert value("sum(kafka_marshal_processed_messages_total)") == 40
        assert value("sum(messaging_process_duration_seconds_count)") == 40
        for query in [*queries(), *rules()]:
            assert ask("query", query=query) is not None, query
        wait_until(lambda: ask("rules")["groups"][0]["rules"][0]["health"] == "ok")
        assert {rule["health"] for rule in ask("rules")["groups"][0]["rules"]} <= {"ok", "unknown"}
        assert [rule["state"] for rule in ask("rules")["groups"][0]["rules"]] == ["inactive"] * len(rules())
    finally:
        prometheus.kill()
        prometheus.wait()
