"""`make test-lowest`, `test-newest`, `test-kafka`: the tests that touch a dependency, with another release of it.

Lowest is what setup.cfg allows; newest is what the index has within that. All others are as constraints.txt pins them.
Spark is apart (`make spark`): it brings 430 MB.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kafka_marshal.testing import jars
from tests.release.packages import ROOT

EXTRAS = ("cli", "delta", "opentelemetry", "postgres", "prometheus", "simulation", "test", "ui")

#: What those of our tests need that no extra brings.
MORE = ("aiosqlite", "django", "packaging", "pymysql", "pytest-xdist", "PyYAML", "sqlalchemy[asyncio]")

#: Released together with one that is named in setup.cfg.
WITH = {
    "opentelemetry-sdk": "opentelemetry-api",
    "opentelemetry-semantic-conventions": "opentelemetry-api",
    "psycopg-binary": "psycopg",
}

#: Where Kafka's client, the codec and the extras above are used, and not Spark.
TESTS = (
    *("admin", "cli", "client", "contract", "metrics", "rationalizer"),
    *("release", "sinks", "snapshots", "ui", "watchdog"),
)

#: Where the broker is.
OF_A_BROKER = ("admin", "client", "contract", "security", "snapshots", "watchdog")


def main() -> int:
    """Make the environment, say what is in it, and run the tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.versions", description=__doc__)
    parser.add_argument("which", help="lowest or newest; or the release of the broker, such as 4.0.2")
    parser.add_argument("tests", nargs="*", help="what pytest is given (the folders that touch a dependency)")
    chosen = parser.parse_args()
    if chosen.which[0].isdecimal():
        return with_kafka(chosen.which, chosen.tests or [f"tests/{name}" for name in OF_A_BROKER])
    folder = ROOT / f".venv-{chosen.which}"
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pins = folder / "constraints.txt"
    pins.write_text("\n".join(pinned(chosen.which)))
    said = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_CONSTRAINT", "PYTHON"))}
    wanted = [f".[{','.join(EXTRAS)}]", *MORE]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-qq", "-c", str(pins), *wanted], cwd=ROOT, env=said, check=True)
    subprocess.run([*pip, "uninstall", "-qq", "-y", "kafka-marshal"], env=said, check=True)  # the checkout is tested
    subprocess.run([*pip, "install", "-qq", "--no-deps", "--editable", "."], cwd=ROOT, env=said, check=True)
    frozen = subprocess.run([*pip, "freeze"], env=said, check=True, capture_output=True, text=True).stdout
    names = {each.name for each in required()}
    print(", ".join(x for x in frozen.splitlines() if canonicalize_name(x.split("==")[0]) in names), flush=True)
    return run(python, "not campaign and not slow", chosen.tests or [f"tests/{name}" for name in TESTS], said)


def run(python: Path, marked: str, tests: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run tests with this interpreter. Returns its status."""
    command = [str(python), "-m", "pytest", "-q", "-m", marked, "-n", "4", "--dist", "loadgroup", *tests]
    return subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=environment, check=False).returncode


def with_kafka(version: str, tests: Sequence[str]) -> int:
    """The tests with a broker, on this release of Kafka."""
    modules = [(*module[:2], version) if module[2] == jars.KAFKA_VERSION else module for module in jars.BROKER_JARS]
    found = jars.resolve(f"kafka-{version}", modules)
    print(f"Kafka {version}", flush=True)
    environment = {**os.environ, "KAFKA_MARSHAL_JARS": str(found[0].parent)}
    return run(Path(sys.executable), "broker and not campaign and not slow", tests, environment)


def required() -> Iterator[Requirement]:
    """What the package and these extras need, but tools of tests."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["install_requires"].splitlines()
    for extra in EXTRAS:
        lines += [] if extra == "test" else parser["options.extras_require"][extra].splitlines()
    for line in lines:
        if line and not line.startswith(("#", "kafka-marshal")):
            found = Requirement(line)
            found.name = canonicalize_name(found.name)
            yield found


def pinned(which: str) -> Iterator[str]:
    """The lines of constraints.txt, with those of our dependencies at the lowest release, or without them."""
    lowest = {each.name: at_least(each) for each in required()}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name = canonicalize_name(re.split(r"[=<>\[ ]", line, maxsplit=1)[0])
        base = WITH.get(name, name)
        if base not in lowest:
            yield line
        elif which == "lowest" and name == base:
            yield f"{name}=={lowest[base]}"


def at_least(requirement: Requirement) -> str:
    """The lowest release that is allowed."""
    found = [each.version for each in requirement.specifier if each.operator == ">="]
    if len(found) != 1:
        raise SystemExit(f"setup.cfg names no lowest release of {requirement.name}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
