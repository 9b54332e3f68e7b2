"""``python -m tests.campaigns.sinks --records 200000``: fenced sinks with several writers, on SQLite and PostgreSQL.

Exit status: 0 each row once and no rightful owner refused, 1 not (prints what, and the seed), 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kafka_marshal.testing.simulate import where_it_ran
from tests.campaigns.sinks.campaign import Options, run_campaign
from tests.campaigns.sinks.member import Place
from tests.sinks.conftest import running_postgres
from tests.sinks.test_pgbouncer import Pooled

__all__ = ["main"]

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.sinks", description=__doc__)
    parser.add_argument("--records", type=int, default=20_000, help="done in all, at least (20,000)")
    parser.add_argument("--seed", type=int, default=None, help="decides what happens (chance)")
    parser.add_argument("--on", default=",".join(SHARES), help=f"where ({','.join(SHARES)})")
    parser.add_argument("--members", type=int, default=3, help="processes (3)")
    parser.add_argument("--threads", type=int, default=3, help="writing threads of each (3)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    chosen = parser.parse_args(arguments)
    names = [name.strip() for name in chosen.on.split(",")]
    if not set(names) <= SHARES.keys():
        parser.error(f"--on takes {', '.join(SHARES)}")
    seed = chosen.seed if chosen.seed is not None else int.from_bytes(os.urandom(3))
    sys.stderr.write(f"seed {seed}\n")
    found = {}
    memory = Path("/dev/shm")  # no power fails here, and a disk is slow
    where = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as folder, _places(names, Path(folder)) as places:
        for name, place in places.items():
            records = round(chosen.records * SHARES[name] / sum(SHARES[each] for each in names))
            options = Options(records, seed, chosen.members, chosen.threads)
            found[name] = run_campaign(options, place)
            sys.stdout.writelines(f"{name}: {each}\n" for each in found[name].violations[:20])
            sys.stdout.write(f"{name}: {found[name].tell()}\n")
            sys.stdout.flush()
    if chosen.json is not None:
        runs = {
            name: {"seconds": round(each.seconds, 1), "counted": each.counted, "violations": each.violations}
            for name, each in found.items()
        }
        chosen.json.write_text(json.dumps({**where_it_ran(), "seed": seed, "runs": runs}, indent=1) + "\n")
    return int(not all(each.ok for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
