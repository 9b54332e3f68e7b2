"""`show`: one message of a topic, by its offset, safe for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE
from kafka_marshal.cli.options import complete_topic_colon, place_option
from kafka_marshal.cli.output import fields_of, print_json, say, say_warning
from kafka_marshal.observe.payload import MOST_BYTES, Form, bytes_json, short, shown
from kafka_marshal.observe.text import count, span, time_text

if TYPE_CHECKING:
    from kafka_marshal.admin.stored_message import StoredMessage
    from kafka_marshal.cli.options import Options

_STAMPS = {"create": "by the producer's clock", "append": "by the broker's clock, as it was appended"}


@command()
@click.argument("place", callback=place_option, metavar="TOPIC:PARTITION:OFFSET", shell_complete=complete_topic_colon)
@click.option(
    "--as",
    "form",
    type=click.Choice(["auto", "text", "json", "hex"]),
    default="auto",
    help="How to show the value (auto).",
)
@click.option(
    "--max-bytes",
    "most",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"The most bytes of the value to show ({MOST_BYTES:,}; with --json all).",
)
@click.pass_obj
def show(options: Options, place: tuple[str, int, int], form: Form, most: int | None) -> int:
    r"""One message: its key, headers, value and time.

    `status`, `lag` and `check` name the message that blocks a partition; `dead-letters` names dead letters. Nothing is
    committed, no group is affected, and the coordination topic is not needed. Invisible characters are escaped.

    \b
    Exit status: 0; 1 there is no such message (the next one is named), or it can't be read; 3 no Kafka.
    """
    from kafka_marshal.admin.stored_message import read_message
    from kafka_marshal.cli.connection import connected
    from kafka_marshal.topic_names import is_topic_name

    topic, partition, offset = place
    if not is_topic_name(topic):
        raise click.BadParameter(f"no topic can be called {topic!r}. Nothing was read", param_hint="TOPIC")
    with connected(options) as cluster:
        message = read_message(cluster, (topic, partition), offset, options.timeout)
    if options.json:
        print_json(_json(message, most))
    else:
        _print(message, form, MOST_BYTES if most is None else most)
    return DONE


def _print(message: StoredMessage, form: Form, most: int) -> None:
    say(f"{message.topic} [{message.partition}] offset {message.offset}")
    if message.timestamp is None:
        say("time     none")
    else:
        say(f"time     {time_text(message.timestamp)} ({_STAMPS[message.timestamp_type or 'create']}){_ago(message)}")
    say(f"key      {short(message.key)}")
    for number, (name, header) in enumerate(message.headers):
        say(f"{'headers' if number == 0 else '':7}  {name} = {short(header)}")
    if not message.headers:
        say("headers  none")
    value = shown(message.value, form, most)
    if message.value is None:
        tombstone = " (a tombstone, where the topic is compacted: older messages with this key are removed)"
        say("value    null" + ("" if message.key is None else tombstone))
    else:
        say(f"value    {count(value.size, 'byte')}, as {value.form}")
        for line in value.lines:
            say(line)
    if value.cut:
        say(f"… {count(value.cut, 'more byte')} (--max-bytes {value.size} shows all)")
    if not message.committed:
        say_warning(
            "it belongs to a transaction that was aborted or is not finished: members that read committed messages "
            "(the default) do not get it"
        )


def _ago(message: StoredMessage) -> str:
    import time

    age = time.time() * 1000 - (message.timestamp or 0)
    return f", {span(age)} ago" if age >= 0 else ""


def _json(message: StoredMessage, most: int | None) -> dict[str, object]:
    value = message.value if most is None or message.value is None else message.value[:most]
    return {
        **fields_of(message, "topic topic_partition=partition offset timestamp timestamp_type committed"),
        **bytes_json("key", message.key),
        "headers": [{"name": name, **bytes_json("value", each)} for name, each in message.headers],
        **bytes_json("value", value),
        "value_bytes": None if message.value is None else len(message.value),
        "truncated": value != message.value,
    }
