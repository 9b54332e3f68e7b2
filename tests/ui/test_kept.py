"""The file in which the page keeps its history between starts: used if nothing is in doubt, else thrown away."""

from __future__ import annotations

import json
import os
import pickle
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from kafka_marshal.ui import kept, moments
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.folding import merged
from kafka_marshal.ui.kept import KeptIndex
from kafka_marshal.ui.moments import Moment
from rationalizer import World
from rationalizer.dump import DumpReader
from tests.audit.group_logs import random_group_log
from tests.audit.logs import WholeLog, random_log
from tests.ui.story import story

TOPIC_ID = "dG9waWMtaWQtMTIzNDU2Nw"


class Reader:
    """The parts of `Log` that reading a kept file needs, over a log in memory."""

    topic = "__marshal"

    def __init__(self, log: WholeLog, upto: int | None = None, starts: int = 0) -> None:
        self.entries = {cp: entries[:upto] for cp, entries in log.entries.items()}
        self.partitions = log.partitions
        self.starts = {cp: entries[starts][0] if starts else 0 for cp, entries in self.entries.items()}
        self.ends = {cp: entries[-1][0] + 1 for cp, entries in self.entries.items()}

    def read(self, begin: dict[int, int], ends: dict[int, int]) -> Iterator[tuple[int, list[Any]]]:
        for cp, first in begin.items():
            yield cp, [entry for entry in self.entries[cp] if first <= entry[0] < ends[cp]]


def folded(log: WholeLog, upto: int | None = None, history: History | None = None, cps: Any = None) -> History:
    """Fold the log up to this many records of each CP, or what a history has not of it."""
    chosen = range(log.partitions) if cps is None else cps
    found = history or History(log.partitions, {cp: World(cp, log.partitions) for cp in chosen})
    for cp in chosen:
        found.take(cp, [each for each in log.entries[cp][:upto] if each[0] >= found.worlds[cp].next_offset])
    return found


