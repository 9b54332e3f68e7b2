"""A report: one HTML page that opens without a network. The verdict first, then what it rests on.

All texts are escaped, and invisible characters shown: names come from the log, which others write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from kafka_marshal.files import file_beside
from kafka_marshal.secret import visible

__all__ = ["ReportPage"]

_STYLE: Final = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; line-height: 1.3; padding: .8rem 1rem; border-left: .5rem solid; border-radius: .2rem }
h1.good { background: #e6f4ef; border-color: #009e73 }
h1.bad { background: #fbe9e0; border-color: #d55e00 }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
figure { margin: 0 }
img { width: 100%; height: auto }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem }
th, td { text-align: left; padding: .25rem 1.1rem .25rem 0; border-bottom: 1px solid #e2e2e2; vertical-align: top;
  overflow-wrap: anywhere }
th { font-weight: 600; border-color: #999; white-space: nowrap }
td.number, th.number { text-align: right; white-space: nowrap }
pre { background: #f5f5f5; padding: .8rem 1rem; border-radius: .3rem; overflow-x: auto }
figcaption, .note { color: #555; font-size: .93rem }
"""

#: Nothing is loaded or run, whatever a name contains.
_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class ReportPage:
    """A page under construction: each call appends a part. verdict: the headline, green if `good`, else red."""

    def __init__(self, title: str, verdict: str, *, good: bool) -> None:
        self._title = title
        self._parts = [f'<h1 class="{"good" if good else "bad"}">{_text(verdict)}</h1>']

    def heading(self, text: str) -> None:
        """A section begins."""
        self._parts.append(f"<h2>{_text(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Some sentences."""
        self._parts.append(f"<p>{_text(text)}</p>")

    def note(self, text: str) -> None:
        """Some sentences, small."""
        self._parts.append(f'<p class="note">{_text(text)}</p>')

    def bullets(self, lines: Iterable[str]) -> None:
        """A list; nothing if it is empty."""
        items = "".join(f"<li>{_text(line)}</li>" for line in lines)
        if items:
            self._parts.append(f"<ul>{items}</ul>")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Collection[int] = frozenset()
    ) -> None:
        """A table. numbers: indexes of the columns that are aligned to the right. None is shown as a dash."""

        def cells(kind: str, values: Sequence[object]) -> str:
            texts = ["–" if value is None else _text(value) for value in values]
            return "".join(
                f"<{kind}{' class=number' if index in numbers else ''}>{text}</{kind}>"
                for index, text in enumerate(texts)
            )

        body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
        head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
        self._parts.append(f'<div class="wide"><table>{head}<tbody>\n{body}\n</tbody></table></div>')

    def picture(self, image: str, alternative: str, caption: str) -> None:
        """An image, as the data: URL of its bytes. alternative: for readers who cannot see it."""
        self._parts.append(
            f'<figure><img src="{escape(image)}" alt="{_text(alternative)}">\n'
            f"<figcaption>{_text(caption)}</figcaption></figure>"
        )

    def link(self, text: str, address: str) -> None:
        """A link, relative to the page."""
        self._parts.append(f'<p><a href="{escape(address)}">{_text(text)}</a></p>')

    def commands(self, lines: Iterable[str]) -> None:
        """Lines for a shell, as they stand."""
        self._parts.append("<pre>" + "\n".join(map(_text, lines)) + "</pre>")

    def write(self, path: Path) -> None:
        """Write the page; an existing one is replaced at once. Raises OSError."""
        head = (
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{_text(self._title)}</title>\n<style>{_STYLE}</style>"
        )
        body = "\n".join(self._parts)
        text = f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'
        with file_beside(path) as file:
            file.write(text.encode())


def _text(value: object) -> str:
    return escape(visible(str(value)))
