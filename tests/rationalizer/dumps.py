"""Random dumps (section 9), valid and damaged: the real replay compared with the oracle."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from rationalizer.dump import (
    DumpError,
    DumpHeader,
    DumpRecord,
    Replay,
    header_line,
    json_of_outcome,
    json_of_state,
    record_line,
)
from tests.rationalizer.oracle.dump import first_bad_line, replay
from tests.rationalizer.strategies import Choose, by_seed, record, write_log

ODD_JSON: tuple[Any, ...] = (None, True, False, 0, 1, 2, 3, -1, 1.0, 1.5, "1", "", [], {}, [1])
ODD_JSON += ("AA==", "AA=", "A", "AAAA=", "AAA=*", "*AAA=", "A AA=", "AA==AA==", "AA==\n", "-_8=", "é", "\x00")


def some_dump(seed: int, upgrade: bool = False) -> list[str]:
    """A dump of three CPs, interleaved, with gaps and now and then an Upgrade to an unknown level."""
    choose = by_seed(seed)
    length = choose((0, 1, 5, 40))
    logs = {cp: write_log(choose, length, cp, 3)[0] for cp in (0, 1, 2)}
    if upgrade and length:
        cp, level = choose((0, 1, 2)), choose((3, 7))
        offset, stamp, _ = logs[cp][length // 2]
        logs[cp][length // 2] = (offset, stamp, record(33, ("a", "1"), "g", level))
    lines = [json.dumps({"topic": "__marshal", "partitions": 3, "format": 1})]
    while any(logs.values()):
        cp = choose([number for number, log in logs.items() if log])
        offset, stamp, value = logs[cp].pop(0)
        text = None if value is None else base64.b64encode(value).decode()
        lines.append(json.dumps({"partition": cp, "offset": offset, "timestamp": stamp, "value": text}))
    return lines


def in_bytes(lines: list[str]) -> list[bytes]:
    """As a file gives them."""
    return [line.encode() + b"\n" for line in lines]


def places(lines: list[str]) -> list[int]:
    """Offsets that --until may name: those in the dump, and the one behind them."""
    offsets = sorted({json.loads(line)["offset"] for line in lines[1:]} | {0})
    return [*offsets, offsets[-1] + 1]


def damaged(choose: Choose) -> list[str]:
    """A dump with one line changed, doubled, removed, moved or inserted."""
    lines = some_dump(choose(range(51)))
    at = choose(range(len(lines)))
    how = choose(("field", "field", "field", "no field", "double", "drop", "swap", "text", "empty"))
    if how in ("field", "no field"):
        item = json.loads(lines[at])
        name = choose(sorted(item))
        if how == "field":
            item[name] = choose(ODD_JSON)
        else:
            del item[name]
        lines[at] = json.dumps(item)
    elif how == "double":
        lines.insert(at, lines[at])
    elif how == "drop":
        del lines[at]
    elif how == "swap":
        lines[at], lines[-1] = lines[-1], lines[at]
    else:
        junk = ("{", "[]", "1", "null", '"x"', lines[at][:-1], lines[at] + "x", "{}", "\x00")
        lines.insert(at, choose(junk) if how == "text" else choose(("", "  ", "\t")))
    return lines


def replay_differs(lines: list[str], until: Mapping[int, int] | None = None) -> str:
    """A difference between the real replay of a whole dump and the oracle's; "" if there is none."""
    outcomes, state, levels = replay(lines, until)
    real = Replay(in_bytes(lines), until=until)
    if [json.loads(json_of_outcome(outcome)) for outcome in real.outcomes()] != outcomes:
        return "its outcomes differ"
    if json.loads(json_of_state(real.state())) != state:
        return "its state after its outcomes differs"
    if dict(real.required_levels) != levels:
        return "the levels that it asks for differ"
    if json.loads(json_of_state(Replay(in_bytes(lines), until=until).state())) != state:
        return "its state differs"
    return ""


def verdict_differs(lines: list[str]) -> str:
    """Whether a dump is rejected at another line than by the oracle, or replayed differently."""
    bad = first_bad_line(lines)
    if bad is None:
        return replay_differs(lines)
    if (line := _refused_at(lambda: list(Replay(in_bytes(lines)).outcomes()))) != bad:
        return f"line {bad} is bad; the outcomes refuse line {line}"
    if (line := _refused_at(lambda: Replay(in_bytes(lines)).state())) != bad:
        return f"line {bad} is bad; the state refuses line {line}"
    return ""


def _refused_at(read: Callable[[], object]) -> int | None:
    try:
        read()
    except DumpError as error:
        return error.line_number
    return None


def written_differs(lines: list[str]) -> str:
    """Whether a dump that is written again is another one."""
    written = [header_line(DumpHeader("__marshal", 3))]
    for line in lines[1:]:
        item = json.loads(line)
        value = None if item["value"] is None else base64.b64decode(item["value"])
        written.append(record_line(DumpRecord(item["partition"], item["offset"], item["timestamp"], value)))
    same = [json.loads(line) for line in written] == [json.loads(line) for line in lines]
    return "" if same else "written anew, it differs"


def dump_differs(seed: int) -> str:
    """A difference from the oracle in a random dump and a damaged one."""
    choose = by_seed(seed)
    lines = some_dump(seed, upgrade=seed % 3 == 0)
    until = {cp: choose(places(lines)) for cp in range(3) if choose((True, False))}
    wrong = replay_differs(lines, until) or written_differs(some_dump(seed)) or verdict_differs(damaged(choose))
    return f"dump {seed}: {wrong}" if wrong else ""
