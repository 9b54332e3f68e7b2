"""``python -m tests.mutants``: all planted bugs, a table, and a line of figures; exit 0 if all were caught."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from kafka_marshal.testing.simulate import where_it_ran
from tests.mutants import MUTATIONS, Mutation
from tests.mutants.drawn import draw
from tests.mutants.runner import CONTROL, ROOT, Row, as_json, drawable, run_all, table, write_report

#: Processor seconds for each; the product itself, which runs everything, needs 120 to 200 on two shared cores.
BUDGET_S = 300


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="names, or parts of them, with commas between them")
    parser.add_argument("--some", type=int, metavar="N", help="N that were caught last, by chance (--seed)")
    parser.add_argument("--budget", type=int, default=BUDGET_S, help=f"processor seconds for each ({BUDGET_S})")
    parser.add_argument("--jobs", type=int, default=2, help="side by side (2)")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--report", type=Path, help="a page with marks for the table: docs/reliability.md")
    parser.add_argument("--list", action="store_true", help="say what would be planted, and nothing else")
    parser.add_argument(
        "--try",
        dest="own",
        nargs=3,
        metavar=("FUNCTION", "OLD", "NEW"),
        help="a bug of your own: the function it stands in (or Class.function), the line without its indentation, and "
        "what stands there instead",
    )
    parser.add_argument("--draw", type=int, metavar="N", help="N lines of rules and engine, by chance (--seed)")
    parser.add_argument("--seed", type=int, default=0, help="for --some and --draw (0)")
    parser.add_argument("short", nargs="*", help="for tests.mutants.short, after --: -- --seeds 200")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[Mutation]:
    if options.own:
        at, old, new = options.own
        return [Mutation("your own", at, old, new, "?")]
    if options.draw:
        return draw(ROOT, options.draw, options.seed)
    parts = [part.strip() for part in options.only.split(",") if part.strip()]
    found = [x for x in MUTATIONS if not parts or any(part in x.name for part in parts)]
    if options.some is None:
        return found
    can_be_caught = drawable()
    return Random(options.seed).sample([x for x in found if x.name in can_be_caught], options.some)


def _figures(rows: Sequence[Row], seconds: float) -> str:
    bugs = [row for row in rows if row.name != CONTROL]
    caught = Counter(row.by for row in bugs if row.by)
    core = sum(row.file.startswith(("rationalizer/", "marshal/kafka_marshal/engine/")) for row in bugs)
    by = ", ".join(f"{count} by {name}" for name, count in caught.most_common())
    slowest = max((row.seconds for row in bugs if row.by), default=0.0)
    control = "passes" if all(row.is_right for row in rows if row.name == CONTROL) else "DOES NOT PASS"
    return (
        f"{len(bugs)} planted bugs ({core} in rules and engine), {sum(caught.values())} caught ({by}), the slowest "
        f"after {slowest:.0f} s of a processor; the product itself {control}; {seconds:.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all were caught and the product passes."""
    options = _options(arguments)
    chosen = _chosen(options)
    if options.list or not chosen:
        print("\n".join(f"{x.rule:4} {x.name:58} {x.file}\n       - {x.old}\n       + {x.new}" for x in chosen))
        return 0 if chosen else 2
    began, rows = time.monotonic(), list[Row]()
    for row in run_all(chosen, options.short, options.budget, options.jobs, whole=len(chosen) == len(MUTATIONS)):
        rows.append(row)
        print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    figures = _figures(rows, time.monotonic() - began)
    print(f"{table(rows)}\n\n{figures}")
    origin = where_it_ran()
    if options.json is not None:
        about = {
            **origin,
            "budget_s": options.budget,
            "short": options.short,
            "figures": figures,
        }
        options.json.write_text(as_json(rows, **about), encoding="utf-8")
    if options.report is not None:
        where = f"Commit {origin['commit']}, {origin['cores']} cores, Python {origin['python']}: {figures}."
        write_report(options.report, rows, where)
    return int(not all(row.is_right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
