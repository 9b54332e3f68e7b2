"""The project's English: no phrase of tests/style.py stands in what people read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import style

#: Hits that a folder may still have, to become fewer; all others have none. A file that moves takes its hits with it.
CEILINGS: dict[str, int] = {
    "marshal/kafka_marshal/admin": 23,
    "marshal/kafka_marshal/cli": 10,
    "marshal/kafka_marshal/client": 43,
    "marshal/kafka_marshal/engine": 4,
    "marshal/kafka_marshal/engine/claims": 1,
    "marshal/kafka_marshal/engine/groups": 5,
    "marshal/kafka_marshal/engine/work": 20,
    "marshal/kafka_marshal/observe": 8,
}


def test_no_folder_has_more_phrases_than_it_may() -> None:
    """``python -m tests.style FOLDER`` lists them."""
    found = style.counts()
    assert {name: number for name, number in found.items() if number > CEILINGS.get(name, 0)} == {}


def found_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> list[tuple[int, str]]:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [(hit.line, hit.found) for hit in style.hits(path)]


def test_it_searches_docstrings_comments_and_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        '"""Nobody\nis told."""\n\n# Made\n# anew.\ntold = "goes on"  # somebody: `told`\nraise ValueError(\n'
        '    f"{told} comes to"\n    f" nothing"\n)\n'
    )
    without_messages = [(1, "Nobody"), (2, "told"), (4, "Made anew"), (6, "somebody")]
    assert found_in(tmp_path, monkeypatch, "tests/x.py", source) == without_messages
    assert found_in(tmp_path, monkeypatch, "marshal/x.py", source) == [*without_messages, (8, "comes to nothing")]


def test_it_searches_pages_but_not_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# Nobody\n\n```\nnobody\n```\n\n`anew` so\nmany, so much that\nit can tell them apart. [x](told.md)\n"
    assert found_in(tmp_path, monkeypatch, "docs/x.md", page) == [(1, "Nobody"), (7, "so many")]


def test_terms_are_allowed_where_they_are_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "# A batch is handed out.\n"
    assert found_in(tmp_path, monkeypatch, "marshal/kafka_marshal/engine/work/x.py", source) == []
    assert found_in(tmp_path, monkeypatch, "marshal/kafka_marshal/client/x.py", source) == [(1, "handed out")]


def test_each_exception_has_its_reason() -> None:
    assert [each for each in style.PHRASES if (each.allowed or each.allowed_in) and not each.reason] == []
