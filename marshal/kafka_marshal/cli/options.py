"""The common options, before or after a command's name, and the librdkafka properties from them."""

from __future__ import annotations

import codecs
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kafka_marshal.cli.failures import WRONG_USE, CommandError
from kafka_marshal.logs import visible
from kafka_marshal.observe.text import is_absolute, parse_span, parse_time, span, time_text
from kafka_marshal.secret import values_of
from kafka_marshal.topic_names import DEFAULT_TOPIC, is_topic_name

if TYPE_CHECKING:
    from kafka_marshal.observe.log import Source

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(slots=True)
class Options:
    """The options given before and after the command's name; the latter prevail."""

    bootstrap: str | None = None
    config_file: str | None = None
    topic: str = DEFAULT_TOPIC
    json: bool = False
    debug: bool = False
    timeout: float = 10.0
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


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Store the value in the options, if one was given here."""
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


def common_options(top: bool = False) -> Callable[[_F], _F]:
    """Adds the common options, unless a command has its own. `top`: for the root, which reads the environment."""

    def add(function: _F) -> _F:
        own = {name for each in getattr(function, "__click_params__", ()) for name in each.opts}
        for names, attributes in reversed(_COMMON):
            if names[0] in own:
                continue
            said = {k: v for k, v in attributes.items() if top or k != "envvar"}
            function = click.option(*names, **said, expose_value=False, callback=_keep)(function)
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


def span_option(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The callback of an option that is a span of time: its milliseconds."""
    if value is None:
        return None
    try:
        return parse_span(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


def time_option(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The callback of an option that is a time: its milliseconds since 1970."""
    if value is None:
        return None
    try:
        return read_time(context.ensure_object(Options), parameter.opts[0], value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


def read_time(options: Options, option: str, text: str, *, moves: bool = False) -> int:
    """Milliseconds since 1970. Times that depend on now or on this machine's zone are noted. Raises ValueError."""
    now_ms = int(time.time() * 1000)
    found = parse_time(text, now_ms, moves=moves)
    if not is_absolute(text):
        options.times.append((option, text, found))
    return found


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
