"""`work`: processes that call a handler."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.output import print_json_line, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kafka_marshal.cli.options import Options
    from kafka_marshal.client.rates import TopicPriorities
    from kafka_marshal.ports import Cluster
    from kafka_marshal.runner import Worker


@command()
@click.argument("handler", required=False)
@click.option("--app", metavar="MODULE:NAME", help="A Worker with all settings; options given here prevail.")
@click.option("--group", help="The group to work in.")
@click.option("--topics", help="Topics, with commas between them.")
@click.option("--name", help="Members are NAME-1, NAME-2 … (this machine's name). Unique in the group.")
@click.option("--processes", type=int, help="How many processes (1).")
@click.option("--concurrency", type=int, help="Handlers at a time in each (16).")
@click.option("--dead-letters", metavar="TOPIC", help="For messages whose last try failed. (Else a process ends.)")
@click.option("--park", is_flag=True, default=None, help="Or set them aside in the group's log.")
@click.option("--rate", multiple=True, metavar="[TOPIC=]N", help="At most N tries a second in each. Repeatable.")
@click.option("--priority", multiple=True, metavar="TOPIC=0…9", help="Begins first: 9, as others do. Repeatable.")
@click.option("--drain", type=float, metavar="SECONDS", help="What handlers have to return after SIGTERM (30).")
@click.option("--port", type=int, help="Serve /metrics, /livez, /readyz and /lag of all here.")
@click.option("--host", help="And on this address (127.0.0.1).")
@click.option("--watchdog/--no-watchdog", default=None, help="Beside each process (on, if this system can).")
@click.option("--reload", is_flag=True, default=None, help="Start again when a Python file in this folder changes.")
@click.option("--check", is_flag=True, help="Say what it would do, and what is wrong; claim nothing.")
@click.pass_obj
def work(options: Options, /, handler: str | None, app: str | None, check: bool, **given: Any) -> int:
    r"""Run worker processes that call HANDLER (module:name) for each message, until SIGTERM or Ctrl-C.

    \b
    kafka-marshal work app:handle --group billing --topics orders --processes 4
    """
    worker = _worker(options, handler, app, given)
    if not check:
        options.if_interrupted = "What was in flight comes again."
        return worker.run()
    worker.check()
    problems = _problems(worker, options.timeout)
    if options.json:
        found = {"members": worker.members, "group": worker.group, "topics": [*worker.topics], "problems": problems}
        print_json_line(found)
        return NO if problems else DONE
    say(f"group {worker.group}, topics {', '.join(worker.topics)}, {worker.concurrency} handlers in each process:")
    for line in [*worker.members, *(f"problem: {problem}" for problem in problems)]:
        say(f"  {line}")
    if problems:
        raise CommandError("it would not work. Nothing was started, and nothing claimed.")
    return DONE


def _worker(options: Options, handler: str | None, app: str | None, given: dict[str, Any]) -> Worker:
    import os
    import sys

    from kafka_marshal.runner import Worker
    from kafka_marshal.runner.settings import named

    sys.path.insert(0, os.getcwd())
    found = {name: value for name, value in given.items() if value is not None}
    rate, priority = _rate(found.pop("rate")), _priority(found.pop("priority"))
    settings: dict[str, Any] = {name: found.pop(name) for name in ("dead_letters", "park") if name in found}
    settings |= {} if rate is None else {"rate": rate}
    settings |= {} if priority is None else {"priority": priority}
    if "topics" in found:
        found["topics"] = tuple(name.strip() for name in found["topics"].split(","))
    if handler is not None:
        found["handler"] = handler
    if options.json:
        found["json_logs"] = True
    if app is None:
        for name in ("handler", "group", "topics"):
            if name not in found:
                raise click.UsageError(
                    f"a handler, --group and --topics, or --app: {name} is missing. Nothing was started"
                )
        servers, properties = options.connection()
        return Worker(bootstrap_servers=servers, config=properties, topic=options.topic, settings=settings, **found)
    worker = named("--app", app)
    if not isinstance(worker, Worker):
        raise click.UsageError(f"--app {app}: is a {type(worker).__name__}, not a Worker. Nothing was started")
    if {"bootstrap", "config_file"} & options.said:
        found["bootstrap_servers"], found["config"] = options.connection()
    if "topic" in options.said:
        found["topic"] = options.topic
    return replace(worker, settings={**worker.settings, **settings}, **found)


def _rate(given: Sequence[str]) -> float | dict[str, float] | None:
    """What ``run(rate=…)`` takes, of "100" alone, or of several "orders=100"; None: nothing is given."""
    from kafka_marshal.client.rates import checked_rates

    found: dict[str, float] = {}
    for each in given:
        topic, _, number = each.rpartition("=")
        try:
            found[topic] = float(number)
        except ValueError:
            raise click.UsageError(f"--rate {each}: is not N, or TOPIC=N. Nothing was started") from None
    if len(found) != len(given) or (len(found) > 1 and "" in found):
        raise click.UsageError("--rate: one of all topics, or one for each topic. Nothing was started")
    if not found:
        return None
    rate = found.get("", found)
    checked_rates(rate)
    return rate


def _priority(given: Sequence[str]) -> TopicPriorities | None:
    """What ``run(priority=…)`` takes, of several "backfill=0"; None: nothing is given."""
    from kafka_marshal.client.rates import LEVELS, TopicPriorities

    found = dict(each.rpartition("=")[::2] for each in given)
    if len(found) != len(given) or not all(found) or not set(found.values()) <= set(map(str, range(LEVELS))):
        raise click.UsageError("--priority: TOPIC=0 to TOPIC=9, one for each topic. Nothing was started")
    return TopicPriorities({topic: int(level) for topic, level in found.items()}) if found else None


def _problems(worker: Worker, timeout_s: float) -> list[str]:
    """What would keep it from working, as far as can be seen from here."""
    from kafka_marshal.adapters.kafka import KafkaCluster
    from kafka_marshal.errors import AuthorizationError, ConfigurationError, CoordinationTopicError

    rights = {name: {"READ"} for name in worker.topics if not name.startswith("^")} | {worker.topic: {"READ", "WRITE"}}
    if letters := worker.settings.get("dead_letters"):
        rights[letters] = {"WRITE"}
    problems = []
    cluster = KafkaCluster(worker.bootstrap_servers, worker.config)
    try:
        checks: list[Callable[[], object]] = [worker.handle]
        checks += [partial(_check, cluster, worker, name, rights[name], timeout_s) for name in rights]
        for check in checks:
            try:
                check()
            except (AuthorizationError, ConfigurationError, CoordinationTopicError) as error:
                problems.append(str(error))
    finally:
        cluster.close()
    return problems


def _check(cluster: Cluster, worker: Worker, topic: str, rights: set[str], timeout_s: float) -> None:
    from kafka_marshal.errors import AuthorizationError, ConfigurationError, grant
    from kafka_marshal.node.coordination_topic import check_topic

    if topic == worker.topic:
        check_topic(cluster, topic, timeout_s)
    elif topic not in cluster.topic_info([topic], timeout_s):
        raise ConfigurationError(f"there is no topic {topic!r}, or no right to see it")
    allowed = cluster.operations(topic, timeout_s)
    if missing := sorted(rights - allowed) if allowed is not None and "ALL" not in allowed else []:
        raise AuthorizationError(f"{missing[0]} of {topic!r} is forbidden. {grant(missing[0], 'topic', [topic])}")
