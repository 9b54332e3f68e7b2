"""`make release`: wheel and source package in dist/, each step of the proof with its line."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.release import installed as use
from tests.release.packages import build, built, commit_of, problems_of, tree_of


def main() -> int:
    """Build, look through, use; the packages are in the folder only if all of it holds."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="where they go (dist)")
    parser.add_argument("--revision", default="HEAD", help="of this commit (HEAD)")
    parser.add_argument("--only-build", action="store_true", help="install and use nothing")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kafka-marshal-release-") as name:
        folder = Path(name)
        wheel, source = packages(folder, commit_of(chosen.revision))
        if not chosen.only_build:
            uses(folder, wheel, source)
        chosen.out.mkdir(parents=True, exist_ok=True)
        for each in (wheel, source):
            shutil.copy(each, chosen.out)
            say(f"{chosen.out / each.name}, {each.stat().st_size:,} bytes")
    return 0


def packages(folder: Path, commit: str) -> tuple[Path, Path]:
    """Wheel and source package, built twice in different folders."""
    twice = []
    for place in ("one", "another-folder"):
        epoch = tree_of(commit, folder / place)
        twice.append(built(folder / place, folder / f"out-{place}", epoch))
    for one, other in zip(*twice, strict=True):
        if one.read_bytes() != other.read_bytes():
            raise SystemExit(f"{one.name}: two builds of one commit differ")
    say("built twice, the same bytes")
    (wheel, source), _ = twice
    build(source, folder / "out-of-source", epoch, "--wheel")
    if (folder / "out-of-source" / wheel.name).read_bytes() != wheel.read_bytes():
        raise SystemExit("the source package's wheel is another one")
    say("the wheel of the source package is the same")
    if problems := list(problems_of(wheel)):
        raise SystemExit("\n".join(problems))
    say("metadata and contents are right")
    return wheel, source


def uses(folder: Path, wheel: Path, source: Path) -> None:
    """Each in an environment that has nothing but the wheel and the extras that it names."""
    base = use.Installed(folder / "base", wheel)
    base.run("-c", "import kafka_marshal, kafka_marshal.aio, kafka_marshal.sinks; kafka_marshal.Marshal")
    assert "kafka-marshal[cli]" in base.run("-m", "kafka_marshal", "status", fails=2)
    say("installed bare: it imports, and the command names its extra")
    use.types(base)
    say("mypy and pyright see its types")
    for extra, module in use.EXTRAS.items():
        use.Installed(folder / extra, wheel, extra).run("-c", f"import {module}")
        shutil.rmtree(folder / extra)
        say(f"[{extra}] has what it needs")
    whole = use.Installed(folder / "whole", wheel, "demo", "cli", "spark", "test", "ui", "prometheus")
    say(f"{use.helps(whole)} commands explain themselves")
    steps: dict[str, Callable[[], None]] = {
        "the first test, by the pytest plugin": partial(use.first_test, whole),
        "a first worker by README's text, and a Spark job, on kafka-marshal broker": partial(use.first_worker, whole),
        "demo --plain beside the source package's examples": partial(use.demo, whole, source),
    }
    for what, step in steps.items():
        step()
        say(what)


def say(line: str) -> None:
    """One line for each step."""
    print(f"ok: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
