"""The page of a dumped story, really served; and Chromium."""

from __future__ import annotations

import io
import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kafka_marshal.ui.archive import Histories, read_dump
from kafka_marshal.ui.live import Live
from kafka_marshal.ui.server import ReadMessage, application
from kafka_marshal.ui.steering import Steering
from tests.ui.story import story

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def get(url: str, method: str = "GET", body: object = None, **headers: str) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as found:
            return Answer(found.status, dict(found.headers), found.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read().decode())


@contextmanager
def served(
    archive: Histories,
    live: Live | None = None,
    steering: Steering | None = None,
    names: Sequence[str] = (),
    payloads: ReadMessage | None = None,
) -> Iterator[str]:
    """Run the server on a free port; its address."""
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = application(archive, live, steering, names, payloads)
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:  # else a test that fails keeps the process for ever
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def dump() -> bytes:
    return story()


@pytest.fixture(scope="session")
def archive(dump: bytes, tmp_path_factory: pytest.TempPathFactory) -> Histories:
    return archive_of(dump, tmp_path_factory.mktemp("ui"))


def archive_of(dump: bytes, folder: Path) -> Histories:
    """Read a dump as ``kafka-marshal ui --dump`` does."""
    path = folder / "story.dump"
    path.write_bytes(dump)
    found = Histories("?", is_live=False)
    with path.open("rb") as file:
        assert isinstance(file, io.BufferedReader)
        read_dump(found, file, threading.Event())
    return found


@pytest.fixture(scope="session")
def page_url(archive: Histories) -> Iterator[str]:
    with served(archive) as url:
        yield url


# Of a module, not of a session: its event loop runs in this thread until it ends, and no other can meanwhile.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()
