"""What commands are given: the common options, times and spans, positions, and names, which the shell can complete."""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from kafka_marshal.cli.failures import NO, WRONG_USE, CommandError
from kafka_marshal.observe.text import (
    LogNames,
    clients_of,
    is_absolute,
    names_of,
    near,
    no_group,
    parse_span,
    parse_time,
    span,
    time_text,
)
from kafka_marshal.secret import values_of, visible
from kafka_marshal.topic_names import DEFAULT_TOPIC, is_topic_name
from kafka_marshal.types import F, T

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kafka_marshal.admin import Target
    from kafka_marshal.observe.log import Source


@dataclass(slots=True)
class Options:
    """The options given before and after the command's name; the latter prevail."""

    bootstrap: str | None = None
    config_file: str | None = None
    topic: str = DEFAULT_TOPIC
    json: bool = False
    debug: bool = False
    timeout: float = 10.0
    #: Of commands that change something.
    yes: bool = False
    dry_run: bool = False
    #: Secrets of the file given with --config: never shown.
    secrets: tuple[str, ...] = ()
    #: Names of the options that were given.
    said: set[str] = field(default_factory=set)
    #: Times that were given: (option, text, ms since 1970).
    times: list[tuple[str, str, int]] = field(default_factory=list)
    #: The message if the command is interrupted at this point.
    if_interrupted: str = "Nothing was changed."

    def connection(self) -> tuple[str, dict[str, str]]:
        """bootstrap.servers and the other properties. Raises CommandError if no cluster was named."""
        properties = read_properties(self.config_file) if self.config_file is not None else {}
        servers = self.bootstrap or properties.get("bootstrap.servers")
        properties.pop("bootstrap.servers", None)
        self.secrets = values_of(properties)
        if not servers:
            raise CommandError(
                "which Kafka? Nothing was done. Say --bootstrap HOST:PORT, set KAFKA_MARSHAL_BOOTSTRAP, or put "
                "bootstrap.servers into the file given with --config. (kafka-marshal broker starts one to try with.)",
                WRONG_USE,
            )
        return servers, properties

    def source(self) -> Source:
        """Where the log is read from. It does not connect yet."""
        from kafka_marshal.observe.log import Source

        return Source(self.topic, self.timeout, self.connection)

    def reach(self, *, topic: bool = True) -> str:
        """The options for the same cluster (and topic), for suggested commands."""
        words = ["--bootstrap", self.bootstrap] if self.bootstrap else []
        words += ["--config", self.config_file] if self.config_file else []
        words += ["--topic", self.topic] if topic and self.topic != DEFAULT_TOPIC else []
        return "".join(f" {shlex.quote(word)}" for word in words)


def read_properties(path: str) -> dict[str, str]:
    """key=value lines, as Kafka's own tools and kcat read them; # and ! begin comments.

    Raises CommandError, which names the line but never its value: it may be a password.
    """
    text = read_text(path, "--config")
    properties: dict[str, str] = {}
    for line_number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise CommandError(
                f"--config {path}, line {line_number}: not of the form property=value. Nothing was done.", WRONG_USE
            )
        properties[key.strip()] = value.strip()
    return properties


def read_text(path: str, option: str) -> str:
    """The text of a file: UTF-8, or UTF-16 with a byte order mark. Raises CommandError."""
    try:
        raw = Path(path).read_bytes()
        is_utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = raw.decode("utf-16" if is_utf16 else "utf-8-sig")
    except OSError as error:
        raise CommandError(f"{option} {path}: {error.strerror}. Nothing was done.", WRONG_USE) from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise CommandError(
            f"{option} {path}: is neither UTF-8 text nor UTF-16 text with a byte order mark. Nothing was done. Save it "
            "as UTF-8.",
            WRONG_USE,
        )
    return text


def keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """The callback that stores the value in the options, if one was given here."""
    options = context.ensure_object(Options)
    if parameter.name == "topic" and isinstance(value, str) and not is_topic_name(value):
        raise click.BadParameter(f"no topic can be called {value!r}. Nothing was sent", context, parameter)
    if value is not None and value is not False:
        setattr(options, str(parameter.name), value)
        options.said.add(str(parameter.name))


_PATH = click.Path(dir_okay=False)

