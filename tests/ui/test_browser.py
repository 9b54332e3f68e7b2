"""The page in Chromium: by mouse and keyboard, light and dark, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from rationalizer import ClaimingPartition, Tick, route_lease
from tests.cli.harness import Log
from tests.ui.conftest import archive_of, served
from tests.ui.story import BEGIN, GROUP, KILLED_AT, TAKEN_AT, TOPIC

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def iso(seconds: float) -> str:
    from datetime import UTC, datetime

    moment = datetime.fromtimestamp(BEGIN / 1000 + seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """One page for all tests; errors in it fail the test."""
    found = browser.new_page(viewport={"width": 1280, "height": 900}, timezone_id="UTC")
    found.set_default_timeout(20_000)
    wrong: list[str] = []
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    foreign: list[str] = []
    found.on("request", lambda request: foreign.append(request.url) if "127.0.0.1" not in request.url else None)
    yield found
    found.close()
    assert wrong == []
    assert foreign == []


def open_at(page: Page, url: str, address: str) -> None:
    page.goto("about:blank")
    page.goto(f"{url}#{address}")
    page.wait_for_selector("canvas.map")


def wait(page: Page, script: str, value: Any = None) -> None:
    page.wait_for_function(script, arg=value)


def test_a_deep_link_shows_that_moment_and_partition(page: Page, page_url: str) -> None:
    open_at(page, page_url, f"group={GROUP}&at={iso(KILLED_AT + 7)}&p={TOPIC}:1&tab=rejected")
    page.get_by_text("worker-2, gone").wait_for()
    answer = page.locator(".answer")
    answer.wait_for()
    assert "worker-2, epoch " in answer.inner_text()
    assert "its lease had lapsed" in answer.inner_text()
    assert page.get_by_role("tab", selected=True).inner_text() == "Rejected"
    assert "as it was" in page.locator(".badge").inner_text()


def test_names_from_the_log_are_text(page: Page, tmp_path: Path) -> None:
    """A script in it would run, or be blocked by the policy with an error in the console; neither may happen."""
    evil = "<img src=x onerror=\"document.title='owned'\">{}</script>"
    log = Log(2)
    for cp in range(2):
        log.add(Tick("init", "init", "partitions=2"), BEGIN, cp)
    for number in range(4):
        claim = ClaimingPartition("host-1/4/0.1.0/x", evil, evil, evil, number, 3_000)
        log.add(claim, BEGIN + 1_000, route_lease(evil, number, 2))
    with served(archive_of(log.dump, tmp_path)) as url:
        open_at(page, url, f"group={quote(evil)}&p={quote(evil)}:1&tab=members")
        page.locator(".answer").get_by_text(evil).first.wait_for()
        for tab in page.get_by_role("tab").all():
            tab.click()
        page.get_by_role("tab", name="Members").click()
        page.locator("td", has_text=evil).first.wait_for()
        assert page.locator("main img").count() == 0
        assert "owned" not in page.title()


def test_the_slider_by_keys(page: Page, page_url: str) -> None:
    open_at(page, page_url, f"group={GROUP}&p={TOPIC}:1")
    slider = page.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    wait(page, "(at) => location.hash.includes(at)", iso(0))
    page.get_by_text("0 partitions, 0 members").wait_for()
    page.keyboard.press("PageUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.get_by_text(f"{TOPIC}/1: worker-2, seen").wait_for()
    page.keyboard.press("]")
    wait(page, "() => /at=[0-9]+:[0-9]+/.test(location.hash)")
    page.keyboard.press("[")
    page.keyboard.press("End")
    wait(page, "() => !location.hash.includes('at=')")
    assert slider.get_attribute("aria-valuetext") == "now"


def test_the_map_by_keys_and_by_a_click(page: Page, page_url: str) -> None:
    open_at(page, page_url, f"group={GROUP}&at={iso(30)}")
    page.get_by_role("application").focus()
    page.keyboard.press("End")
    page.get_by_text(f"{TOPIC}/23: worker-3, seen").wait_for()
    page.keyboard.press("ArrowLeft")
    page.get_by_text(f"{TOPIC}/22: worker-2, seen").wait_for()
    page.keyboard.press("ArrowUp")
    page.get_by_text(re.compile(r"flights/\d+: worker-1, seen")).wait_for()
    page.keyboard.press("Home")
    page.get_by_text(f"{TOPIC}/0: worker-1, seen").wait_for()
    page.locator("canvas.map").click(position={"x": 175, "y": 50})
    wait(page, "() => location.hash.includes('p=flights:0')")
    assert "kept in" in page.locator("[data-partition]").inner_text()


def test_two_moments_compared(page: Page, page_url: str) -> None:
    open_at(page, page_url, f"group={GROUP}&at={iso(KILLED_AT)}")
    page.get_by_role("button", name="Compare from here").click()
    page.get_by_role("button", name="Next change").click()
    page.locator("[data-diff]").get_by_text("had another owner").wait_for()
    wait(page, "() => document.querySelectorAll('[data-diff] tbody tr').length > 0")
    assert "silent for 8.0 s, then claimed by" in page.locator("[data-diff]").inner_text()
    wait(page, "() => document.querySelector('.legend .changed') !== null")
    page.go_back()
    page.locator("[data-diff]").get_by_text("0 partitions of 24").wait_for()


def test_back_and_forward_of_the_browser(page: Page, page_url: str) -> None:
    open_at(page, page_url, f"group={GROUP}")
    page.get_by_role("combobox", name="Group").select_option("billing")
    page.get_by_text("6 partitions, 2 members").wait_for()
    page.get_by_role("tab", name="Who waits").click()
    page.get_by_text("a is to release invoices/4, then b gets it").wait_for()
    page.go_back()
    page.get_by_text("24 partitions, 3 members").wait_for()


def test_a_time_that_is_typed(page: Page, page_url: str) -> None:
    open_at(page, page_url, f"group={GROUP}")
    field = page.get_by_role("textbox", name="Go to a time")
    field.fill(iso(TAKEN_AT + 1))
    field.press("Enter")
    wait(page, "(at) => location.hash.includes(at)", iso(TAKEN_AT + 1))
    field.fill("1:5")
    field.press("Enter")
    wait(page, "() => location.hash.includes('at=1:5')")
    field.fill("nonsense")
    field.press("Enter")
    assert field.get_attribute("aria-invalid") == "true"


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_light_and_dark_wide_and_narrow(page: Page, page_url: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    open_at(page, page_url, f"group={GROUP}&at={iso(TAKEN_AT + 1)}&from={iso(KILLED_AT)}&p={TOPIC}:1&tab=all")
    page.locator("[data-diff]").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator(".answer").wait_for()
    page.locator("#list tbody tr").last.wait_for()
    wait(page, _ENDS_ABOVE_THE_BAR)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 23, 21)"
    assert dark == (scheme == "dark")
    contrast = page.evaluate(_CONTRAST)
    assert min(contrast.values()) >= 4.5, contrast
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})


#: The end of the page can be scrolled above the slider.
_ENDS_ABOVE_THE_BAR = """() => {
  scrollTo(0, document.documentElement.scrollHeight);
  const place = (element) => element.getBoundingClientRect();
  const ends = [...document.querySelectorAll("main section, main aside")].map((each) => place(each).bottom);
  return Math.max(...ends) <= place(document.querySelector("nav.timeline")).top;
}"""

_CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const canvas = document.createElement("canvas").getContext("2d");
  const light = (name) => {
    canvas.fillStyle = style.getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((at) => parseInt(canvas.fillStyle.slice(at, at + 2), 16) / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {};
  for (const name of ["--ink", "--quiet", "--accent", "--focus", "--bad", "--warn"]) {
    for (const ground of ["--paper", "--panel"]) {
      const [low, high] = [light(name), light(ground)].sort((a, b) => a - b);
      found[name + ground] = (high + 0.05) / (low + 0.05);
    }
  }
  return found;
}"""


