"""The page's server: the page and its files, answers in JSON, server-sent events; which requests are allowed."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kafka_marshal.admin.stored_message import StoredMessage
from kafka_marshal.errors import MarshalError
from kafka_marshal.instance import release
from kafka_marshal.observe.log import Source
from kafka_marshal.observe.payload import MOST_BYTES, short, shown
from kafka_marshal.observe.text import no_group
from kafka_marshal.ports import TopicPartition
from kafka_marshal.secret import visible
from kafka_marshal.ui import moments
from kafka_marshal.ui.archive import Histories, NotReadError, read_around_moments, read_dump, read_kafka
from kafka_marshal.ui.fold import GroupHistory, History
from kafka_marshal.ui.kept import KeptIndex
from kafka_marshal.ui.live import Live
from kafka_marshal.ui.moments import Moment
from kafka_marshal.ui.steering import ACTIONS, Steering
from rationalizer.dump import DumpError

#: Returns the message of a data partition at an offset (*blocking*).
ReadMessage = Callable[[TopicPartition, int], StoredMessage]

STATIC: Final = Path(__file__).parent / "static"

TOKEN_HEADER: Final = "X-Kafka-Marshal-Token"  # noqa: S105  (its name)

#: Nothing from other sites, and only the scripts and styles of the page.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

#: An idle stream sends a comment at this interval (s), so that each end notices if the other is gone.
KEEP_ALIVE_S: Final = 15.0

#: The least time between two sends (s).
PACE_S: Final = 0.25

#: The interval at which threads take turns: a request does not wait long for the thread that reads the history.
SWITCH_S: Final = 0.001

#: Reading threads have this long to end (s); then the process ends without them.
JOIN_S: Final = 5.0

#: The most rows of a list in one request.
MOST_ROWS: Final = 500


#: The methods of `Page` that answer below /api/.
ANSWERS: Final = (
    *("log", "state", "partition", "message", "sharing", "open_message", "events", "rebalances", "checkpoints"),
    *("timeline", "diff", "near", "jobs"),
)


class Page:
    """The sources of all answers."""

    def __init__(
        self, archive: Histories, live: Live | None, steering: Steering | None, payloads: ReadMessage | None
    ) -> None:
        self.payloads = payloads
        self.archive = archive
        self.live = live
        self.steering = steering

    # -- answers; each runs on a thread of the server --------------------------------------------------------------

    def log(self, request: Request) -> dict[str, Any]:
        """The log: its groups, its bounds, how far it is read, whether steering is allowed."""
        archive, live = self.archive, self.live
        history = archive.newest
        begin, end = archive.bounds()
        names = set() if live is None else set(live.groups)
        if history is not None:
            names |= {name for name, group in list(history.groups.items()) if group.keys or live is None}
        done, of_all = archive.progress
        return {
            "topic": archive.topic,
            "release": release(),
            "groups": sorted(names),
            "problems": {} if live is None else live.problem_counts(),
            "live": live is not None,
            "begin": begin,
            "end": end if live is None else max(end, live.now_ms),
            "reached": archive.reached() if not archive.complete else end,
            "complete": archive.complete,
            "read": done,
            "to_read": of_all,
            "problem": visible(archive.problem or (live.problem if live is not None else "")),
            "note": archive.note,
            "payloads": self.payloads is not None,
            "steering": None if self.steering is None else list(ACTIONS),
            "events": 0 if history is None else len(history.events),
        }

    def state(self, request: Request) -> Any:
        """The ownership map at a moment; by default now."""
        if "at" not in request.query_params and self.live is not None:
            text = self.live.state_text(_group_name(request))
            if text is not None:
                return Response(text, media_type="application/json")
        history, group, moment = self._asked(request)
        with history.asking():
            return moments.state(history, group, moment)

    def partition(self, request: Request) -> dict[str, Any]:
        """One partition at a moment: the answer of `who`, its owners before and after, its last events."""
        history, group, moment = self._asked(request)
        place = _place(request)
        if place is None:
            raise ValueError("which partition? Say topic and partition.")
        with history.asking():
            found = moments.detail(history, group, place, moment)
            found["events"] = moments.events(history, group.name, moment, "all", place, 20)
        if self.live is not None and "at" not in request.query_params and group.name in self.live.groups:
            found["text"] = self.live.sharing(group.name, place)["text"] or found["text"]
        return found

    def message(self, request: Request) -> dict[str, Any]:
        """One message of a data topic."""
        if self.payloads is None:
            raise PermissionError("This server shows no messages: it was started with --no-payloads, or for a dump.")
        place, offset = _message_place(request)
        try:
            return _message_json(self.payloads(place, offset))
        except MarshalError as error:
            raise LookupError(visible(str(error))) from None

    def sharing(self, request: Request) -> dict[str, Any]:
        """Who shares one partition, and what is open of it: now, whatever moment is shown."""
        place = _place(request)
        if place is None:
            raise ValueError("which partition? Say topic and partition.")
        return self._now().sharing(_group_name(request), place)

    def open_message(self, request: Request) -> dict[str, Any]:
        """One open message; its key as far as this server shows messages."""
        place, offset = _message_place(request)
        with_key = self.payloads is not None
        try:
            return self._now().open_message(_group_name(request), place, offset, with_key=with_key)
        except MarshalError as error:
            raise LookupError(visible(str(error))) from None

    def events(self, request: Request) -> dict[str, Any]:
        """The last records up to a moment that are more than signs of life."""
        history, group, moment = self._asked(request)
        which = request.query_params.get("only", "all")
        if which not in ("all", "changed", "rejected"):
            raise ValueError(f"only: all, changed or rejected, not {visible(which)!r}")
        with history.asking():
            return {"events": moments.events(history, group.name, moment, which, _place(request), _limit(request))}

    def rebalances(self, request: Request) -> dict[str, Any]:
        """The last rebalances up to a moment."""
        history, group, moment = self._asked(request)
        with history.asking():
            return {"rebalances": moments.rebalances(history, group, moment, min(50, _limit(request)))}

    def checkpoints(self, request: Request) -> dict[str, Any]:
        """The last checkpoints up to a moment, and what the newest of them had of each piece."""
        history, group, moment = self._asked(request)
        with history.asking():
            return moments.checkpoints(group, moment, min(50, _limit(request)))

    def timeline(self, request: Request) -> dict[str, Any]:
        """A group over its whole history, with the lag since the server started."""
        name = _group_name(request)
        history, group = self._group(name, None)
        with history.asking():
            found = moments.timeline(group, self._known_until(history))
        points = [] if self.live is None else list(self.live.points.get(name, ()))
        found["lag"] = [[at, lag, rate] for at, lag, rate in points]
        return found

    def diff(self, request: Request) -> dict[str, Any]:
        """The differences between two moments."""
        history, group, second = self._asked(request, "to")
        first = self._moment(request, "from")
        if first.time > second.time:
            first, second = second, first
        history, group = self._group(group.name, second)
        if not self.archive.covers(history, first):
            raise NotReadError("The log is not read as far as both of these moments yet.")
        with history.asking():
            return moments.diff(history, group, first, second)

    def near(self, request: Request) -> dict[str, Any]:
        """The event before or after a moment at which owners changed."""
        history, group, moment = self._asked(request)
        forward = request.query_params.get("direction") != "back"
        while True:
            with history.asking():
                found = moments.neighbour(history, group.name, moment, forward=forward)
            further = None if found is not None else self.archive.beyond(history, forward=forward)
            if further is None:
                return {"event": found}
            try:
                history, group = self._group(group.name, further)
            except LookupError:  # the group did not exist then
                return {"event": None}
            moment = further

    def jobs(self, request: Request) -> dict[str, Any]:
        """The commands that were confirmed here."""
        return {"jobs": [job.json() for job in list(self._steering_of(request).jobs.values())]}

    def plan(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """The dry run of an action."""
        return self._steering_of(request).plan(str(body.get("action")), body)

    def carry_out(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Carry out a plan."""
        return self._steering_of(request).run(str(body.get("plan"))).json()

    # -- inside --------------------------------------------------------------------------------------------------

    def _now(self) -> Live:
        if self.live is None:
            raise LookupError("A dump has no present: sharers and open messages are shown of a running Kafka only.")
        if not self.live.groups:
            raise NotReadError("The log is not read to its end yet.")
        return self.live

    def _known_until(self, history: History) -> int:
        """The log time up to which this history has everything."""
        if history is self.archive.whole and not self.archive.complete:
            return self.archive.reached()
        return max(world.log_time for world in history.worlds.values())

    def _steering_of(self, request: Request) -> Steering:
        """Raises PermissionError unless the request has its token."""
        if self.steering is None:
            raise PermissionError("This server only shows: it was started without --allow-steering.")
        if not self.steering.allows(request.headers.get(TOKEN_HEADER, "")):
            raise PermissionError(
                "Steering needs the address with #token= that kafka-marshal ui printed when it was started."
            )
        return self.steering

    def _group(self, name: str, moment: Moment | None) -> tuple[History, GroupHistory]:
        try:
            return self.archive.group(name, moment)
        except KeyError:
            history = self.archive.history(moment)
            raise LookupError(visible(no_group(name, history.groups))) from None

    def _moment(self, request: Request, parameter: str) -> Moment:
        text = request.query_params.get(parameter)
        if text is None:
            newest = self.archive.history()
            return Moment(max((world.log_time for world in newest.worlds.values()), default=0))
        return moments.parse_moment(text, self.archive.holding)

    def _asked(self, request: Request, parameter: str = "at") -> tuple[History, GroupHistory, Moment]:
        moment = self._moment(request, parameter)
        history, group = self._group(_group_name(request), moment if parameter in request.query_params else None)
        return history, group, moment


