"""The one place where librdkafka's errors become ours.

librdkafka reports to a failed call only *that* it timed out. It reports why (connection refused, TLS handshake failed
…) separately, by callback or only in its log. :class:`Troubles` collects those, so that an error can say both.
"""

from __future__ import annotations

import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.adapters.kafka.settings import addresses
from kafka_marshal.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigurationError,
    KafkaUnavailableError,
    MarshalError,
)
from kafka_marshal.guard import Guard, report
from kafka_marshal.logs import RateLimit
from kafka_marshal.ports import FaultKind
from kafka_marshal.secret import hide
from rationalizer.travel import Travels

#: How long an address may take to accept, and then to answer (s); all of them together at most twice as long.
WAIT_S = 0.5

#: Kafka's default port.
_PORT = 9092

#: ApiVersions, version 0: any broker answers it before a login. A TLS listener hangs up, which is an answer, too.
_QUESTION = struct.pack(">ihhih", 10, 18, 0, 1, -1)


class Reached(StrEnum):
    """What an address does, for people."""

    SILENT = "accepts connections and is silent"
    REFUSED = "refuses connections: no process listens there"
    NO_ANSWER = "neither accepts nor refuses connections"
    NO_ROUTE = "has no route: the network says that it can't be reached"
    UNKNOWN = "is a name that can not be resolved"
    ANSWERS = "answers"

    @property
    def advice(self) -> str:
        """What to do about it."""
        return _ADVICE[self]


_ADVICE = {
    Reached.SILENT: "The broker is frozen, overloaded or starting: check its process, its garbage collection and its "
    "disks. More workers make it worse",
    Reached.REFUSED: "Check that the broker runs, and that bootstrap_servers names its listener",
    Reached.NO_ANSWER: "The broker is frozen or overloaded, and accepts no more, or the network or a firewall drops "
    "all: check its process first, then its machine and the way there. More workers make it worse",
    Reached.NO_ROUTE: "Check that the broker's machine runs, and the network and firewalls between",
    Reached.UNKNOWN: "Check bootstrap_servers, and the name service",
    Reached.ANSWERS: "Check that bootstrap_servers names its listener, that its advertised.listeners can be reached "
    "and, if it wants TLS or SASL, that security.protocol says so",
}


def reach(bootstrap_servers: str) -> dict[str, Reached]:
    """What each address does now (*blocking*, for a second at most): in order, as time allows."""
    until, found = time.monotonic() + 2 * WAIT_S, dict[str, Reached]()
    for address in addresses(bootstrap_servers):
        if time.monotonic() < until:
            found[address] = _reach(address)
    return found


def best(found: Sequence[Reached]) -> Reached:
    """What to say of all of them: one that answers, or at least accepts, explains more than one that is down."""
    order = (Reached.ANSWERS, Reached.SILENT, Reached.NO_ANSWER, Reached.REFUSED, Reached.NO_ROUTE, Reached.UNKNOWN)
    return min(found, key=order.index, default=Reached.ANSWERS)


def _reach(address: str) -> Reached:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    host, port = (host, port) if host and port.isdigit() else (address, str(_PORT))
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), WAIT_S)
    except ConnectionRefusedError:
        return Reached.REFUSED
    except (socket.gaierror, UnicodeError):
        return Reached.UNKNOWN
    except TimeoutError:
        return Reached.NO_ANSWER
    except OSError:
        return Reached.NO_ROUTE
    with connection:
        try:
            connection.sendall(_QUESTION)
            connection.recv(1)
        except TimeoutError:
            return Reached.SILENT
        except OSError:
            return Reached.ANSWERS  # it hangs up
    return Reached.ANSWERS


#: Position outside of the log: start moved up, log cut, topic recreated. With auto.offset.reset=error librdkafka
#: reports all of these as _AUTO_OFFSET_RESET.
_RANGE_CODES = frozenset(
    {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION, KafkaError._NO_OFFSET}
)

#: The topic or partition is not there (TOPIC_EXCEPTION: no topic can have such a name).
UNKNOWN_CODES = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.INCONSISTENT_TOPIC_ID,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)

_AUTHENTICATION_CODES = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
    }
)

_AUTHORIZATION_CODES = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

#: librdkafka looks for the coordinator of every consumer's group. Our consumers take part in none, need no right to it,
#: and the result of the search does not matter.
_GROUP_CODES = frozenset({KafkaError.GROUP_AUTHORIZATION_FAILED})

#: The answer to a request says so; see is_forbidden() for what comes unasked.
_FORBIDDEN_CODES = _AUTHORIZATION_CODES | _GROUP_CODES