def test_all_is_reached_by_tab_and_seen(page: Page, page_url: str) -> None:
    open_at(page, page_url, f"group={GROUP}&at={iso(TAKEN_AT + 1)}&p={TOPIC}:1")
    page.locator(".answer").wait_for()
    seen: set[str] = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "() => { const at = document.activeElement; return [at.getAttribute('role') || at.tagName, "
            "getComputedStyle(at).outlineStyle, at.getAttribute('aria-label') || at.textContent.slice(0, 30)]; }"
        )
        if found[0] != "BODY":
            assert found[1] != "none", f"the focus is not seen on {found}"
            seen.add(found[0])
        if "INPUT" in seen and found[0] == "BODY":
            break
    assert {"application", "tab", "BUTTON", "SELECT", "INPUT"} <= seen


def test_what_the_log_says_is_text_and_no_markup(browser: Browser, tmp_path: Any) -> None:
    import threading

    from kafka_marshal.ui.archive import Histories, read_dump
    from rationalizer import ClaimingPartition
    from tests.cli.harness import Log
    from tests.ui.conftest import served

    name = "<img src=x onerror=alert(1)>"
    log = Log()
    log.add(ClaimingPartition("i", name, name, name, 0, 3000), BEGIN)
    (tmp_path / "hostile.dump").write_bytes(log.dump)
    archive = Histories("?", is_live=False)
    with (tmp_path / "hostile.dump").open("rb") as file:
        read_dump(archive, file, threading.Event())
    with served(archive) as url:
        page = browser.new_page()
        dialogs: list[object] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog))
        page.goto(f"{url}#p={name}:0&tab=members")
        page.get_by_text(f"{name}/0: {name}, seen").wait_for()
        page.locator(".answer").wait_for()
        assert page.locator("img").count() == 0
        page.close()
    assert dialogs == []
