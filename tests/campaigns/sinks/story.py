"""Fenced sinks with several writers, on SQLite and PostgreSQL: each row once, and no rightful owner refused."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.campaigns.frame import Result, Say
from tests.campaigns.sinks.campaign import Options, run_campaign
from tests.campaigns.sinks.member import Place
from tests.sinks.conftest import running_postgres
from tests.sinks.test_pgbouncer import Pooled

#: Place → its share of the records.
SHARES = {"sqlite": 0.1, "postgres": 0.45, "pgbouncer": 0.45}


@contextmanager
def _places(names: Sequence[str], folder: Path) -> Iterator[dict[str, Place]]:
    found = {}
    if "sqlite" in names:
        found["sqlite"] = Place("sqlite", str(folder / "campaign.db"))
    if {"postgres", "pgbouncer"}.isdisjoint(names):
        yield found
        return
    with running_postgres("fsync=off", "track_commit_timestamp=on") as postgres:
        if "postgres" in names:
            found["postgres"] = Place("postgres", postgres.dsn(postgres.new_database("repeatable read")))
        if "pgbouncer" in names:
            found["pgbouncer"] = Place("postgres", Pooled(postgres).dsn())
        yield found


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= SHARES.keys():
        raise argparse.ArgumentTypeError(f"one or more of {', '.join(SHARES)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of its command."""
    parser.add_argument("--records", type=int, default=20_000, help="done in all, at least (20,000)")
    parser.add_argument("--on", type=_names, default=",".join(SHARES), help=f"where ({','.join(SHARES)})")
    parser.add_argument("--members", type=int, default=3, help="processes (3)")
    parser.add_argument("--threads", type=int, default=3, help="writing threads of each (3)")


def runs(chosen: argparse.Namespace, _say: Say) -> Iterator[Result]:
    """What the command runs."""
    names = chosen.on
    memory = Path("/dev/shm")  # no power fails here, and a disk is slow
    where = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as folder, _places(names, Path(folder)) as places:
        for name, place in places.items():
            records = round(chosen.records * SHARES[name] / sum(SHARES[each] for each in names))
            found = run_campaign(Options(records, chosen.seed, chosen.members, chosen.threads), place)
            yield Result(name, found.seed, found.violations, found.seconds, counts=Counter(found.counted))
