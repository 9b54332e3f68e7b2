"""The database: both guards, all or nothing, and what it says when it can't write."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kafka_marshal.demo import FencedError, SinkError
from kafka_marshal.demo.sink import Sink, create, opened, write_state
from tests.demo.helpers import FakeMessage, ask, messages, row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create(tmp_path / "delays.sqlite")
    return tmp_path / "delays.sqlite"


@pytest.fixture
def sink(path: Path) -> Iterator[Sink]:
    with Sink(path, "worker-1") as opened_sink:
        yield opened_sink


def add(sink: Sink, batch: list[FakeMessage], epoch: int, partition: int = 0) -> int:
    """A batch, as a worker writes it."""
    with sink.transaction() as tx:
        last = tx.fence("flights", partition, epoch)
        written = tx.write(message for message in batch if message.offset() > last)
        tx.set_last("flights", partition, batch[-1].offset())
    return written


def flights_in(path: Path) -> int:
    return int(ask(path, "SELECT coalesce(sum(flights), 0) FROM delays")[0][0])


def test_sums_counts_and_maxima(sink: Sink, path: Path) -> None:
    add(sink, messages([row(dep_delay="5", arr_delay="-7"), row(dep_delay="-3", arr_delay="NA")]), 1)
    add(sink, messages([row(dep_time="NA", dep_delay="NA", arr_delay="NA"), row(origin="JFK", month="12")], 2), 1)
    add(sink, messages([row(dep_delay="11", arr_delay="-9")], 4), 1)
    assert ask(path, "SELECT * FROM delays") == [
        ("UA", "EWR", 1, 4, 1, 3, 13, 11, 2, -16, -7),
        ("UA", "JFK", 12, 1, 0, 1, 0, 0, 1, 0, 0),
    ]


def test_a_maximum_stays_unknown_until_there_is_one_and_is_kept_after(sink: Sink, path: Path) -> None:
    for offset, delay in enumerate(["NA", "-20", "NA"]):
        add(sink, messages([row(arr_delay=delay)], offset), 1)
        expected = None if offset == 0 else -20
        assert ask(path, "SELECT arrival_delay_max FROM delays") == [(expected,)]


def test_rows_that_come_again_are_counted_once(sink: Sink, path: Path) -> None:
    batch = messages([row()] * 5)
    assert add(sink, batch[:3], epoch=7) == 3
    assert add(sink, batch, epoch=9) == 2
    assert add(sink, batch, epoch=9) == 0
    assert flights_in(path) == 5
    assert ask(path, "SELECT first_offset, last_offset, rows, epoch FROM batches ORDER BY 1") == [
        (0, 2, 3, 7),
        (3, 4, 2, 9),
    ]


def test_a_batch_behind_what_is_stored_does_not_move_it_back(sink: Sink, path: Path) -> None:
    """The new holder's batches may be cut elsewhere: the first may end below what the old one had stored."""
    rows = messages([row()] * 10)
    add(sink, rows[:8], epoch=1)
    assert add(sink, rows[:4], epoch=2) == 0
    assert add(sink, rows[4:], epoch=2) == 2
    assert flights_in(path) == 10


def test_an_older_epoch_is_refused_and_changes_nothing(sink: Sink, path: Path) -> None:
    add(sink, messages([row()]), epoch=9)
    with pytest.raises(FencedError, match="epoch 8 is over, 9 has written"):
        add(sink, messages([row()], 1), epoch=8)
    assert flights_in(path) == 1
    assert ask(path, "SELECT epoch, last_offset FROM positions") == [(9, 0)]


def test_the_newer_epoch_fences_before_it_has_written_anything(sink: Sink, path: Path) -> None:
    """Else the old holder could write between the new one's look and its first row."""
    rows = messages([row()] * 2)
    add(sink, rows[:1], epoch=3)
    assert add(sink, rows[:1], epoch=4) == 0
    with pytest.raises(FencedError):
        add(sink, rows[1:], epoch=3)
    assert flights_in(path) == 1


def test_partitions_do_not_fence_each_other(sink: Sink, path: Path) -> None:
    add(sink, messages([row()]), epoch=9, partition=0)
    add(sink, messages([row()]), epoch=2, partition=1)
    assert flights_in(path) == 2


