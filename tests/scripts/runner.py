"""Scripts: what is done, ``----``, and what comes of it, as etcd-io/raft's ``testdata`` has them.

A block is comments and command lines, then ``----``, then what the commands print, up to an empty line. What plays
the commands is another module's: `replica.py` for the rules that a replica applies, `members.py` for those of
members, `blocks.py` for messages that wait for a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import unified_diff
from pathlib import Path

FOLDER = Path(__file__).parent
#: By folder ("": those of a replica).
_FOLDERS = ("", "groups", "checkpoints", "sharing", "engine", "transactions")
SCRIPTS = {name: sorted((FOLDER / name).glob("*.txt")) for name in _FOLDERS}
RULE = "----"

#: Plays one command line, and gives what it prints.
Play = Callable[[str], Iterator[str]]


class ScriptError(ValueError):
    """An unknown command: says which, and in which line."""


def played(text: str, play: Play) -> str:
    """The script with what its commands print now in place of what it says they print."""
    done: list[str] = []
    printed: list[str] = []
    in_output = False
    for number, line in enumerate(text.splitlines(), 1):
        if in_output:
            in_output = bool(line)
            if not in_output:
                done.append(line)
        elif line == RULE:
            done += [line, *printed]
            printed, in_output = [], True
        else:
            done.append(line)
            if line and not line.startswith("#"):
                try:
                    printed += play(line)
                except (LookupError, ValueError) as error:
                    raise ScriptError(f"line {number}, {line!r}: {error}") from error
    if printed:
        raise ScriptError(f"the last block has no {RULE}")
    return "\n".join(done).rstrip("\n") + "\n"


def difference(path: Path, says: str, prints: str) -> str:
    """What a script says and what its commands print, where they differ: a diff with the commands around."""
    lines = unified_diff(
        says.splitlines(), prints.splitlines(), "what the script says", "what comes of it", n=8, lineterm=""
    )
    head = f"{path.name}: the commands print something else. If that is meant: pytest tests/scripts --rewrite-scripts"
    return "\n".join([head, *lines])