_UNREACHABLE_CODES = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._WAIT_COORD,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
    }
)

#: What passes by itself: leadership moves, a topic just created is not known everywhere yet.
RETRY_CODES = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_CONTROLLER,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        # librdkafka dropped the broker that it was asking, for one that it has learnt of: there was no answer.
        KafkaError._DESTROY_BROKER,
    }
)

#: A trouble older than this does not explain a failure of now.
_RECENT_S = 60.0

#: The same line of librdkafka is passed on to logging at most this often; without a broker it comes 20 times a second.
_REPEAT_S = 10.0


class _Quieter(logging.Filter):
    """Keeps librdkafka's lines readable: no complaint about settings of other clients, no endless repetition."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = RateLimit(_REPEAT_S)

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        # One config serves producer, consumer and admin client; each would warn about the settings of the others.
        if line.startswith("CONFWARN") and "will be ignored by this" in line:
            return False
        # "FAIL [client#1] [thrd:…]: text (after 3ms in state CONNECT)": the same but for client, thread and time.
        key = line.partition("]: ")[2].partition(" (after ")[0] or line
        return self._repeats.due(key, time.monotonic()) is not None


#: Takes what librdkafka would write to stderr.
LOGGER = logging.getLogger("kafka_marshal.librdkafka")
LOGGER.addFilter(_Quieter())


#: Every client gets librdkafka's reports on connections, again and again; the member logs once what they mean for it.
#: Only these are for people: settings, and what ends a client.
_SETTINGS, _ENDS = "CONFWARN", "FATAL"

#: A broker that hangs up before its first answer wants another protocol, TLS most likely; librdkafka only logs it.
_HUNG_UP = "in state APIVERSION_QUERY"
_HANDSHAKE = "in state SSL_HANDSHAKE"

#: What librdkafka says of a connection without an answer to its first request, and of one that ended before that.
_UNANSWERED = "the connection was accepted, and the first request not answered"
_SILENT = re.compile(r"ApiVersionRequest failed: .*?: probably due to broker version < 0\.10 \([^)]*\)")
_GUESS = re.compile(r": requesting ApiVersion: might be caused by .*?\(see api\.version\.request\)")


class Troubles:
    """What librdkafka reported about one client: a reason for timeouts, faults for readers. Thread-safe.

    It is the client's error_cb, and its logger: lines are passed on to logging. As both it never raises, whatever the
    user's own error_cb, logger, handlers and filters do.
    """

    def __init__(
        self,
        forward: Callable[[KafkaError], object] | None = None,
        logger: logging.Logger | None = None,
        secrets: Iterable[str] = (),
    ) -> None:
        """forward: the user's own error_cb. logger: the user's own instead of the library's. secrets: what is to be
        hidden.
        """
        self._secrets = tuple(secrets)
        self._forward = None if forward is None else Guard("error_cb", forward)
        self._logger = logger if logger is not None else LOGGER
        #: Lines that begin so are logged for people; the library's logger has others at DEBUG.
        self.for_people: tuple[str, ...] = (_SETTINGS, _ENDS)
        #: (level, line) → whether the line was for this only; None: all lines go where the others go.
        self.takes_line: Callable[[int, str], bool] | None = None
        self._lock = threading.Lock()
        self._last: tuple[float, KafkaError] | None = None
        self._faults: list[tuple[FaultKind, str]] = []
        #: The first fatal error: the client is unusable from then on.
        self.fatal: str | None = None

    def log(self, level: int, message: str, *args: object) -> None:
        """Take a line of librdkafka's log (as a Logger would)."""
        try:
            text = message % args if args else message
            if self.takes_line is not None and self.takes_line(level, text):
                return
            text = _without_guess(self.hide(text))
            if _HUNG_UP in text:
                # One that wants TLS or SASL hangs up at once.
                hint = "it may be frozen, overloaded, starting or ending"
                if _UNANSWERED not in text:
                    hint += "; it may want TLS or SASL (security.protocol), or be no Kafka broker"
                with self._lock:
                    self._last = (time.monotonic(), KafkaError(KafkaError._TRANSPORT, f"{text}: {hint}"))
            if self._logger is LOGGER and not text.startswith(self.for_people):
                level = logging.DEBUG
            self._logger.log(level, "%s", text)
        except BaseException as error:  # noqa: BLE001 - raised from here, it would cost messages
            report(f"the log {self._logger.name!r}", error)

    def __call__(self, error: KafkaError) -> None:
        """Take an error from librdkafka (as error_cb)."""
        try:
            self._take(error)
        except BaseException as interrupt:  # noqa: BLE001 - raised from here, it would cost messages
            report("what notes librdkafka's errors", interrupt)

    def _take(self, error: KafkaError) -> None:
        if is_of_groups(error):
            return
        theirs, error = error, self.without_secrets(error)
        with self._lock:
            if error.fatal():
                self.fatal = self.fatal or error.str()
                self._faults.append((FaultKind.FATAL, error.str()))
            elif error.code() == KafkaError._ALL_BROKERS_DOWN:
                self._faults.append((FaultKind.UNREACHABLE, self._with_reason(error.str())))
            else:
                self._last = (time.monotonic(), error)
                # A connection that fails matters only when all do; that one is refused, people want to know.
                fault = (fault_kind(error), error.str())
                if _is_too_large(error):
                    self._faults.append((FaultKind.TOO_LARGE, error.str()))
                elif (is_refusal(error) or is_forbidden(error)) and fault not in self._faults:
                    self._faults.append(fault)
        if self._forward is not None:
            self._forward(theirs)

    def keep_ends_quiet(self) -> None:
        """Log no line about what ends this client: its next call raises it, and another one takes its place."""
        self.for_people = (_SETTINGS,)

    def hide(self, text: str) -> str:
        """The text without secrets of the configuration: librdkafka names the URL that it asks for a token."""
        return hide(text, self._secrets)

    def without_secrets(self, error: KafkaError) -> KafkaError:
        """The same error, its text as people and logs may see it."""
        text = _without_guess(self.hide(error.str()))
        if text == error.str():
            return error
        return KafkaError(error.code(), text, fatal=error.fatal(), retriable=error.retriable())

    def _with_reason(self, text: str) -> str:
        return text if (last := self.recent()) is None else f"{text} ({last.str()})"

    def take_faults(self) -> list[tuple[FaultKind, str]]:
        """Faults of the whole client since the last call."""
        if not self._faults:  # read without the lock: this runs after every read
            return []
        with self._lock:
            faults, self._faults = self._faults, []
        return faults

    @property
    def pending(self) -> bool:
        """Whether take_faults() would return any."""
        return bool(self._faults)

    def recent(self, since: float | None = None) -> KafkaError | None:
        """The last error of a connection, if it is young enough to explain a failure of now (or: not before since)."""
        last = self._last
        since = time.monotonic() - _RECENT_S if since is None else since
        return last[1] if last is not None and last[0] > since else None