def answers(history: History) -> list[Any]:
    """What the page says of all groups at some moments, of all their partitions, and of what moments."""
    ends = sorted({world.log_time for world in history.worlds.values()})
    begin = min((times[0] for _, times in history.marks.values() if times), default=0)
    at = [Moment(begin + (ends[-1] - begin) * share // 3) for share in range(4)]
    at += [Moment(world.log_time, cp, world.next_offset // 2) for cp, world in sorted(history.worlds.items())]
    found: list[Any] = []
    for name, group in sorted(history.groups.items()):
        found.append(moments.timeline(group, ends[-1]))
        for moment in at:
            found.append(moments.state(history, group, moment))
            found.append(moments.rebalances(history, group, moment, 5))
            found.append(moments.checkpoints(group, moment, 5))
            for which in ("all", "changed", "rejected"):
                found.append(moments.events(history, name, moment, which, None, 40))
            for forward in (True, False):
                found.append(moments.neighbour(history, name, moment, forward=forward))
            found += [moments.detail(history, group, place, moment) for place in sorted(group.keys)[:4]]
    return [without_numbers(each) for each in found]


def without_numbers(found: Any) -> Any:
    return json.loads(json.dumps(found))


def of_story() -> WholeLog:
    reader = DumpReader(iter(story().splitlines(keepends=True)))
    found: dict[int, list[Any]] = {cp: [] for cp in range(reader.header.partitions)}
    for each in reader:
        found[each.partition].append(each[1:])
    return WholeLog(reader.header.partitions, found)


LOGS: dict[str, Callable[[], WholeLog]] = {
    "story": of_story,
    "claims": lambda: random_log(1, 200),
    "groups": lambda: random_group_log(3, 160, 2),
    "more groups": lambda: random_group_log(5, 120, 3),
}


@pytest.mark.parametrize("name", LOGS)
def test_answers_are_the_same_with_a_kept_history_with_a_longer_log_and_in_two_processes(name: str) -> None:
    log = LOGS[name]()
    whole = answers(folded(log))
    resumed = kept.unpack(kept.pack(folded(log, 60)))
    assert answers(folded(log, None, resumed)) == whole
    cps = list(range(log.partitions))
    parts = [kept.unpack(kept.pack(folded(log, 90, cps=cps[begin::2]))) for begin in (0, 1)]
    assert answers(folded(log, None, merged(parts))) == whole, "merged in the middle"
    assert answers(merged([folded(log, cps=cps[::-1][begin::2]) for begin in (0, 1)])) == whole


@pytest.fixture
def log() -> WholeLog:
    return random_log(1, 120)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "page.index"


def said(caplog: pytest.LogCaptureFixture) -> str:
    [line] = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return line


def write(log: WholeLog, path: Path, upto: int = 100) -> History:
    """Keep the history of the first records."""
    index, history = KeptIndex(path), folded(log, upto)
    assert index.load(Reader(log, upto), TOPIC_ID) is None  # type: ignore[arg-type]
    index.save(history)
    return history


def load(log: WholeLog, path: Path | None, topic_id: str = TOPIC_ID, **bounds: int) -> History | None:
    return KeptIndex(path).load(Reader(log, **bounds), topic_id)  # type: ignore[arg-type]


def test_only_what_is_new_is_folded_after_a_restart(log: WholeLog, path: Path) -> None:
    before = write(log, path)
    found = load(log, path)
    assert found is not None
    assert answers(found) == answers(before)
    assert {cp: world.next_offset for cp, world in found.worlds.items()} == {
        cp: entries[99][0] + 1 for cp, entries in log.entries.items()
    }
    assert answers(folded(log, None, found)) == answers(folded(log))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_written_again_only_if_there_is_something_new(log: WholeLog, path: Path) -> None:
    write(log, path)
    index = KeptIndex(path)
    found = index.load(Reader(log), TOPIC_ID)  # type: ignore[arg-type]
    assert found is not None
    before = path.stat().st_ino
    index.save(found)
    assert path.stat().st_ino == before
    index.save(folded(log, None, found))
    assert path.stat().st_ino != before
    assert load(log, path) is not None


def test_what_was_pruned_since_is_still_known(log: WholeLog, path: Path) -> None:
    before = answers(write(log, path))
    found = load(log, path, starts=99)
    assert found is not None
    assert answers(found) == before
    assert {offset for offset, _ in found.starts.values()} == {0}


def test_a_log_that_reaches_further_back_is_folded_again(
    log: WholeLog, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worlds = {cp: World.restore(log.world(cp, 50).snapshot(), log.partitions) for cp in log.entries}
    index, pruned = KeptIndex(path), Reader(log, starts=50)
    assert index.load(pruned, TOPIC_ID) is None  # type: ignore[arg-type]
    index.save(folded(log, 100, History(log.partitions, worlds)))
    assert load(log, path, starts=50) is not None
    assert load(log, path) is None
    assert "reaches further back than when it was written" in said(caplog)


def changed(path: Path, change: Callable[[dict[str, Any], bytes], bytes]) -> None:
    """Change the file, and its checksum with it."""
    line, _, rest = path.read_bytes()[:-32].partition(b"\n")
    header = json.loads(line)
    packed = change(header, rest)
    content = json.dumps(header).encode() + b"\n" + packed
    path.write_bytes(content + xxh3_128_hexdigest(content).encode())


def field(name: str, value: object) -> Callable[[dict[str, Any], bytes], bytes]:
    def change(header: dict[str, Any], packed: bytes) -> bytes:
        if value is None:
            del header[name]
        else:
            header[name] = value
        return packed

    return change


#: A change of the file, and what is said of it.
DOUBTS: dict[str, tuple[Callable[[dict[str, Any], bytes], bytes], str]] = {
    "format": (field("format", "kafka-marshal page index 0"), "its format is 'kafka-marshal page index 0', not"),
    "no format": (field("format", None), "its format is None"),
    "release": (field("release", "0.0.1"), "its release is '0.0.1', not"),
    "code": (field("code", "0" * 32), "its code is '0000"),
    "topic": (field("topic_id", "another"), "its topic_id is 'another', not"),
    "partitions": (field("partitions", 7), "its partitions is 7, not 2"),
    "no offsets": (field("begins", None), "it is no index of a page"),
    "another thing": (lambda header, packed: zlib.compress(pickle.dumps({})), "it is no history"),
    "history": (lambda header, packed: b"\0" * len(packed), "it can't be read (error: Error -3"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_a_file_in_doubt_is_thrown_away(name: str, log: WholeLog, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(log, path)
    change, why = DOUBTS[name]
    changed(path, change)
    assert load(log, path) is None
    line = said(caplog)
    assert line.startswith(f"the page's index: {path}: {why}"), line
    assert line.endswith(". It is not used: the log is folded from its beginning")
    write(log, path.with_name("other"))
    changed(path.with_name("other"), lambda header, packed: packed)
    assert load(log, path.with_name("other")) is not None, "what is changed makes the difference"


def test_another_log_is_recognized(log: WholeLog, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(log, path)
    assert load(log, path, upto=99) is None
    assert "reaches to offset" in said(caplog)
    assert load(log, path, starts=101) is None
    assert "was pruned up to offset" in said(caplog)
    assert load(log, path, starts=100) is None
    assert "has none of the records any more" in said(caplog)
    offset, stamp, value = log.entries[1][99]
    for other in ((offset, stamp + 1, value), (offset, stamp, (value or b"") + b"x")):
        log.entries[1][99] = other
        assert load(log, path) is None
        assert f"offset {offset} of partition 1 is another record" in said(caplog)
    log.entries[1][98:100] = [(offset - 1, stamp, value), (offset + 1, stamp, value)]
    assert load(log, path) is None
    said(caplog)


def test_damage_anywhere_is_found(log: WholeLog, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(log, path)
    whole = path.read_bytes()
    places = [*range(0, len(whole), 97), *range(len(whole) - 40, len(whole))]
    spoilt = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    for each in [*spoilt, *(whole[:at] for at in places), whole + b"x", b"", whole[40:]]:
        path.write_bytes(each)
        assert load(log, path) is None
        assert "it is damaged: its bytes are not those that were written" in said(caplog)


def test_a_file_that_others_can_write_is_not_read(
    log: WholeLog, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(log, path)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert load(log, path) is None
        assert "others may have written it" in said(caplog)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert load(log, path) is None
    assert "others may have written it" in said(caplog)


def test_no_bytes_run_code() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    with pytest.raises(kept.UnpackError, match=r"names posix\.system, which is no part of a history"):
        kept.unpack(zlib.compress(pickle.dumps(Trap())))


def test_it_is_named_by_topic_and_id_and_there_are_not_many(
    log: WholeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kafka-marshal" / "page"
    history = folded(log, 100)
    for number in range(kept.MOST_FILES + 2):
        index = KeptIndex()
        assert index.load(Reader(log, 100), f"{TOPIC_ID}{number}") is None  # type: ignore[arg-type]
        index.save(history)
        os.utime(folder / f"__marshal.{TOPIC_ID}{number}.index", (number, number))
    assert load(log, None, f"{TOPIC_ID}0") is None, "the oldest is gone"
    assert load(log, None, f"{TOPIC_ID}{kept.MOST_FILES + 1}") is not None
    assert len(list(folder.iterdir())) == kept.MOST_FILES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_can_not_be_kept_is_said_once(
    log: WholeLog, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = KeptIndex(path / "no" / "folder")
    assert index.load(Reader(log, 100), TOPIC_ID) is None  # type: ignore[arg-type]
    for _ in range(2):
        index.save(folded(log))
    assert "can't be written: No such file or directory. The next start folds the log from its begin" in said(caplog)
    monkeypatch.setattr(kept, "MOST_BYTES", 100)
    write(log, path)
    assert not path.exists()
    assert "bytes, and at most 100 are kept" in said(caplog)
    assert load(log, path, "") is None
    assert "the broker reports no topic id" in said(caplog)


def test_a_kill_between_any_two_steps_of_writing_leaves_a_whole_file(log: WholeLog, path: Path) -> None:
    write(log, path)
    fork_at, steps = 0, 1
    while fork_at < steps:
        if (child := os.fork()) == 0:  # one process for all would not be killed
            os._exit(killed_at(fork_at, log, path))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9)
        steps += code == 9
        fork_at += 1
        found = load(log, path)
        assert found is not None
        records = {world.next_offset for world in found.worlds.values()}
        assert records in (
            {log.entries[cp][99][0] + 1 for cp in found.worlds},
            {log.entries[cp][-1][0] + 1 for cp in found.worlds},
        )
    assert fork_at >= 6, "these were its steps"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def killed_at(step: int, log: WholeLog, path: Path) -> int:
    """Write the longer history, and end before this step of the file system; 0: there are not as many."""
    index = KeptIndex(path)
    history = index.load(Reader(log), TOPIC_ID)  # type: ignore[arg-type]
    assert history is not None
    folded(log, None, history)
    left, folder = step, str(path.parent)

    def count(event: str, args: object) -> None:
        nonlocal left
        if event == "fcntl.flock" or ((event == "open" or event.startswith("os.")) and folder in str(args)):
            left -= 1
            if left < 0:
                os._exit(9)

    sys.addaudithook(count)
    index.save(history)
    return 0