#: (declarations, attributes). The environment is read at the top only, or it would override an option there.
_COMMON: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--bootstrap", "bootstrap"),
        {
            "metavar": "HOST:PORT,…",
            "envvar": "KAFKA_MARSHAL_BOOTSTRAP",
            "help": "Kafka brokers to begin with (or KAFKA_MARSHAL_BOOTSTRAP).",
        },
    ),
    (
        ("--config", "config_file"),
        {"type": _PATH, "metavar": "FILE", "help": "librdkafka properties, key=value lines (TLS, SASL, …)."},
    ),
    (("--topic", "topic"), {"metavar": "NAME", "help": f"Coordination topic ({DEFAULT_TOPIC})."}),
    (
        ("--timeout", "timeout"),
        {"type": click.FloatRange(min=0.1), "metavar": "SECONDS", "help": "How long to wait for a broker (10)."},
    ),
    (("--json", "json"), {"is_flag": True, "help": "For programs: JSON on standard output."}),
    (
        ("--debug", "debug"),
        {"is_flag": True, "envvar": "KAFKA_MARSHAL_DEBUG", "help": "Show tracebacks and the client's log."},
    ),
)

_COMMON_NAMES = frozenset(names[1] for names, _ in _COMMON)


def common_options(top: bool = False) -> Callable[[F], F]:
    """Adds the common options, unless a command has its own. `top`: for the root, which reads the environment."""

    def add(function: F) -> F:
        own = {name for each in getattr(function, "__click_params__", ()) for name in each.opts}
        for names, attributes in reversed(_COMMON):
            if names[0] in own:
                continue
            said = {k: v for k, v in attributes.items() if top or k != "envvar"}
            function = click.option(*names, **said, expose_value=False, callback=keep)(function)
        return function

    return add


class Command(click.Command):
    """A command whose help lists its own options before the common ones."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; first print how its times were parsed."""
        say_times(ctx.ensure_object(Options))
        return super().invoke(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        r"""Docstrings are raw strings: their ``\b`` is click's mark for a paragraph that keeps its lines."""
        if self.help is not None:
            self.help: str = self.help.replace("\\b\n", "\b\n")
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write two sections."""
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if line is not None:
                (common if parameter.name in _COMMON_NAMES or parameter.name == "help" else own).append(line)
        for title, lines in (("Options", own), ("Common options", common)):
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


#: What click calls with an option's text.
Parsed = Callable[[click.Context, click.Parameter, str | None], T | None]


def parsed(parse: Callable[[Options, str, str], T], hint: str = "") -> Parsed[T]:
    """The callback of an option with a value: parse(options, the option's name, text), which may raise ValueError.

    hint: follows the error's text.
    """

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return parse(context.ensure_object(Options), parameter.opts[0], value)
        except (ValueError, OverflowError) as error:
            raise click.BadParameter(f"{error}{hint}", context, parameter) from None

    return callback


def read_time(options: Options, option: str, text: str, *, moves: bool = False) -> int:
    """Milliseconds since 1970. Times that depend on now or on this machine's zone are noted. Raises ValueError."""
    now_ms = int(time.time() * 1000)
    found = parse_time(text, now_ms, moves=moves)
    if not is_absolute(text):
        options.times.append((option, text, found))
    return found


#: A span of time (ms).
span_option: Parsed[int] = parsed(lambda _, __, text: parse_span(text))

#: A time (ms since 1970).
time_option: Parsed[int] = parsed(read_time)


def times_json(options: Options) -> list[dict[str, object]]:
    """The noted times as JSON."""
    return [{"option": option, "text": text, "time": at} for option, text, at in dict.fromkeys(options.times)]


def say_times(options: Options) -> None:
    """Print the noted times on standard error. Not with --json."""
    if options.json:
        return
    now_ms = time.time() * 1000
    for option, text, moment in dict.fromkeys(options.times):
        if moment <= now_ms:
            click.echo(visible(f"{option} {text} is {time_text(moment)}, {span(now_ms - moment)} ago"), err=True)


# -- positions -----------------------------------------------------------------------------------------------

_PLACE = re.compile(r"(?P<topic>[^:]+):(?P<partition>[0-9]{1,10}):(?P<offset>[0-9]{1,19})")
_TOPIC_PARTITION = re.compile(r"(?P<topic>[^:]+):(?P<partition>[0-9]{1,10})")

_PARTITION = re.compile(r"(?P<topic>[^:=]+)(?::(?P<partition>[0-9]+))?(?:=(?P<position>.+))?")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def place_option(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, int, int]:
    """The callback of a message: its topic, partition and offset."""
    found = _PLACE.fullmatch(value)
    if found is None:
        raise click.BadParameter(
            f"{value!r} is not of the form TOPIC:PARTITION:OFFSET, such as flights:3:1200", context, parameter
        )
    return found["topic"], int(found["partition"]), int(found["offset"])


def places_option(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, int, int], ...]:
    """The callback of several messages."""
    return tuple(place_option(context, parameter, value) for value in values)


def topic_partitions(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, int], ...]:
    """The callback of several partitions."""
    return tuple(map(topic_partition, values))