class DebugLines:
    """What librdkafka says of one client in debug lines only: those of one category."""

    #: The debug category of these lines.
    category: str

    def __init__(self, settings: dict[str, object]) -> None:
        """Have librdkafka report it, with these settings of a client."""
        asked = str(settings.get("debug", "")).strip()
        #: Whether the user wants lines for debugging.
        self._is_debugging = bool(asked)
        settings["debug"] = ",".join(filter(None, [asked, self.category]))

    def take(self, level: int, line: str) -> bool:
        """Take a line of its log. Whether it was only asked for by us."""
        if level > logging.DEBUG:
            return False
        self._read(line)
        return not self._is_debugging

    def _read(self, line: str) -> None:
        raise NotImplementedError


class ForbiddenError(Travels, KafkaException):
    """An ACL is missing, and which one is known."""

    def __init__(self, cause: KafkaError, needs: str) -> None:
        """needs: what ``rights.grant`` says."""
        super().__init__(cause)
        self.needs = needs


def kafka_error(error: KafkaException | KafkaError) -> KafkaError:
    """The KafkaError inside a KafkaException."""
    if isinstance(error, KafkaError):
        return error
    inner = error.args[0] if error.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(error))


def is_forbidden(error: KafkaError) -> bool:
    """Whether an ACL is missing."""
    return error.code() in _AUTHORIZATION_CODES


def is_refusal(error: KafkaError) -> bool:
    """Whether the broker reported that it does not accept us. (A mere hang-up may also be a broker that goes down.)"""
    return error.code() in _AUTHENTICATION_CODES


def _is_too_large(error: KafkaError) -> bool:
    """An answer was larger than the client may receive; it breaks off the connection, and asks for the same again."""
    return error.code() == KafkaError._BAD_MSG and "receive.message.max.bytes" in error.str()


def is_of_groups(error: KafkaError) -> bool:
    """Whether this is about consumer groups, which we do not use."""
    return error.code() in _GROUP_CODES


