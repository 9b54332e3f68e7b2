"""`kafka-marshal ui` as a process on a real Kafka: the live part, steering, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.observe.log import Source
from kafka_marshal.ui import folding
from kafka_marshal.ui.archive import Histories, read_kafka
from rationalizer import ClaimingPartition, Heartbeat, Record, SettlingMessages, encode, route_lease
from tests.cli.conftest import command, environment, kafka, log_topic
from tests.cli.harness import Command, start
from tests.client.conftest import wait_until
from tests.ui.conftest import Answer, get
from tests.ui.test_kept import answers

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["command", "environment", "kafka", "log_topic"]

A, B = ("host-1/11/0.1.0/x", "worker-1", "g"), ("host-2/12/0.1.0/x", "worker-2", "g")

#: A holder that stays fresh for as long as the test takes.
LONG_MS = 600_000


class Served(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str
    token: str

    def ask(self, path: str) -> Any:
        return get(f"{self.url}api/{path}").json

    def send(self, path: str, body: dict[str, object]) -> Answer:
        headers = {"Origin": self.url[:-1], "Content_Type": "application/json", "X_Kafka_Marshal_Token": self.token}
        return get(f"{self.url}api/{path}", "POST", body, **headers)


Append = Callable[[Record], int]


@pytest.fixture
def append(kafka: Command, kafka_bootstrap: str, log_topic: str) -> Iterator[Append]:
    assert kafka("init", "--partitions", 2).status == 0
    cluster = KafkaCluster(kafka_bootstrap, {})
    appender = cluster.appender(log_topic, delivery_timeout_ms=10_000)

    def append_one(record: Record) -> int:
        assert isinstance(record, (ClaimingPartition, Heartbeat, SettlingMessages))
        offsets: list[int] = []
        cp = route_lease(record.topic, record.partition, 2)
        appender.append(cp, encode(record), lambda ack: offsets.append(-1 if ack.offset is None else ack.offset))
        assert appender.flush(10) == 0
        return offsets[0]

    yield append_one
    appender.close()
    cluster.close()


@pytest.fixture
def data(topic_factory: Callable[..., str]) -> str:
    return topic_factory(3)


@pytest.fixture
def served(kafka: Command, append: Append, data: str) -> Iterator[Served]:
    """The command, serving a log in which worker-1 holds partitions 0 and 1."""
    for number in (0, 1):
        append(ClaimingPartition(*A, data, number, LONG_MS))
    with start(*kafka.before, "ui", "--port", "0", "--json", "--allow-steering") as process:
        assert process.stdout is not None
        url, _, token = json.loads(process.stdout.readline())["url"].partition("#token=")
        found = Served(process, url, token)
        wait_until(lambda: found.ask("log")["complete"] and found.ask("log")["groups"] == ["g"], 90)
        yield found
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b"", "with --json nothing is said besides"


def stream(served: Served, last_id: str, until: Callable[[str, Any], bool]) -> tuple[str, Any]:
    """Read server-sent events until one matches; returns the last id before it, and its data."""
    request = urllib.request.Request(f"{served.url}api/live?group=g", headers={"Last-Event-ID": last_id})
    last, kind = "", ""
    deadline = time.monotonic() + 30
    with urllib.request.urlopen(request, timeout=30) as found:
        assert found.headers["Content-Type"].startswith("text/event-stream")
        for line in found:
            assert time.monotonic() < deadline
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                last = value
            elif name == "event":
                kind = value
            elif name == "data" and until(kind, json.loads(value)):
                return last, json.loads(value)
    raise AssertionError("the stream ended")


def evict_in_the_page(browser: Browser, served: Served, data: str) -> None:
    page = browser.new_page()
    page.set_default_timeout(30_000)
    page.goto(f"{served.url}#group=g&p={data}:1&token={served.token}")
    page.get_by_role("button", name=f"Evict from {data}/1").click()
    assert "token" not in page.url
    page.get_by_role("checkbox").check()
    page.get_by_role("button", name="Dry run").click()
    page.get_by_text("would be evicted from").wait_for()
    page.get_by_role("button", name="Confirm").click()
    page.get_by_text("released: worker-1 no longer holds").wait_for()
    page.get_by_text("Done.").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text(f"{data}/1: nobody, free").wait_for()
    page.close()


def test_the_live_state_events_and_steering(
    served: Served, append: Append, data: str, browser: Browser, kafka: Command
) -> None:
    state = wait_until(lambda: (found := served.ask("state?group=g"))["live"] and found, 90)
    (topic,) = state["topics"]
    assert [(each["client"], each["where"], each["held"]) for each in state["members"]] == [
        ("worker-1", "host-1:11", 2)
    ]
    assert (topic["owners"], topic["nexts"]) == ([0, 0, -1], [0, 0, None])
    assert [state["states"][code] for code in topic["states"]] == ["seen", "seen", "never claimed"]

    last, _ = stream(served, "", lambda kind, _: kind == "upto")
    append(ClaimingPartition(*B, data, 0, LONG_MS))
    append(ClaimingPartition(*B, data, 2, LONG_MS))
    _, rejected = stream(served, last, lambda kind, each: kind == "happened" and not each["accepted"])
    assert (rejected["client"], rejected["code"]) == ("worker-2", "HELD")
    assert rejected["why"].startswith("worker-1 holds it, epoch ")
    _, found = stream(served, "", lambda kind, each: kind == "state" and len(each["members"]) == 2)
    assert found["topics"][0]["owners"] == [0, 0, 1]

    planned = served.send("plan", {"action": "evict", "group": "g", "topic": data, "partition": 1}).json
    assert (planned["plan"], planned["status"]) == (None, 1), "it beat a moment ago: left alone without --force"
    assert "or force it" in planned["err"]
    forced = {"action": "evict", "group": "g", "topic": data, "partition": 0, "force": True}
    planned = served.send("plan", forced).json
    assert planned["out"].startswith("worker-1 (epoch "), planned
    assert planned["command"].endswith(f"--yes --force -- g {data} 0")
    assert served.ask("state?group=g")["topics"][0]["owners"] == [0, 0, 1], "a dry run changes nothing"
    kafka("evict", "g", data, 0, "--yes", "--force")
    job = served.send("carry-out", {"plan": planned["plan"]}).json
    assert served.send("carry-out", {"plan": planned["plan"]}).status == 400, "what was planned is done once"

    def jobs() -> Any:
        return get(f"{served.url}api/jobs", X_Kafka_Marshal_Token=served.token).json["jobs"]

    wait_until(lambda: jobs()[0]["status"] is not None, 90)
    assert (jobs()[0]["id"], jobs()[0]["status"]) == (job["id"], 1)
    assert "is free already" in "\n".join(jobs()[0]["lines"])

    evict_in_the_page(browser, served, data)
    wait_until(lambda: served.ask("state?group=g")["topics"][0]["owners"] == [-1, -1, 0], 90)
    past = served.ask(f"partition?group=g&topic={data}&partition=1")
    assert [each["client"] for each in past["spans"]] == ["worker-1", None]
    assert past["spans"][0]["ended"].startswith("evicted by admin-")


def test_a_message_that_was_set_aside_is_redriven_or_discarded_in_the_page(
    served: Served, append: Append, data: str, browser: Browser, kafka: Command, kafka_bootstrap: str
) -> None:
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for _ in range(2):
        producer.produce(data, b"value", b"customer-17", partition=2)
    assert producer.flush(10) == 0
    epoch = append(ClaimingPartition(*B, data, 2, LONG_MS))
    parked = tuple((offset, 7, 5, "ValueError") for offset in (0, 1))
    append(SettlingMessages(*B, data, 2, epoch, 2**40, parked=parked))
    wait_until(lambda: served.ask(f"sharing?group=g&topic={data}&partition=2").get("messages"), 90)
    page = browser.new_page()
    page.set_default_timeout(30_000)
    page.goto(f"{served.url}#group=g&p={data}:2&token={served.token}")
    table = page.get_by_role("table", name="Open messages")
    shown = page.locator("[data-open-message]")
    for offset, action in ((0, "Redrive"), (1, "Discard")):
        table.get_by_role("button", name=str(offset), exact=True).click()
        shown.get_by_text('"customer-17"').wait_for()
        assert "worker-2" in shown.inner_text()
        shown.get_by_role("button", name=action).click()
        page.get_by_role("button", name="Dry run").click()
        page.get_by_text("would be done: 1 message of group g").wait_for()
        page.get_by_role("button", name="Confirm").click()
        page.get_by_text("Done.").last.wait_for()
        page.keyboard.press("Escape")
    shown.get_by_text("It is not open any more").wait_for()
    table.get_by_text("waiting").wait_for()
    assert table.locator("tbody tr").count() == 1
    page.close()
    by_operator = [line for line in kafka("log", "--group", "g").out.splitlines() if "as an operator" in line]
    assert [("redrives 0" in line, "discards 1" in line) for line in by_operator] == [(True, False), (False, True)]
    assert all("admin-" in line for line in by_operator), "who did it"
    body = {"action": "redrive", "group": "g", "topic": data, "partition": 2, "offset": 0}
    planned = served.send("plan", body).json
    assert (planned["plan"], planned["status"]) == (None, 1)
    assert "it waits for its next try already" in planned["out"]


def test_done_messages_are_done_again_from_a_time_that_is_marked_in_the_page(
    served: Served, append: Append, data: str, browser: Browser, kafka: Command, kafka_bootstrap: str
) -> None:
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    now = int(time.time() * 1000)
    for age_s in (500, 400, 300):
        producer.produce(data, b"value", b"customer-17", partition=2, timestamp=now - 1000 * age_s)
    assert producer.flush(10) == 0
    epoch = append(ClaimingPartition(*B, data, 2, LONG_MS))
    append(Heartbeat(*B, data, 2, epoch, 2))
    wait_until(lambda: served.ask("state?group=g")["topics"][0].get("nexts", [0] * 3)[2] == 3, 90)
    page = browser.new_page(timezone_id="UTC")
    page.set_default_timeout(30_000)
    page.goto(f"{served.url}#group=g&p={data}:2&token={served.token}")
    page.get_by_role("button", name="Compare from here").click()
    page.get_by_role("button", name="End comparison").wait_for()
    page.get_by_role("button", name=f"Redo of {data}/2").click()
    marked = page.get_by_label("Done messages of this time")
    assert len(marked.input_value().split("..")) == 2, "from … until, as marked on the time axis"
    marked.fill("450s..350s")
    page.get_by_role("button", name="Dry run").click()
    page.get_by_text("all of it is done").wait_for()
    page.get_by_role("button", name="Confirm").click()
    page.get_by_text("Done.").last.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("table", name="Open messages").get_by_role("button", name="1", exact=True).wait_for()
    page.get_by_text("opens again 1").first.wait_for()
    page.close()
    (redone,) = kafka("who", "g", data, 2, "--json").json["redone"]
    assert redone["ranges"] == [[1, 1]]


def test_a_restart_reads_only_what_is_new(kafka: Command, append: Append, data: str, tmp_path: Path) -> None:
    def shown() -> tuple[Any, Any]:
        """Start the page, wait until the log is read, end it: what it says of the log, and of what happened."""
        with start(*kafka.before, "ui", "--port", "0", "--json", "--index", str(tmp_path / "index")) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            wait_until(lambda: get(f"{url}api/log").json["complete"], 90)
            found = get(f"{url}api/log").json, get(f"{url}api/events?group=g&at={2**50}").json
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        return found

    for _ in range(3):
        append(ClaimingPartition(*A, data, 0, LONG_MS))
    log, events = shown()
    assert (log["to_read"], len(events["events"])) == (7, 3), "two records of init in each partition, and three claims"
    log, again = shown()
    assert (log["to_read"], again) == (0, events)
    append(ClaimingPartition(*B, data, 0, LONG_MS))
    log, more = shown()
    assert (log["to_read"], more["events"][1:]) == (1, events["events"])


def test_a_log_in_kafka_is_folded_side_by_side(
    append: Append, data: str, kafka_bootstrap: str, log_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "processes", lambda: 2)
    for number in range(6):
        append(ClaimingPartition(*A, data, number, LONG_MS))

    def read(at_least: int) -> Histories:
        monkeypatch.setattr(folding, "AT_LEAST", at_least)
        archive, stop = Histories(log_topic, is_live=True), threading.Event()
        source = Source(log_topic, 10.0, lambda: (kafka_bootstrap, {}))
        thread = threading.Thread(target=read_kafka, args=(archive, source, stop))
        thread.start()
        wait_until(lambda: archive.complete, 180)
        stop.set()
        thread.join()
        assert archive.problem == ""
        return archive

    found = [read(at_least).whole for at_least in (0, 1_000)]
    assert all(each is not None and len(each.events) == 6 + 2 for each in found)
    assert answers(found[0]) == answers(found[1])  # type: ignore[arg-type]


def test_without_kafka_it_ends_with_3_and_a_port_that_is_taken_is_named(command: Command) -> None:
    assert command("--bootstrap", "127.0.0.1:1", "--timeout", 1, "ui", "--port", 0).status == 3
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = command("--bootstrap", "127.0.0.1:1", "ui", "--port", taken.getsockname()[1])
    assert ran.status == 2
    assert "Name another one with --port" in ran.err
