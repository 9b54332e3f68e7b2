"""What keeps packages from being released (`make release` builds and uses real ones)."""

from __future__ import annotations

import gzip
import tarfile
import time
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest

from kafka_marshal.instance import RELEASE
from tests.release.packages import MOST_BYTES, PACKAGES, links, normalize, problems_of

METADATA = f"""Metadata-Version: 2.4
Name: kafka-marshal
Version: {RELEASE}
Description-Content-Type: text/markdown

Text with a [link](https://example.org/), and one [to a part](#part).
"""
NEEDED = ("kafka_marshal/py.typed", "rationalizer/py.typed", "kafka_marshal/ui/static/index.html")


def wheel(folder: Path, metadata: str = METADATA, *more: tuple[str, bytes], leaves_out: str = "") -> Path:
    path = folder / f"kafka_marshal-{RELEASE}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{PACKAGES[-1]}METADATA", metadata)
        for name, content in (*((name, b"") for name in NEEDED if name != leaves_out), *more):
            archive.writestr(name, content)
    return path


def test_a_wheel_that_is_right_has_no_problems(tmp_path: Path) -> None:
    assert list(problems_of(wheel(tmp_path))) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tests/test_x.py", b"", "tests/test_x.py is of no use"),
        ("kafka_marshal/tests/x.py", b"", "kafka_marshal/tests/x.py is of no use"),
        ("flights/run.py", b"", "flights/run.py is of no use"),
        ("kafka_marshal/large", bytes(MOST_BYTES), "bytes, and may have"),
    ],
)
def test_what_belongs_into_no_wheel_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (problem,) = problems_of(wheel(tmp_path, METADATA, (name, content)))
    assert said in problem


@pytest.mark.parametrize("missing", NEEDED)
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    assert list(problems_of(wheel(tmp_path, leaves_out=missing))) == [f"{missing} is missing"]


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [
        (f"Version: {RELEASE}", "Version: 0.0.1", "its version is 0.0.1"),
        ("https://example.org/", "docs/redo.md", "the description has the link 'docs/redo.md'"),
        ("text/markdown", "text/plain", "it has no description"),
    ],
)
def test_metadata_that_mislead_are_named(tmp_path: Path, there: str, instead: str, said: str) -> None:
    (problem,) = problems_of(wheel(tmp_path, METADATA.replace(there, instead)))
    assert said in problem


def test_links_of_a_description() -> None:
    assert links("[a](docs/a.md) ![b](b.png) [c](https://c) [d](#d)") == ["docs/a.md", "b.png"]


def test_a_source_package_has_the_same_bytes_whenever_it_was_packed(tmp_path: Path) -> None:
    found = []
    for number, names in enumerate((("b", "a"), ("a", "b"))):
        path = tmp_path / f"{number}.tar.gz"
        with gzip.open(path, "wb") as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uid, member.uname = 1, time.time() + number, number, f"u{number}"
                archive.addfile(member, BytesIO(name.encode()))
        normalize(path, 1_700_000_000)
        found.append(path.read_bytes())
        with tarfile.open(path) as archive:
            assert [(each.name, each.mtime) for each in archive] == [("a", 1_700_000_000), ("b", 1_700_000_000)]
    assert found[0] == found[1]