def topic_partition(value: str) -> tuple[str, int]:
    """A partition. Raises click.BadParameter."""
    match = _TOPIC_PARTITION.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not of the form TOPIC:PARTITION, such as flights:3")
    return match["topic"], int(match["partition"])


@dataclass(frozen=True, slots=True)
class PartitionTarget:
    """One --partition. partition None: all of the topic; position None: that of --to."""

    topic: str
    partition: int | None
    position: Target | None


#: The broker's clock may be ahead of this machine's by this much.
_AHEAD_MS = 60_000


def _position(options: Options, option: str, text: str) -> Target:
    """earliest, latest, readable, an offset, or a time. Raises ValueError."""
    if text in ("earliest", "latest", "readable"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    now_ms = int(time.time() * 1000)
    moment = read_time(options, option, text, moves=True)
    if moment > now_ms + _AHEAD_MS:
        raise ValueError(f"{text!r} is in the future: no message is as young as that, and all would be skipped")
    return _EPOCH + timedelta(milliseconds=moment)


#: The callback of --to.
to_option: Parsed[Target] = parsed(_position, " (or earliest, latest, readable, an offset)")


def targets_option(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> list[PartitionTarget]:
    """The callback of --partition."""
    partitions = []
    for value in values:
        found = _PARTITION.fullmatch(value)
        if found is None:
            raise click.BadParameter(
                f"{value!r} is not of the form TOPIC:PARTITION=POSITION, such as flights:3=1200", context, parameter
            )
        number, position = found["partition"], found["position"]
        target = None if position is None else to_option(context, parameter, position)
        partitions.append(PartitionTarget(found["topic"], None if number is None else int(number), target))
    return partitions


def targets_in_file(options: Options, path: str, group: str) -> list[PartitionTarget]:
    """The positions in a file: CSV as of kafka-consumer-groups, or JSON. Raises CommandError, which names the line.

    CSV: topic,partition,offset or group,topic,partition,offset (lines of other groups are ignored). JSON: a list of
    objects with topic, partition and offset (or "after"), by itself or as "partitions", "positions" or "moves" of an
    object. An offset may be any value of --to.
    """
    text = read_text(path, "--from-file")
    found: dict[tuple[str, int], PartitionTarget] = {}
    rows = _json_rows(path, text) if text.lstrip()[:1] in ("[", "{") else _csv_rows(path, text)
    for place, of_group, topic, number, position in rows:
        if of_group not in (None, group):
            continue
        try:
            partition = int(str(number).strip())
            each = PartitionTarget(
                str(topic).strip(), partition, _position(options, "--from-file", str(position).strip())
            )
            if partition < 0 or not each.topic or topic is None:
                raise ValueError("a topic and a partition from 0 on are wanted")
        except (ValueError, OverflowError) as error:
            raise _wrong(path, place, str(error)) from None
        before = found.setdefault((each.topic, partition), each)
        if before != each:
            raise _wrong(path, place, f"{each.topic} [{partition}] stands there twice, with different positions")
    if not found:
        raise _wrong(path, "", f"it has no positions of group {group!r}")
    return list(found.values())


def _wrong(path: str, place: str, why: str) -> CommandError:
    return CommandError(f"--from-file {path}{place and ', ' + place}: {why}. Nothing was changed.", WRONG_USE)


_Row = tuple[str, str | None, Any, Any, Any]


def _csv_rows(path: str, text: str) -> Iterator[_Row]:
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#") or (number == 1 and cells[-1].lower() == "offset"):
            continue
        if len(cells) not in (3, 4):
            raise _wrong(path, f"line {number}", "topic,partition,offset or group,topic,partition,offset are wanted")
        topic, partition, offset = cells[-3:]
        yield f"line {number}", cells[0] if len(cells) == 4 else None, topic, partition, offset


def _json_rows(path: str, text: str) -> Iterator[_Row]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "", f"it is no JSON ({error})") from None
    of_all = found.get("group") if isinstance(found, dict) else None
    if isinstance(found, dict):
        found = next((found[name] for name in ("partitions", "positions", "moves") if name in found), None)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _wrong(path, "", 'a list of objects with "topic", "partition" and "offset" is wanted')
    for number, each in enumerate(found, start=1):
        position = each.get("offset", each.get("after"))
        if position is None:
            raise _wrong(path, f"object {number}", "it has no offset")
        yield f"object {number}", each.get("group", of_all), each.get("topic"), each.get("partition"), position


# -- names of groups, topics and clients: unknown ones are refused, and the shell can complete them ----------

#: A user has pressed Tab and waits: the time for a broker to answer (s),
_COMPLETION_S = 1.5
#: and for the whole log (s).
_LIMIT_S = 2.5


def read_names(options: Options, timeout_s: float, limit_s: float = math.inf) -> LogNames:
    """The names in the log (*blocking*). Raises MarshalError, CommandError; TimeoutError after limit_s."""
    from kafka_marshal.adapters.kafka import KafkaCluster
    from kafka_marshal.node.replica import Begin, Replica

    def check_time(done: int, of_all: int) -> None:
        if time.monotonic() > until:
            raise TimeoutError

    until = time.monotonic() + limit_s
    servers, properties = options.connection()
    cluster = KafkaCluster(servers, properties)
    try:
        replica = Replica(cluster, options.topic, timeout_s, Begin.SNAPSHOT)
        try:
            replica.catch_up(timeout_s, check_time)
            return names_of(replica.worlds.values())
        finally:
            replica.close()
    finally:
        cluster.close()


def refuse_unknown(options: Options, group: str, topic: str | None = None, effect: str = "") -> None:
    """Raise CommandError if the log does not know the group, or no partition of it on that topic (*blocking*).

    effect: what it means for the data.
    """
    refuse_name(read_names(options, options.timeout), group, topic, effect)


def refuse_name(known: LogNames, group: str, topic: str | None, effect: str = "") -> None:
    """The same, with names already read."""
    if group not in known:
        raise CommandError(f"{no_group(group, known)} {effect}".rstrip(), NO)
    if topic is not None and topic not in known[group]:
        hint = near(topic, known[group]) or "."
        raise CommandError(f"group {group!r} never had a partition of topic {topic!r}{hint} {effect}".rstrip(), NO)


# -- completion ----------------------------------------------------------------------------------------------


_Complete: TypeAlias = "Callable[..., list[CompletionItem]]"


def _completion(find: Callable[[Options, click.Context], Iterable[str]]) -> _Complete:
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        import logging

        from click.shell_completion import CompletionItem

        logging.disable(logging.CRITICAL)
        try:
            names = find(context.find_object(Options) or Options(), context)
        except Exception:  # noqa: BLE001  (a line on the terminal would spoil the one that is being typed)
            return []
        return [CompletionItem(name) for name in sorted(set(names)) if name.startswith(incomplete)]

    return complete


def _known(options: Options) -> LogNames:
    return read_names(options, min(options.timeout, _COMPLETION_S), _LIMIT_S)


def _topics(names: LogNames, context: click.Context) -> Iterable[str]:
    group = context.params.get("group")
    return names.get(group, {}) if group in names else {topic for topics in names.values() for topic in topics}


def _clients(names: LogNames, context: click.Context) -> Iterable[str]:
    before = context.params.get("names") or ()  # drain [GROUP] CLIENT
    return clients_of(names, context.params.get("group") or next(iter(before), None))


def _any_topics(options: Options) -> list[str]:
    from kafka_marshal.adapters.kafka import KafkaCluster

    cluster = KafkaCluster(*options.connection())
    try:
        topics = cluster.topics(min(options.timeout, _COMPLETION_S))
    finally:
        cluster.close()
    return [name for name, topic in topics.items() if not topic.internal]


complete_group: _Complete = _completion(lambda options, _: _known(options))
complete_topic: _Complete = _completion(lambda options, context: _topics(_known(options), context))
complete_client: _Complete = _completion(lambda options, context: _clients(_known(options), context))
#: TOPIC:, to be followed by a partition.
complete_place: _Complete = _completion(
    lambda options, context: [f"{topic}:" for topic in _topics(_known(options), context)]
)
#: Any topic of the cluster but its own; and TOPIC: of one, to be followed by a partition and an offset.
complete_any_topic: _Complete = _completion(lambda options, _: _any_topics(options))
complete_topic_colon: _Complete = _completion(lambda options, _: [f"{topic}:" for topic in _any_topics(options)])