def _group_name(request: Request) -> str:
    name = request.query_params.get("group")
    if not name:
        raise ValueError("which group? Say group=NAME.")
    return name


def _place(request: Request) -> tuple[str, int] | None:
    topic, number = request.query_params.get("topic"), request.query_params.get("partition")
    if topic is None or number is None:
        return None
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"partition: a number is wanted, not {visible(number)!r}")
    return topic, int(number)


def _message_place(request: Request) -> tuple[tuple[str, int], int]:
    place, offset = _place(request), request.query_params.get("offset", "")
    if place is None or not (offset.isascii() and offset.isdigit() and len(offset) < 20):
        raise ValueError("which message? Say topic, partition and offset.")
    return place, int(offset)


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "100")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"limit: a number is wanted, not {visible(text)!r}")
    return min(MOST_ROWS, int(text))


# -- which requests are allowed ---------------------------------------------------------------------------------


def _name_of(host: str) -> str:
    """The name without its port, in lower case."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OriginGuard:
    """An ASGI application around another one: refuses foreign hosts and origins, adds headers to all answers.

    A page of another site can send requests to 127.0.0.1, and read the answers through a name that it points there (DNS
    rebinding). So `Host` must be one of our names, and requests that change something must come from our page.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """names: of this server, besides localhost and its addresses."""
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        problem = self._problem(scope["method"], scope["path"], Headers(scope=scope))
        if problem:
            await JSONResponse({"error": problem}, 403)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _problem(self, method: str, path: str, headers: Headers) -> str:
        """Why this request is refused; "": it is allowed."""
        host = headers.get("host", "")
        name = _name_of(host)
        # An address is safe: no other site can point a name at it.
        if name not in self._names and not _is_address(name):
            return (
                f"This server is not called {name!r}. Start kafka-marshal ui with --allow-host {quote(name)} if it is."
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "This request comes from a page of another site."
        # Any site may link to the page itself.
        if path != "/" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "This request comes from a page of another site."
        if method not in ("GET", "HEAD"):
            if origin is None:
                return "This request does not say which page it comes from."
            if headers.get("content-type", "").partition(";")[0] != "application/json":
                return "This request is not JSON."
        return ""


# -- routes ------------------------------------------------------------------------------------------------------


def _refusal(error: Exception) -> Response:
    status = 400
    for kind, code in ((PermissionError, 403), (NotReadError, 503), (LookupError, 404)):
        if isinstance(error, kind):
            status = code
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": str(error.args[0]) if error.args else str(error)}, status, headers)


_REFUSED = (ValueError, OverflowError, LookupError, PermissionError, NotReadError)


def _get(answer: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    def answered(request: Request) -> Response:
        try:
            found = answer(request)
        except _REFUSED as error:
            return _refusal(error)
        return found if isinstance(found, Response) else JSONResponse(found)

    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(answered, request)

    return endpoint


def _post(answer: Callable[[Request, dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                raise ValueError("the request is no JSON object")
            return JSONResponse(await run_in_threadpool(answer, request, body))
        except _REFUSED as error:
            return _refusal(error)

    return endpoint


def _message_json(message: StoredMessage) -> dict[str, object]:
    """A message as text, never markup, with invisible characters escaped."""
    value = shown(message.value, "auto", MOST_BYTES)
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.timestamp,
        "committed": message.committed,
        "key": visible(short(message.key)),
        "headers": [[visible(name), visible(short(each))] for name, each in message.headers],
        "form": value.form,
        "value": "\n".join(map(visible, value.lines)),
        "bytes": value.size,
        "cut": value.cut,
    }


class _Stream:
    """Server-sent events of one group: its state if it changed, lag and rate, and new events."""

    def __init__(self, page: Page, group: str, last_id: str) -> None:
        self._page = page
        self._group = group
        #: CP → the offset up to which events were sent.
        self._sent = _offsets(last_id)
        self._at = -1
        self._figures = ""

    async def lines(self) -> AsyncIterator[str]:
        """The lines for the browser, while it listens."""
        live = self._page.live
        assert live is not None
        news, done = live.subscribe()
        try:
            yield "retry: 1000\n\n"
            while not live.ended:
                news.clear()
                for line in await run_in_threadpool(self._news):
                    yield line
                await asyncio.sleep(PACE_S)
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield ": nothing new\n\n"
        finally:
            done()

    def _news(self) -> list[str]:
        live, archive = self._page.live, self._page.archive
        assert live is not None
        found = []
        state = live.state_text(self._group)
        points = live.points.get(self._group)
        if state is not None and live.now_ms != self._at:
            self._at = live.now_ms
            found.append(f"event: state\ndata: {state}\n\n")
        point = points[-1] if points else None
        figures = json.dumps(
            {"point": point, "problem": live.problem, "complete": archive.complete, "now": live.now_ms}
        )
        if figures != self._figures:
            self._figures = figures
            found.append(f"event: figures\ndata: {figures}\n\n")
        history = archive.newest
        if history is not None:
            with history.asking():
                ends = {cp: world.next_offset for cp, world in history.worlds.items()}
                if self._sent:
                    events = moments.events_since(history, self._group, self._sent)
                    found += [f"event: happened\ndata: {json.dumps(each)}\n\n" for each in events]
                self._sent = ends
            found.append(f"id: {'-'.join(str(ends[cp]) for cp in sorted(ends))}\nevent: upto\ndata: {{}}\n\n")
        return found


def _offsets(text: str) -> dict[int, int]:
    parts = text.split("-") if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return {}
    return {cp: int(part) for cp, part in enumerate(parts)}


def application(
    archive: Histories,
    live: Live | None,
    steering: Steering | None,
    names: Iterable[str] = (),
    payloads: ReadMessage | None = None,
) -> ASGIApp:
    """The ASGI application. names: of this server, besides localhost. payloads: None: no messages."""
    page = Page(archive, live, steering, payloads)

    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def stream(request: Request) -> Response:
        if live is None:
            return JSONResponse({"error": "A dump does not grow."}, 404)
        group = request.query_params.get("group", "")
        last_id = request.headers.get("last-event-id", "")
        return StreamingResponse(_Stream(page, group, last_id).lines(), media_type="text/event-stream")

    routes = [
        Route("/", index),
        *(Route(f"/api/{name.replace('_', '-')}", _get(getattr(page, name))) for name in ANSWERS),
        Route("/api/live", stream),
        Route("/api/plan", _post(page.plan), methods=["POST"]),
        Route("/api/carry-out", _post(page.carry_out), methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return OriginGuard(Starlette(routes=routes), names)


# -- the server and its threads --------------------------------------------------------------------------------


class Serving:
    """One server, from its first thread to its end."""

    def __init__(self, stack: ExitStack, archive: Histories) -> None:
        """stack: ends the threads."""
        sys.setswitchinterval(SWITCH_S)
        self.archive = archive
        self.live: Live | None = None
        self._stack = stack
        self._stop = threading.Event()
        self._failed: list[Exception] = []
        self._server: uvicorn.Server | None = None

    def start_live(self, source: Source, kept: KeptIndex | None = None) -> None:
        """Read the log of a cluster, from now on. kept: the file of its history."""
        self.archive.kept = kept
        live = self.live = Live(source, self.archive)
        for thread in (
            threading.Thread(target=live.run, args=(self._stop,), name="kafka-marshal-live", daemon=True),
            threading.Thread(
                target=read_kafka, args=(self.archive, source, self._stop), name="kafka-marshal-history", daemon=True
            ),
            threading.Thread(
                target=read_around_moments,
                args=(self.archive, source, self._stop),
                name="kafka-marshal-moments",
                daemon=True,
            ),
        ):
            thread.start()
            self._stack.callback(thread.join, JOIN_S)
        self._stack.callback(self._stop.set)

    def start_dump(self, path: Path) -> None:
        """Read a dump. Raises DumpError, OSError if it is not one."""
        begun = threading.Event()
        self.archive.on_change = begun.set

        def read() -> None:
            try:
                with path.open("rb") as file:
                    read_dump(self.archive, file, self._stop)
            except (DumpError, OSError) as error:
                self._failed.append(error)
                self._end()
            finally:
                begun.set()

        threading.Thread(target=read, name="kafka-marshal-dump", daemon=True).start()
        self._stack.callback(self._stop.set)
        begun.wait()
        if self.archive.whole is None:
            raise self._failed[0]

    def run(self, app: ASGIApp, listener: socket.socket) -> None:
        """Serve until Ctrl-C or SIGTERM; both end it in order. Raises what reading a dump raised (*blocking*)."""
        server = self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                server_header=False,
            )
        )
        if self._failed:
            raise self._failed[0]

        def end(number: int, frame: FrameType | None) -> None:
            self._end()

        before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
            server.run(sockets=[listener])
        finally:
            for number, handler in before.items():
                with suppress(TypeError):
                    signal.signal(number, handler)
        if self._failed:
            raise self._failed[0]

    def _end(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if self.live is not None:
            self.live.end()


def _no_signals() -> nullcontext[None]:
    """uvicorn would raise the signal again after its end, and the command would be interrupted."""
    return nullcontext()
