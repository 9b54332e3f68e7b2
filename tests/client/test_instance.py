"""An instance_id names a Marshal's host and release."""

from __future__ import annotations

import os
import socket

import pytest

from kafka_marshal.instance import Instance, new_instance_id, release


def test_it_is_read_back_and_names_one_run() -> None:
    made = new_instance_id()
    assert Instance.parse(made) == Instance(socket.gethostname(), os.getpid(), release())
    assert str(Instance.parse(made)) == f"{socket.gethostname()}:{os.getpid()}"
    assert made != new_instance_id()


def test_any_host_name_fits_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "wörker/" + 300 * "x")
    made = new_instance_id()
    assert len(made.encode()) <= 255
    assert Instance.parse(made) is not None


@pytest.mark.parametrize("other", [None, "", "8f14e45fceea167a", "a/b/c/d", "a/1/2"])
def test_others_are_left_alone(other: str | None) -> None:
    assert Instance.parse(other) is None
