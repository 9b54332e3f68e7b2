"""Builds wheel and source package from a commit, the same bytes each time, and looks through them."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata

from kafka_marshal.instance import RELEASE

ROOT = Path(__file__).parents[2]

#: The most bytes of the wheel, which every deploy downloads. A ratchet, as the lines are: 1,500,000 is the aim.
MOST_BYTES = 1_650_000

PACKAGES = ("kafka_marshal/", "rationalizer/", f"kafka_marshal-{RELEASE}.dist-info/")

#: Links of a README that lead nowhere on an index, which has that file alone.
_RELATIVE = re.compile(r"\]\((?!https?://|#)([^)]+)\)")


def commit_of(revision: str) -> str:
    """The commit that this names now."""
    command = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def tree_of(revision: str, folder: Path) -> int:
    """Unpack a commit's files into the folder. Returns its time (s since 1970)."""
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    shown = ["git", "show", "--no-patch", "--format=%ct", revision]
    return int(subprocess.run(shown, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def built(tree: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Wheel and source package of these sources."""
    build(tree, out, epoch)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    normalize(source, epoch)
    return wheel, source


def build(tree: Path, out: Path, epoch: int, *options: str) -> None:
    """Call the build; its messages are shown if it fails."""
    command = [sys.executable, "-m", "build", *options, "--outdir", str(out), str(tree)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    ran = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} has failed:\n{ran.stdout.decode()}")


def normalize(source: Path, epoch: int) -> None:
    """Pack a source package again: in order, without an owner, with one time: setuptools keeps those of its files."""
    packed = BytesIO()
    with (
        tarfile.open(source) as given,
        gzip.GzipFile("", "wb", fileobj=packed, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in sorted(given.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode, member.pax_headers = member.mode & 0o755 | 0o644, {}
            made.addfile(member, given.extractfile(member) if member.isfile() else None)
    source.write_bytes(packed.getvalue())


def problems_of(wheel: Path) -> Iterator[str]:
    """What keeps this wheel from being released."""
    if (size := wheel.stat().st_size) > MOST_BYTES:
        yield f"{wheel.name} has {size:,} bytes, and may have {MOST_BYTES:,}"
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(f"{PACKAGES[-1]}METADATA").decode()
    for name in names:
        if not name.startswith(PACKAGES) or re.search(r"(^|/)(tests|examples|benchmarks|flights)/", name):
            yield f"{name} is of no use to who installs it"
    for needed in ("kafka_marshal/py.typed", "rationalizer/py.typed", "kafka_marshal/ui/static/index.html"):
        if needed not in names:
            yield f"{needed} is missing"
    found = Metadata.from_email(text, validate=True)  # raises for what an index refuses
    if str(found.version) != RELEASE:
        yield f"its version is {found.version}, and the program's {RELEASE}"
    if found.description_content_type != "text/markdown" or not found.description:
        yield "it has no description"
    yield from (f"the description has the link {link!r}, which an index does not have" for link in links(text))


def links(text: str) -> list[str]:
    """Relative links of a description."""
    return _RELATIVE.findall(text)
