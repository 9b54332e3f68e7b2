"""Builds the site of the documentation from the Markdown that is there: ``make docs``.

On the site README and the pages of the root are beside those of ``docs/``, so links between the two lose a folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "out" / "docs"
FROM_ROOT = tuple(page.name for page in sorted(ROOT.glob("*.md")))
LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")


def copy_pages(target: Path = PAGES) -> None:
    """All that the site shows, with links as they are there."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in FROM_ROOT:
        shutil.copy(ROOT / name, target / name)
    (target / "README.md").rename(target / "index.md")
    for page in target.rglob("*.md"):
        page.write_text(LINK.sub(partial(_moved, page, target), page.read_text(encoding="utf-8")), encoding="utf-8")


def _moved(page: Path, target: Path, link: re.Match[str]) -> str:
    """The link as it is from where the page stands now; a file that only the clone has is copied to `files/`."""
    name = "README.md" if page == target / "index.md" else page.name
    folder = ROOT if page.parent == target and name in FROM_ROOT else ROOT / "docs" / page.parent.relative_to(target)
    aim = (folder / link[2]).resolve()
    if not aim.is_file():
        return link[0]  # the build names it
    if aim.is_relative_to(ROOT / "docs"):
        there = target / aim.relative_to(ROOT / "docs")
    elif aim.parent == ROOT and aim.name in FROM_ROOT:
        there = target / ("index.md" if aim.name == "README.md" else aim.name)
    else:
        there = target / "files" / aim.relative_to(ROOT)
        if there.suffix == ".md":  # it is no page, and its links lead into the clone
            there = there.with_suffix(".txt")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(aim, there)
    up = "../" * len(page.parent.relative_to(target).parts)
    return f"{link[1]}{up}{there.relative_to(target)}{link[3]}"


def build() -> subprocess.CompletedProcess[str]:
    """The site in ``out/site``; any warning, such as a link that leads nowhere, fails."""
    copy_pages()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    done = build()
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)
