"""The command accepts each command line of the docs; walked pages show its real output."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest

from kafka_marshal.cli.app import PROGRAM, root
from kafka_marshal.cli.options import Options
from tests.docs.walk import FENCE, ROOT, walk

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Placeholders in the docs for the reader's values.
PLACEHOLDERS = {
    "release_checks:counts": "json:dumps",
    "$id": "48213",
    "CLIENT": "worker-1",
    "DUMP": "log.jsonl",
    "FILE": "file.jsonl",
    "GROUP": "delays",
    "ID": "31",
    "KEY=VALUE": "max_session_timeout_ms=60000",
    "NAME": "delays",
    "OFFSET": "12",
    "PARTITION": "7",
    "TIME": "03:14",
    "TOPIC": "flights",
    "TOPIC:PARTITION": "flights:7",
    "TOPIC:PARTITION:OFFSET": "flights:7:12",
    "TOPIC:PARTITION=earliest": "flights:7=earliest",
}


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """(arguments of kafka-marshal, whether they are to be typed as they are)."""
    blocks = [found[3] for found in FENCE.finditer(text) if found[2] in ("", "console", "bash", "sh", "cron")]
    blocks += re.findall(r"^(?: {4}.*\n)+", text, re.MULTILINE)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if match := re.match(r"(?:\s*\$ |\s*|\*/\d+ \* \* \* \*\s+)kafka-marshal ([a-z].*)", line):
            yield re.split(r" {3,}| #|[|><&;]", match[1])[0], True
    for found in re.findall(r"`kafka-marshal ([a-z][^`]*)`", FENCE.sub("", text)):
        yield re.split(r"[|><&…]", found.replace("\\|", "|"))[0], False


LINES = {(line.strip(), typed) for page in PAGES for line, typed in command_lines(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(("line", "typed"), sorted(LINES))
def test_the_command_takes_what_the_docs_type(
    line: str, typed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A time of day that is still to come is refused where a position would go there.
    monkeypatch.setattr("time.time", lambda: datetime.now(UTC).replace(hour=12).timestamp())
    name, *words = (PLACEHOLDERS.get(word, word) for word in shlex.split(line.replace("[", "").replace("]", "")))
    for word in words:  # files that the line names exist
        if re.search(r"\.(jsonl|json|properties)$", word):
            words[words.index(word)] = str(tmp_path / Path(word).name)
            (tmp_path / Path(word).name).touch()
    with root.make_context(PROGRAM, ["--bootstrap", "localhost:9092", name, *words], obj=Options()) as context:
        command = root.get_command(context, name)
        assert command is not None, f"there is no command {name!r}"
        try:
            command.make_context(name, words, parent=context).close()
        except (click.MissingParameter, click.BadOptionUsage):
            assert not typed  # in running text, a command's name alone is fine


#: The page with a step for Prometheus.
METRICS = "first-hour.md"


@pytest.mark.broker
@pytest.mark.parametrize(
    "page",
    [
        pytest.param("first-hour.md", marks=pytest.mark.timeout(240)),
        pytest.param("checkpoints.md", marks=pytest.mark.timeout(240)),
        # The longest: its waits alone take a minute and a half, and commands start slowly on a busy machine.
        pytest.param("incidents.md", marks=[pytest.mark.campaign, pytest.mark.timeout(600)]),
        pytest.param("migrating.md", marks=[pytest.mark.campaign, pytest.mark.timeout(240)]),
    ],
)
def test_what_a_page_shows_is_what_happens(page: str, kafka_bootstrap: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not on PATH")
    shutil.copytree(ROOT / "docs" / "monitoring", tmp_path, dirs_exist_ok=True)
    has_prometheus = shutil.which("prometheus") is not None and shutil.which("promtool") is not None
    walk(
        ROOT / "docs" / page,
        tmp_path,
        kafka_bootstrap,
        skip=lambda command: not has_prometheus and page == METRICS and _asks(command),
    )


def _asks(command: str) -> bool:
    """Whether a step of METRICS needs Prometheus, or only waits for it."""
    return re.search(r"prometheus|promtool|:9090|sleep 25|hang|--members", command) is not None


def test_targets_and_modules_that_the_docs_name_are_there() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]+)", text, re.MULTILINE)) - targets == set()
    modules = set(re.findall(r"python -m ([\w.]+)", text)) - {"venv", "pip"}
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []
