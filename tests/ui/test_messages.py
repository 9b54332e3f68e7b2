"""Messages of topics on the page: text, never markup; sent only on request; nothing with --no-payloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kafka_marshal.admin import StoredMessage
from kafka_marshal.errors import AdminError
from kafka_marshal.ui.archive import Archive
from tests.ui.conftest import get, served
from tests.ui.story import GROUP, TOPIC

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EVIL = "<img src=x onerror=\"document.title='owned'\">\u202e\x1b[31m"

#: (topic, partition, offset)
asked: list[tuple[str, int, int]] = []


def read(key: tuple[str, int], offset: int) -> StoredMessage:
    asked.append((*key, offset))
    if offset == 404:
        raise AdminError("there is no message at offset 404. The next message is at 405.")
    headers = ((EVIL, EVIL.encode()), ("none", None))
    return StoredMessage(*key, offset, 1_700_000_000_000, "create", b"\xff", EVIL.encode(), headers, False)


@pytest.fixture(scope="module")
def url(archive: Archive) -> Iterator[str]:
    with served(archive, payloads=read) as found:
        yield found


def test_a_message_is_a_separate_answer(url: str, page_url: str) -> None:
    place = f"api/message?topic={TOPIC}&partition=1&offset="
    found = get(f"{url}{place}7").json
    assert (found["offset"], found["key"], found["form"], found["committed"]) == (7, "0xff", "hex", False)
    assert found["headers"][1] == ["none", "null"]
    assert found["headers"][0][0].isprintable()
    missing = get(f"{url}{place}404")
    assert (missing.status, missing.json["error"]) == (
        404,
        "there is no message at offset 404. The next message is at 405.",
    )
    assert get(f"{url}{place}x").status == 400
    assert get(f"{url}api/message?offset=1").status == 400
    refused = get(f"{page_url}{place}7")
    assert (refused.status, "--no-payloads" in refused.json["error"]) == (403, True)
    assert (get(f"{url}api/log").json["payloads"], get(f"{page_url}api/log").json["payloads"]) == (True, False)
    assert get(f"{url}{place}7", Origin="http://evil.example").status == 403


def test_the_page_shows_it_on_demand_as_text(browser: Browser, url: str, page_url: str) -> None:
    page = browser.new_page(timezone_id="UTC")
    page.set_default_timeout(20_000)
    try:
        asked.clear()
        page.goto(f"{url}#group={GROUP}&p={TOPIC}:1")
        panel = page.locator("[data-message]")
        panel.wait_for()
        assert asked == []
        panel.get_by_role("button", name="Show the one at").click()
        panel.get_by_text("aborted or is not finished").wait_for()
        assert [each[:2] for each in asked] == [(TOPIC, 1)]
        assert "\\x1b[31m" in panel.inner_text()
        assert "<img src=x" in panel.inner_text()
        assert page.locator("[data-message] img").count() == 0
        assert "owned" not in page.title()
        panel.get_by_label("or at offset").fill("404")
        panel.get_by_role("button", name="Show", exact=True).click()
        panel.get_by_text("The next message is at 405.").wait_for()
        page.goto("about:blank")
        page.goto(f"{page_url}#group={GROUP}&p={TOPIC}:1")
        page.locator(".answer").wait_for()
        assert page.locator("[data-message]").count() == 0
    finally:
        page.close()