def test_a_transaction_is_all_or_nothing(sink: Sink, path: Path) -> None:
    add(sink, messages([row()]), epoch=1)
    before = (flights_in(path), ask(path, "SELECT * FROM positions"), ask(path, "SELECT * FROM batches"))
    with pytest.raises(ValueError):
        add(sink, [*messages([row()] * 3, 1), FakeMessage(4, b"no flight")], epoch=2)
    assert (flights_in(path), ask(path, "SELECT * FROM positions"), ask(path, "SELECT * FROM batches")) == before
    assert add(sink, messages([row()] * 3, 1), epoch=2) == 3  # the connection is usable as before


def test_a_writer_that_is_killed_leaves_nothing_behind(path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kafka_marshal.demo.sink import Sink\n"
        "from tests.demo.helpers import messages, row\n"
        "with Sink(Path(sys.argv[1]), 'w').transaction() as tx:\n"
        "    tx.fence('flights', 0, 5); tx.write(messages([row()] * 100)); tx.set_last('flights', 0, 99)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=root, check=False, timeout=60)
    assert done.returncode == -9
    with Sink(path, "worker-2") as other:
        assert add(other, messages([row()] * 100), epoch=4) == 100
    assert flights_in(path) == 100


def test_a_full_disk_names_the_file_and_rolls_back(sink: Sink, path: Path) -> None:
    """SQLite's own limit stands for the disk's: the same error on the same way."""
    add(sink, messages([row()]), epoch=1)
    [(pages,)] = sink.connection.execute("PRAGMA page_count").fetchall()
    sink.connection.execute(f"PRAGMA max_page_count = {pages}")
    many = messages([row(carrier=f"C{number}", month=str(number % 12 + 1)) for number in range(2_000)], 1)
    with pytest.raises(SinkError, match="is full") as caught:
        add(sink, many, epoch=1)
    text = str(caught.value)
    assert str(path) in text
    assert "rolled back and is not done: nothing is lost" in text
    assert flights_in(path) == 1
    # With room again, the same connection goes on where it was.
    sink.connection.execute("PRAGMA max_page_count = 100000")
    assert add(sink, many, epoch=1) == 2_000
    assert flights_in(path) == 2_001


def test_a_database_that_may_not_be_written_says_so(path: Path) -> None:
    with closing(opened(path, "ro")) as read_only, Sink(path, "worker-1") as sink:
        writable, sink.connection = sink.connection, read_only
        writable.close()
        with pytest.raises(SinkError, match=r"delays.sqlite: it may not be written .*nothing is lost"):
            add(sink, messages([row()]), epoch=1)
    assert flights_in(path) == 0


def test_a_database_that_is_locked_for_long_says_so(sink: Sink, path: Path) -> None:
    sink.connection.execute("PRAGMA busy_timeout = 50")
    with closing(opened(path, "rw")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SinkError, match="locked"):
            add(sink, messages([row()]), epoch=1)
        other.execute("ROLLBACK")
    assert add(sink, messages([row()]), epoch=1) == 1


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="can't be opened"):
        Sink(tmp_path / "delays.sqlite", "worker-1")
    assert not (tmp_path / "delays.sqlite").exists()


def test_what_is_no_database_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "delays.sqlite"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(SinkError, match="is no database"), Sink(path, "worker-1") as sink:
        add(sink, messages([row()]), epoch=1)
    create(path)  # it belongs to the demo's folder: replaced
    assert flights_in(path) == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="Nothing was started"):
        create(tmp_path / "nowhere" / "delays.sqlite")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SinkError, match="Nothing was started"):
        create(tmp_path / "delays.sqlite")


def test_the_state_is_one_line_that_is_replaced(path: Path) -> None:
    write_state(path, "running")
    write_state(path, "equal")
    assert [state for state, _ in ask(path, "SELECT * FROM run")] == ["equal"]


def test_readers_do_not_wait_for_the_writer(sink: Sink, path: Path) -> None:
    with sink.transaction() as tx:
        tx.fence("flights", 0, 1)
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=0.01)) as reader:
            assert reader.execute("SELECT count(*) FROM batches").fetchall() == [(0,)]
