"""Which releases `make test-lowest` and `make test-newest` take."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from tests.release.packages import ROOT
from tests.release.versions import at_least, pinned, required


def test_lowest_is_what_setup_cfg_allows_and_newest_is_open() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lowest, newest = list(pinned("lowest")), list(pinned("newest"))
    names = {each.name for each in required()}
    assert {"confluent-kafka", "msgpack", "xxhash", "click", "psycopg"} <= names
    assert set(lowest) - set(pins) == {f"{each.name}=={at_least(each)}" for each in required()} - set(pins)
    assert set(newest) < set(pins)
    assert not [line for line in newest if line.split("==")[0] in names]


def test_a_dependency_without_a_lowest_release_is_refused() -> None:
    with pytest.raises(SystemExit, match="no lowest release of xxhash"):
        at_least(Requirement("xxhash<5"))
    assert at_least(Requirement("xxhash>=3.0,<5")) == "3.0"
