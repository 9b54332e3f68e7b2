"""The project's English: phrases that readers stumble over, and what to write instead.

    python -m tests.style [PATH ...] [--counts]

lists each hit with its file and line, in the files below the given paths (without any: in all of them), or the number
of hits of each package. Searched are docstrings, comments, messages of the product, and pages; code is not.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("marshal", "rationalizer", "tests", "benchmarks", "examples", "docs")


@dataclass(frozen=True, slots=True)
class Phrase:
    """What is not written, what is written instead, and where the phrase is right all the same."""

    pattern: str
    instead: str
    #: Text that contains a hit, and is right.
    allowed: str = ""
    #: Folders in which it is a term.
    allowed_in: tuple[str, ...] = ()
    reason: str = ""


PHRASES = (
    Phrase(
        r"told|tell|tells|telling",
        "passed, given, reported, set; says, shows",
        r"tell(?:s|ing)? (?:\w+ ){0,3}(?:apart|from)",
        reason="to tell apart is plain English",
    ),
    Phrase(r"(?:made )?anew", "again, recreated"),
    Phrase(
        r"so (?:many|much|long|often)",
        "at most N, this long, that often",
        r"so (?:many|much|long|often)(?: [\w-]+){0,3} that",
        reason="so many that: a consequence, not a limit",
    ),
    Phrase(r"whoever|whomever", "the caller, a member, a client"),
    Phrase(r"(?:for|to|by|from|than|those|one) who", "the caller, a member, a client; members that"),
    Phrase(
        r"somebody|nobody",
        "another member, no member, no one",
        r": nobody|Nobody, as far",
        reason="an answer of `kafka-marshal who`",
    ),
    Phrase(
        r"(?:is|are|was|were) none",
        "is invalid, is not one",
        r"there (?:is|are|was|were) none",
        reason="plain English",
    ),
    Phrase(r"(?:com(?:e|es|ing)|came) (?:of it |of that )?to nothing", "has no effect"),
    Phrase(r"(?:what|whatever|which) (?:has )?bec(?:omes?|ame) of", "the result of"),
    Phrase(
        r"hand(?:s|ed|ing)? (?:\w+ )?out",
        "delivers",
        allowed_in=("marshal/kafka_marshal/engine/work", "tests/engine", "tests/scripts"),
        reason="the engine's step is named so",
    ),
    Phrase(r"in hand", "in flight; held"),
    Phrase(
        r"(?:go|goes|going|went|gone|live|lives|lived) on",
        "continues",
        r"live on (?:a|the|this|one) |a goes on",
        reason="a picture is live on a terminal; a command of tests/scripts",
    ),
    Phrase(r"look(?:s|ed|ing)? at", "checks, reads, polls"),
    Phrase(
        r"(?:a|an|one|each|every|last|first|next|another|this|second|two|quick|closer) looks?(?! like|-)",
        "check, poll, read",
    ),
    Phrase(r"of (?:ours|theirs|its own|their own|one's own|his own|yours|mine)", "our, its, their own"),
    Phrase(r"his|he|him|himself", "a process is it; a person is they"),
    Phrase(
        r"let(?:s|ting)? (?:\w+ )?go",
        "releases",
        r"lets go flights|let more go out",
        reason="a command of tests/scripts; go out",
    ),
    Phrase(r"where (?:no|nothing|none) .{0,40}?(?:is|are|was|were|answers?|has|have|comes?)|says otherwise", "if no …"),
    Phrase(r"st(?:ands?|ood|anding) still", "pauses, is stuck"),
    Phrase(
        r"wish(?:es|ed)?",
        "claim, request, signal",
        r"must return Wishes",
        reason="the public class",
    ),
    Phrase(r"(?:keeps?|its|last|one's|the|a) wills?(?! be)", "pre-encoded release"),
    Phrase(r"its chance", "its random source"),
    Phrase(r"news", "new records"),
    Phrase(r"as good as", "reuse, counts as"),
    Phrase(r"how late it is", "current log time"),
    Phrase(r"has not the|have not the", "lacks; a state has eight parts"),
    Phrase(r"dooms?|doomed", "is killed there"),
    Phrase(r"aimed at", "target"),
    Phrase(r"let (?:\w+ ){1,2}(?:gather|meet)", "wait to read in one batch; connect before"),
)
_GAP = r"\s+"
_WORDS = [phrase.pattern.replace(" ", _GAP) for phrase in PHRASES]
PATTERN = re.compile(rf"\b(?:{'|'.join(_WORDS)})\b", re.I)
ALLOWED = re.compile("|".join(f"(?:{p.allowed.replace(' ', _GAP)})" for p in PHRASES if p.allowed), re.I)
_SHORT = r"""(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
#: Of a Python file: docstrings; comments, those on lines that follow each other as one; strings, joined as Python does.
TOKEN = re.compile(
    r'(?P<docstring>^ *r?"""(?:\\.|[^\\])*?""")|(?P<long>"""(?:\\.|[^\\])*?""")'
    rf"|(?P<string>{_SHORT}(?:\s*[rf]*{_SHORT})*)|(?P<comment>#[^\n]*(?:\n *#[^\n]*)*)",
    re.M | re.S,
)
JOINT = re.compile(r"[\"'](\s*)[rf]*[\"']")
#: Names of code, and what a program prints, are no prose.
CODE = re.compile(r"``.*?``|`[^`]*`|\]\([^)]*\)|\{[^{}]*\}", re.S)


@dataclass(frozen=True, slots=True)
class Hit:
    """A phrase in a file."""

    path: Path
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.found!r}: {self.instead}"


