"""The protocol's chapters, docs/protocol, as one text."""

from __future__ import annotations

from pathlib import Path

CHAPTERS = sorted((Path(__file__).parents[2] / "docs" / "protocol").glob("*.md"))
PROTOCOL = "\n".join(chapter.read_text(encoding="utf-8") for chapter in CHAPTERS)
