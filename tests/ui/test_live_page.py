"""The live page in Chromium, of a synthetic state: hanging and waiting workers, other groups, the chart."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kafka_marshal.cli.options import Options
from kafka_marshal.observe.rows import GroupRow, LeaseRow, WorkerRow
from kafka_marshal.ui.archive import Histories
from kafka_marshal.ui.live import Live
from tests.ui.conftest import get, served
from tests.ui.story import BEGIN, END, GROUP, TOPIC

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NOW = BEGIN + END * 1000
LONG = "a-worker-with-a-name-that-does-not-fit-into-the-map-of-the-page"


def lease(group: str, number: int, worker: str, *, hung: bool = False, silence_ms: int = 500) -> LeaseRow:
    still_ms = 20_000 if hung else 100
    return LeaseRow(
        group,
        TOPIC,
        number,
        cp=0,
        client=worker,
        instance=f"host-{worker[-1]}/4/0.1.0/x",
        epoch=number,
        heartbeat_interval_ms=3_000,
        silence_ms=silence_ms,
        stable=100,
        log_start=0,
        log_end=151,
        idle_ms=still_ms,
        held_ms=60_000,
        waiting_ms=still_ms,
    )


def heard(worker: str, silence_ms: int, *, waits: bool = False, released: bool = False) -> WorkerRow:
    instance = f"host-{worker[-1]}/4/0.1.0/x"
    return WorkerRow(GROUP, worker, instance, silence_ms, waits=waits, released_ms=silence_ms if released else None)


class Shown(NamedTuple):
    page: Page
    url: str
    live: Live


@pytest.fixture(scope="module")
def shown(browser: Browser, archive: Histories) -> Iterator[Shown]:
    """Two groups, one of them with problems, as on a running Kafka."""
    growing = Histories("__marshal", is_live=True)
    growing.whole = archive.whole
    growing.finished()
    live = Live(Options(bootstrap="127.0.0.1:1").source(), growing)
    idle = [
        heard("worker-7", 240_000),
        heard("worker-8", 5_000, released=True),
        heard("worker-9", 1_000, waits=True),
    ]
    live.groups = {
        GROUP: GroupRow(GROUP, [lease(GROUP, 0, "worker-1"), lease(GROUP, 1, LONG, hung=True)], heard=idle),
        "plans": GroupRow("plans", [lease("plans", 0, "planner-1", silence_ms=9_000)]),
        "rests": GroupRow("rests", [lease("rests", 0, "rester-1")]),
    }
    live.points = {GROUP: deque([(NOW - 2_000, 70, 900.0), (NOW - 1_000, 61, 901.0)])}
    live.now_ms = NOW
    with served(growing, live) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, timezone_id="UTC")
        page.set_default_timeout(20_000)
        yield Shown(page, url, live)
        page.close()
        live.end()


def opened(shown: Shown, address: str = "") -> Page:
    shown.page.goto("about:blank")
    shown.page.goto(f"{shown.url}#group={GROUP}{address}")
    shown.page.wait_for_selector("canvas.map")
    return shown.page


def test_members_that_hold_nothing_are_listed(shown: Shown) -> None:
    page = opened(shown, "&tab=members")
    rows = page.get_by_role("table", name="Members").locator("tbody tr")
    assert rows.count() == 5
    silent = rows.filter(has_text="worker-7")
    assert re.split(r"\t", silent.inner_text()) == [
        "worker-7",
        "host-7:4",
        "0.1.0",
        "0",
        "-",
        "silent for 4 min; others took over what it held",
    ]
    assert silent.locator("td.bad").count() == 1
    left = rows.filter(has_text="released all it held 5.0 s ago")
    assert left.locator("td.bad").count() == 0
    page.get_by_role("tab", name="Who waits").click()
    page.get_by_text("worker-9: waits for a partition").wait_for()
    assert page.get_by_role("tabpanel").locator("li").count() == 1, "the others don't wait"


def test_who_hangs_is_marked_in_the_map_and_at_its_partitions(shown: Shown) -> None:
    page = opened(shown, f"&p={TOPIC}:1")
    page.get_by_text(f"{TOPIC}/1: {LONG}, seen, hung?, lag 50").wait_for()
    page.locator("[data-partition]").get_by_text("beats, but gets nothing done: hung?").wait_for()
    assert "hung?" in page.get_by_role("list", name="What the colours mean").inner_text()
    marked = page.evaluate(_LABELS)
    assert marked[marked.index(", hung?") - 1].endswith("…"), "a long name is cut, not the mark"
    assert marked.count(", hung?") == 1
    page.get_by_role("application").press("ArrowLeft")
    page.get_by_text(f"{TOPIC}/0: worker-1, seen, lag 50").wait_for()
    assert page.locator("[data-partition] .bad").count() == 0


def test_a_partition_that_a_message_holds_back_is_marked_and_said(shown: Shown) -> None:
    groups = dict(shown.live.groups)
    row = replace(lease(GROUP, 0, "worker-1"), held_back="held back at offset 9 for 2 min by key k7")
    evicted = WorkerRow(GROUP, "worker-1", row.instance or "", 0, evictor="ann", evicted_ms=3_000, was_alive=True)
    shown.live.groups[GROUP] = GroupRow(GROUP, [row, lease(GROUP, 1, "worker-1")], heard=[evicted])
    shown.live._taken += 1
    try:
        page = opened(shown, f"&p={TOPIC}:0&tab=members")
        page.get_by_text(f"{TOPIC}/0: worker-1, seen, lag 50, held back at offset 9 for 2 min by key k7").wait_for()
        row_of = page.get_by_role("table", name="Members").locator("tbody tr").first
        assert "evicted by ann 3.0 s ago; claims nothing until its handler returns" in row_of.inner_text()
        page.get_by_role("status", name="What is wrong").get_by_text("held back at offset 9").wait_for()
        red = page.evaluate(_BARS)
        assert red == 1, "one cell has a bar"
    finally:
        shown.live.groups.update(groups)
        shown.live._taken += 1


#: Number of cells in the error colour when the map is redrawn.
_BARS = """async () => {
  const { OwnershipMap } = await import("/static/map.js");
  const state = await (await fetch("/api/state?group=delays")).json();
  const bad = getComputedStyle(document.documentElement).getPropertyValue("--bad").trim();
  const canvas = document.createElement("canvas").getContext("2d");
  canvas.fillStyle = bad;
  let found = 0;
  const fill = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function () { found += this.fillStyle === canvas.fillStyle; };
  try {
    new OwnershipMap(document.querySelector("canvas.map")).show(state, null, null);
  } finally {
    CanvasRenderingContext2D.prototype.fillRect = fill;
  }
  return found;
}"""

#: The map's texts when it is redrawn.
_LABELS = """async () => {
  const { OwnershipMap } = await import("/static/map.js");
  const state = await (await fetch("/api/state?group=delays")).json();
  const found = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = (text) => found.push(text);
  try {
    new OwnershipMap(document.querySelector("canvas.map")).show(state, null, null);
  } finally {
    CanvasRenderingContext2D.prototype.fillText = write;
  }
  return found;
}"""


def test_a_group_that_is_in_trouble_is_seen_from_another_one(shown: Shown) -> None:
    found = get(f"{shown.url}api/log").json
    assert found["problems"] == {GROUP: 1, "plans": 1}
    page = opened(shown)
    options = page.get_by_role("combobox", name="Group").locator("option").all_inner_texts()
    assert options == ["billing", f"{GROUP} (1 problem)", "plans (1 problem)", "rests"]
    page.get_by_role("button", name="plans: 1 problem").click()
    page.get_by_text("planner-1 (host-1:4) is gone: silent for 9.0 s").wait_for()
    other = page.get_by_role("button", name=f"{GROUP}: 1 problem")
    other.wait_for()
    assert other.evaluate("(at) => getComputedStyle(at).color") == "rgb(179, 38, 30)", "as what is wrong"
    state = shown.live.groups["plans"]
    shown.live.groups = {**shown.live.groups, "plans": GroupRow("plans", [lease("plans", 0, "planner-1")])}
    assert get(f"{shown.url}api/log").json["problems"] == {GROUP: 1}, "the next picture is another one"
    shown.live.groups = {**shown.live.groups, "plans": state}


def legend(page: Page) -> list[str]:
    return [text.strip() for text in page.locator(".u-legend .u-value").all_inner_texts()]


def test_the_chart_says_the_newest_figures_or_those_of_the_moment(shown: Shown) -> None:
    page = opened(shown)
    page.locator(".u-legend").wait_for()
    at, done, lag = legend(page)
    assert (at, done, lag) == ("19:51:21", "0", "61")
    page.locator(".u-over").hover(position={"x": 300, "y": 60})
    page.wait_for_function("(at) => document.querySelector('.u-legend .u-value').textContent !== at", arg=at)
    assert "-" not in legend(page), "each figure is that of the nearest moment at which it is known"
    page.mouse.move(5, 5)
    page.wait_for_function("(at) => document.querySelector('.u-legend .u-value').textContent === at", arg=at)
    opened(shown, "&at=2025-11-25T19:47:10Z").locator(".u-legend").wait_for()
    at, done, lag = legend(page)
    assert (at, lag) == ("19:47:10", "-"), "lag was not seen then"
    assert done not in ("-", "0")
    page.get_by_role("slider", name="Moment").press("PageUp")
    page.wait_for_function("(at) => document.querySelector('.u-legend .u-value').textContent > at", arg=at)


def test_the_rate_is_the_logs_and_only_beyond_it_what_was_seen(shown: Shown) -> None:
    page = opened(shown)
    timeline = {
        "begin": 10_000,
        "width": 1_000,
        "end": 14_500,
        "done": [5, 7, 0, 6, 2],
        "lag": [[11_500, 3, 99.0], [13_900, 4, 98.0], [14_200, 5, 97.0], [15_000, 6, None]],
    }
    times, rates, lags = page.evaluate(_POINTS, [timeline, 0, 20_000])
    assert times == [10, 11, 11.5, 12, 13, 13.9, 14.2, 15]
    assert rates == [5, 7, None, 0, 6, None, 97, None], "the bucket that is not over is not drawn"
    assert lags == [None, None, 3, None, None, 4, 5, 6]
    quiet = {**timeline, "end": 17_000, "lag": []}
    assert page.evaluate(_POINTS, [quiet, 12_000, 16_400]) == [[12, 13, 14, 15, 16], [0, 6, 2, 0, 0], [None] * 5]
    wide = {**timeline, "done": [1] * 1_500, "end": 10_000 + 1_500_500, "lag": []}
    times, rates, _ = page.evaluate(_POINTS, [wide, 10_000, 1_510_500])
    assert len(times) == 500
    assert set(rates) == {1}
    nothing = {**timeline, "begin": 0, "done": []}
    assert page.evaluate(_POINTS, [nothing, 0, 20_000])[1] == [99, 98, 97, None]


_POINTS = """async ([timeline, begin, end]) => {
  const { points } = await import("/static/charts.js");
  return points(timeline, begin, end);
}"""