def files(paths: Iterable[Path] = ()) -> Iterator[Path]:
    """The files with prose, in order; without paths, all of the project's."""
    given = [path.resolve() for path in paths] or [ROOT / top for top in TOPS] + sorted(ROOT.glob("*.md"))
    for path in given:
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (each for each in found if each.suffix in (".py", ".md") and "__pycache__" not in each.parts)


def package(path: Path) -> str:
    """The folder of a file, as hits are counted."""
    return path.parent.relative_to(ROOT).as_posix()


def hits(path: Path) -> Iterator[Hit]:
    """All phrases in a file that are not allowed."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    is_product = name.parts[0] in ("marshal", "rationalizer")
    parts = pages(text) if path.suffix == ".md" else prose(text, messages=is_product)
    for line, part in parts:
        plain = CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), part)
        right = [found.span() for found in ALLOWED.finditer(plain)]
        for found in PATTERN.finditer(plain):
            if any(begin <= found.start() and found.end() <= end for begin, end in right):
                continue
            is_name = found[0].isupper() or found[0].endswith("None") or plain.startswith("(", found.end())
            if is_name:
                continue
            phrase = next(
                each for each, word in zip(PHRASES, _WORDS, strict=True) if re.fullmatch(word, found[0], re.I)
            )
            if name.as_posix().startswith(phrase.allowed_in):
                continue
            at = line + plain.count("\n", 0, found.start())
            yield Hit(path, at, " ".join(found[0].split()), phrase.instead)


def pages(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a page without its code, and without what a program writes into it."""
    block = r"^ *```.*?^ *```|^<!-- [^\n]*begin -->$.*?^<!-- [^\n]*end -->$|^<!-- [\w.]*docs: (?!end).*?docs: end -->$"
    yield 1, re.sub(block, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.M | re.S)


def prose(text: str, *, messages: bool) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings and comments and, if asked for, of other strings with spaces."""
    for token in TOKEN.finditer(text):
        said = token[0]
        if token.lastgroup == "comment":
            said = re.sub(r"^ *#:?", "", said, flags=re.M)
        elif token.lastgroup != "docstring":
            if not messages or said.count(" ") < 2:
                continue
            said = JOINT.sub(r"\1", said)
        yield text.count("\n", 0, token.start()) + 1, said


def counts() -> Counter[str]:
    """Package → its hits."""
    return Counter(package(hit.path) for path in files() for hit in hits(path))


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="*", type=Path)
    parser.add_argument("--counts", action="store_true", help="the number of hits of each package")
    options = parser.parse_args()
    found = [hit for path in files(options.path) for hit in hits(path)]
    if options.counts:
        for name, number in sorted(Counter(package(hit.path) for hit in found).items()):
            sys.stdout.write(f'    "{name}": {number},\n')
    else:
        sys.stdout.write("".join(f"{hit}\n" for hit in found))
    sys.stdout.write(f"{len(found)} hits\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
