"""A bucket: what is refused, and what is said where the store does not answer."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, StateError, StateMissingError
from kafka_marshal.checkpoints import Bucket
from kafka_marshal.errors import ExtraMissingError
from kafka_marshal.files import BucketFiles
from tests.checkpoints.conftest import restored
from tests.checkpoints.test_stores import at, collected, piece

pytest.importorskip("s3fs")


def opened(store: Bucket) -> Any:
    files = store._files
    assert isinstance(files, BucketFiles)
    return files.open()


def test_a_bucket_that_is_not_there_is_said_at_the_first_restore(s3: dict[str, Any]) -> None:
    """Before anything is handled: not only when the first state is to be saved."""
    store = Bucket("s3://absent/delays", storage_options=s3)
    with pytest.raises(StateError, match=r"s3://absent/delays: the store can't be reached.*bucket does not exist"):
        store.load(restored())
    with pytest.raises(StateError, match=r"was not saved, and its piece keeps the one before.*bucket does not exist"):
        store.save(1, piece(), b"")
    assert Bucket("s3://states", storage_options=s3).load(restored(group_id="new")) is None


def test_a_store_that_does_not_answer(s3: dict[str, Any]) -> None:
    options = s3 | {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    store = Bucket("s3://states/away", storage_options=options)
    import s3fs

    opened(store)[0].retries = 1
    assert isinstance(opened(store)[0], s3fs.S3FileSystem)
    for call in (lambda: store.save(1, piece(), b""), lambda: store.load(restored(**at(7)))):
        with pytest.raises(StateError, match="Could not connect to the endpoint URL") as raised:
            call()
        assert not isinstance(raised.value, StateMissingError)
    assert store.collect(collected(9)) == 0


def test_it_is_opened_again_in_a_forked_child() -> None:
    store = Bucket("memory://forked")
    store.save(1, piece(), b"1")
    before = opened(store)[0]
    child = os.fork()
    if not child:
        os._exit(0 if opened(store)[0] is not before and store.load(restored(**at(1))) == b"1" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert opened(store)[0] is before


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///tmp/states", "kafka_marshal.checkpoints.Folder for states"),
        ("/tmp/states", "is no URL of an object store"),
        ("", "url must be a URL such as"),
        ("s4://bucket", "can't reach here: Protocol not known: s4"),
        ("gs://bucket", "can't reach here: Please install gcsfs"),
    ],
)
def test_no_bucket(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Bucket(url)


def test_options_that_its_package_refuses() -> None:
    with pytest.raises(StateError, match=r"s3://states: .*unexpected keyword argument 'keys'"):
        Bucket("s3://states", storage_options={"keys": "a"}).load(restored())


@pytest.mark.parametrize(("absent", "url"), [("fsspec", "memory://x"), ("s3fs", "s3://states")])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, absent: str, url: str) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'kafka-marshal\[bucket\]'"):
        Bucket(url)
