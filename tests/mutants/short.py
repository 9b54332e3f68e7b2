"""The short form of the proof, as it is run against each planted bug: in a copy, in a separate process.

Stops at the first thing that is broken and says so in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import kafka_marshal
import rationalizer
from tests.mutants.proofs import Sizes, Unit, units


def _chosen(options: argparse.Namespace) -> list[Unit]:
    """In order; what ``--first`` names comes first, whatever part it belongs to."""
    found = units(Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)}))
    first = [unit for unit in found if unit.name in options.first]
    if options.only:
        return first
    parts = options.parts or list(dict.fromkeys(unit.part for unit in found))
    rest = sorted((unit for unit in found if unit.part in parts), key=lambda unit: parts.index(unit.part))
    return first + [unit for unit in rest if unit not in first]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where something was found, 0 where not."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.short", description=__doc__)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help=f"({field.default})")
    parser.add_argument("--parts", nargs="*", metavar="PART", default=[], help="exhaustive, logs, … (all)")
    parser.add_argument("--first", nargs="*", metavar="UNIT", default=[], help="these run before all others")
    parser.add_argument("--only", action="store_true", help="run nothing but --first")
    parser.add_argument("--list", action="store_true", help="print the names of all units, and what each takes")
    parser.add_argument(
        "--budget", type=int, default=0, help="processor seconds; the process is killed then (0: never)"
    )
    parser.add_argument("--tree", type=Path, help="what is run must come from this folder")
    options = parser.parse_args(arguments)
    for package in (kafka_marshal, rationalizer):
        if options.tree is not None and not Path(package.__file__ or "").is_relative_to(options.tree):
            parser.error(f"{package.__name__} comes from {package.__file__}, not from {options.tree}")
    if options.budget:
        resource.setrlimit(resource.RLIMIT_CPU, (options.budget, options.budget + 1))
    by = name = what = ""
    for unit in _chosen(options):
        began = time.process_time()
        what = unit.found()
        if options.list:
            print(f"{time.process_time() - began:6.2f}  {unit.part:10}  {unit.name}  {what}", flush=True)
        elif what:
            by, name = unit.part, unit.name
            break
    seconds = round(time.process_time(), 1)
    print(json.dumps({"by": by, "unit": name, "what": what, "seconds": seconds}), flush=True)
    return int(bool(by))


if __name__ == "__main__":
    os._exit(main())  # threads that a planted bug has stuck are left behind
