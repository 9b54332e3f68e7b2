"""`audit`: the whole history, replayed in Spark, and its violations."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.archive import archive_option
from kafka_marshal.cli.failures import DONE, NO, UNVOUCHED, WRONG_USE, CommandError
from kafka_marshal.cli.options import complete_group
from kafka_marshal.cli.output import Column, print_json, print_table, say, say_warning, warnings_from_the_library
from kafka_marshal.observe.text import no_group, time_text
from kafka_marshal.secret import visible

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options
    from kafka_marshal.pipeline.audit.findings import AuditViolation, Findings, PartitionFindings
    from kafka_marshal.pipeline.audit.report import LogEnds
    from kafka_marshal.pipeline.audit.sources import AuditSource

_PARTITIONS = (
    Column("partition", right=True),
    Column("records", right=True),
    Column("next offset", right=True),
    Column("digest"),
    Column("segments", right=True),
    Column("snapshots", right=True),
    Column("wrong", right=True),
    Column("vouched for", right=True),
)
_VIOLATIONS = (
    Column("kind", fold=True),
    Column("partition", right=True),
    Column("offset", right=True),
    Column("time"),
    Column("lease", fold=True),
    Column("what", fold=True),
)
_WAITS = (
    Column("waits"),
    Column("count", right=True),
    Column("median ms", right=True),
    Column("max ms", right=True),
)


@command()
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--from-kafka", is_flag=True, help="Audit the coordination topic itself, up to its end as it is now.")
@click.option(
    "--snapshots",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With FILE: the dump of its log of snapshots. Each is checked, and a partition is replayed in parts.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the tables (Parquet) and report.html in this folder; an earlier audit's are replaced at once.",
)
@click.option(
    "--work",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder for what is needed on the way. On a cluster all of its machines must see it, and --out.",
)
@click.option(
    "--group",
    help="Show this group's waits and pictures only; the whole log is audited.",
    shell_complete=complete_group,
)
@archive_option
@click.option("--partitions", type=click.IntRange(min=1), help="How many the log has, where Parquet does not say it.")
@click.option("--master", metavar="URL", help="Where Spark runs: local[4], spark://HOST:PORT … Default: local[*].")
@click.pass_obj
def audit(
    options: Options,
    file: str | None,
    from_kafka: bool,
    snapshots: Path | None,
    out: Path | None,
    work: Path | None,
    group: str | None,
    place: str | None,
    partitions: int | None,
    master: str | None,
) -> int:
    r"""Replay a whole history in Spark and check it: the verdict first, then tables, and a report.

    FILE is a dump (- for standard input), or Parquet of one, as a file or a folder. Every record is replayed by the
    code that workers run, and its result compared with invariants; every stored snapshot is compared with the log.
    With snapshots the parts between them are replayed in parallel.

    \b
    Exit status: 0 no violation; 1 violations, a replay that stopped before an Upgrade, or no such group;
    2 wrong use, or FILE is no log; 3 Kafka not reachable; 4 no violation, but a change could go unnoticed: a hash
    that should be there is not, or records are missing.
    """
    if (file is None) != from_kafka:
        raise click.UsageError("name either a FILE or --from-kafka. Nothing was read.")
    if from_kafka and (snapshots is not None or partitions is not None):
        raise click.UsageError("--snapshots and --partitions go with a FILE; a topic's own are read with it.")
    if place is not None and not from_kafka:
        raise click.UsageError("--archive goes with --from-kafka: it is read beside the log. Nothing was read.")
    options.if_interrupted = "The audit is not complete; it says nothing."
    with ExitStack() as stack:
        stack.enter_context(warnings_from_the_library(options.debug))
        try:
            if out is not None:
                from kafka_marshal.pipeline.audit.audit import check_folder

                check_folder(out)  # before the slow start of Spark
            source, log_ends = _source(options, stack, file, place, snapshots, partitions)
            findings = _run(source, stack, out, work, master, partial(_report, log_ends, group), from_kafka)
            if group is not None and group not in (known := findings.groups()):
                raise CommandError(no_group(group, known), NO)
        except ModuleNotFoundError as error:
            raise _lacks_spark(error) from None
        if options.json:
            report = {"report": str(out / "report.html")} if out is not None else {}
            print_json({**findings.summary(), **report, **({} if out is not None else {"tables": {}})})
        else:
            _print_findings(findings, out, group)
    return NO if not findings.is_clean else UNVOUCHED if findings.unvouched else DONE


def _lacks_spark(error: ModuleNotFoundError) -> Exception:
    if (error.name or "").partition(".")[0] not in ("pyspark", "pyarrow", "matplotlib", "pandas", "numpy"):
        return error
    return CommandError(
        f"the audit needs the package {error.name!r}, which is not installed. Nothing was read. "
        "Install it with: pip install 'kafka-marshal[cli,spark]'",
        WRONG_USE,
    )


def _source(
    options: Options,
    stack: ExitStack,
    file: str | None,
    place: str | None,
    snapshots: Path | None,
    partitions: int | None,
) -> tuple[AuditSource, LogEnds | None]:
    """The log to audit and, if Kafka is reachable, the log ends of the data topics over time."""
    if file is None:
        servers, properties = options.connection()
        from kafka_marshal.pipeline.audit.kafka import KafkaSource

        source = KafkaSource(servers, properties, options.topic, options.timeout, place or "")
        return source, source.log_ends
    from kafka_marshal.pipeline.audit.sources import source_of_file

    path = Path(file)
    if file == "-":
        from tempfile import TemporaryDirectory

        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kafka-marshal-")))
        path = folder / "standard-input"
        with path.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
    return source_of_file(path, snapshots, partitions), None


def _run(
    source: AuditSource,
    stack: ExitStack,
    out: Path | None,
    work: Path | None,
    master: str | None,
    report: Callable[[Findings, Path], object],
    from_kafka: bool,
) -> Findings:
    from kafka_marshal.pipeline.audit.audit import Audit
    from kafka_marshal.pipeline.audit.task import is_spark_running
    from kafka_marshal.pipeline.session import spark_session

    is_ours = not is_spark_running()
    _tell_on_terminal("Starting Spark (some seconds) …")
    settings = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    if is_ours and not from_kafka:  # no record passes the JVM: to compile its code well costs more than it saves
        settings["spark.driver.defaultJavaOptions"] = "-XX:TieredStopAtLevel=1"
    spark = spark_session("kafka-marshal audit", master=master, config=settings, kafka=from_kafka)
    if is_ours:
        stack.callback(spark.stop)
    _tell_on_terminal(f"Replaying {source.name} …")
    audit = stack.enter_context(Audit(source, spark=spark, out=out, work=work))
    return audit.run(None if out is None else report)


def _report(log_ends: LogEnds | None, group: str | None, findings: Findings, path: Path) -> None:
    from kafka_marshal.pipeline.audit.report import write_report

    if group is None or group in findings.groups():
        write_report(findings, path, log_ends, group)


def _tell_on_terminal(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(visible(text), err=True)


# -- what people see ---------------------------------------------------------------------------------------------------


def _print_findings(findings: Findings, out: Path | None, group: str | None) -> None:
    say(findings.verdict)
    for notice in (*findings.unvouched, *findings.notices):
        say_warning(notice)
    if findings.examples:
        say()
        print_table(_VIOLATIONS, map(_violation_row, findings.examples), "Violations")
        left = findings.violation_count - len(findings.examples)
        if left > 0:
            say(f"… and {left:,} more" + ("" if out is None else f", in {out / 'violations'}"))
    say()
    print_table(_PARTITIONS, map(_partition_row, findings.partitions), "Partitions of the log")
    rows = _wait_rows(findings, group)
    if rows:
        say()
        print_table(_WAITS, rows, "How long partitions waited for their next holder")
    if out is not None:
        say()
        say(f"Report: {out / 'report.html'}. Tables (Parquet): {', '.join(findings.tables)}, in {out}.")


def _violation_row(each: AuditViolation) -> tuple[str, ...]:
    lease = (each.group or "-") if each.topic is None else f"{each.group} {each.topic}/{each.topic_partition}"
    when = "-" if each.time_ms is None else time_text(each.time_ms)
    return (each.kind, str(each.partition), str(each.offset), when, lease, each.detail)


def _partition_row(each: PartitionFindings) -> tuple[str, ...]:
    numbers = (each.segments, each.snapshots, each.snapshots_wrong, each.vouched)
    return (str(each.partition), str(each.records), str(each.next_offset), each.digest, *map(str, numbers))


def _wait_rows(findings: Findings, group: str | None) -> list[tuple[str, ...]]:
    """The figures of all leases (of one group) from the table of takeovers."""
    found: list[tuple[str, ...]] = []
    for name, each in findings.waits(group).items():
        found.append((name, str(each["count"]), f"{each['median']:.0f}", str(each["max"])))
    return found