def fault_kind(error: KafkaError) -> FaultKind:
    """What an error means to a client that reads on.

    A refused connection is an outage to it: tokens are renewed, certificates exchanged, a broker that goes down breaks
    off handshakes. It passes, or the client's leases end by themselves.
    """
    code = error.code()
    if error.fatal():
        return FaultKind.FATAL
    if code in _RANGE_CODES:
        return FaultKind.OUT_OF_RANGE
    if code in UNKNOWN_CODES:
        return FaultKind.UNKNOWN_TOPIC
    if code in _AUTHORIZATION_CODES:
        return FaultKind.REFUSED
    if code in _UNREACHABLE_CODES or code in _AUTHENTICATION_CODES:
        return FaultKind.UNREACHABLE
    return FaultKind.OTHER


def configuration_error(error: KafkaException | ValueError | TypeError) -> MarshalError:
    """librdkafka would not build a client from these settings, or got no token to build it with."""
    text = kafka_error(error).str() if isinstance(error, KafkaException) else str(error)
    if isinstance(error, KafkaException) and is_refusal(kafka_error(error)):
        return AuthenticationError(
            f"The Kafka client could not be made: {text}. Nothing was sent. Look in the log for what oauth_cb raised, "
            "correct it or the service that it asks, and try again."
        )
    return ConfigurationError(
        f"The Kafka client does not accept the configuration: {text}. Nothing was sent; correct config."
    )


def marshal_error(
    error: KafkaException | KafkaError,
    doing: str,
    bootstrap_servers: str,
    troubles: Troubles | None = None,
    *,
    changing: bool = False,
    needs: str = "",
) -> MarshalError:
    """The error to raise for a call that failed; doing completes "While …"; changing: it did not only ask.

    needs: the right that it takes, as ``rights.grant`` says it; a ForbiddenError knows better.
    """
    cause = kafka_error(error) if troubles is None else troubles.without_secrets(kafka_error(error))
    code = cause.code()
    reason = troubles.recent() if troubles is not None else None
    if code in _FORBIDDEN_CODES:
        lacking = error.needs if isinstance(error, ForbiddenError) else needs
        return AuthorizationError(
            f"While {doing}: the cluster forbids it ({cause.str().rstrip('.')}). Nothing was changed by this call. "
            f"{lacking or 'docs/security.md has the rights of each role; ask for those that are missing'}."
        )
    found = reach(bootstrap_servers) if code in _UNREACHABLE_CODES else {}
    reached = best(list(found.values()))
    for refusal in (cause, reason):
        if refusal is not None and (is_refusal(refusal) or (_wrong_protocol(refusal) and reached is Reached.ANSWERS)):
            return AuthenticationError(
                f"While {doing}: the connection to {bootstrap_servers} was refused ({refusal.str()}). "
                "Nothing was read or written. Check security.protocol, the ssl.* and sasl.* settings and that "
                "the port is the listener for that protocol."
            )
    if code in _UNREACHABLE_CODES:
        how = [f"{address} {each}" for address, each in found.items() if each is not Reached.ANSWERS]
        # Of one that is silent, librdkafka knows what was before, or guesses.
        why = [] if reached is Reached.SILENT else [_without_guess(reason.str() if reason is not None else cause.str())]
        known = "Whether it took place is not known, look before you try again" if changing else "Nothing was changed"
        return KafkaUnavailableError(
            f"While {doing}: no answer from {bootstrap_servers} in time ({'; '.join(how + why)}). {known}; leases that "
            f"can't be confirmed end by themselves. {reached.advice}."
        )
    if code in RETRY_CODES or cause.retriable():
        return KafkaUnavailableError(
            f"While {doing}: the brokers were not ready in time ({cause.str()}). Nothing is lost; try again. "
            "If it lasts, look for partitions without a leader."
        )
    return MarshalError(
        f"While {doing}: Kafka answered {cause.name()} ({cause.str()}). No record was lost by this; "
        "the broker's log may say more."
    )


def _without_guess(text: str) -> str:
    """A line of librdkafka, less what it takes the reason for: no broker of today is older than 0.10."""
    return _GUESS.sub("", _SILENT.sub(_UNANSWERED, text))


def _wrong_protocol(error: KafkaError) -> bool:
    """The broker hung up in the handshake, for which there is no code.

    That is how a listener of another protocol looks. For a moment it is also how a broker looks that goes down, so a
    reader takes it for an outage like any other; only a call that failed says what it suspects.
    """
    text = error.str()
    return error.code() == KafkaError._TRANSPORT and (_HANDSHAKE in text or _HUNG_UP in text)
