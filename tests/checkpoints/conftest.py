"""Stores of each kind; a local server that speaks S3."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kafka_marshal.checkpoints import Bucket, Folder, RestorePiece, Store
from rationalizer.limits import MAX_KEY_HASH


def restored(**changed: Any) -> RestorePiece:
    """A whole partition that was never worked on, but for what is given."""
    fields: dict[str, Any] = {"topic": "flights", "partition": 3, "lo": 0, "hi": MAX_KEY_HASH, "epoch": 7}
    fields |= {"position": 0, "ranges": (), "states": ((0, MAX_KEY_HASH, None),), "group_id": "delays"}
    fields |= {"done_through": ((0, MAX_KEY_HASH, -1),), "initial": -1}
    return RestorePiece(**(fields | changed))


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """The options of a bucket, ``states``, on a server for this session."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    fsspec, _ = pytest.importorskip("fsspec"), pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    # A second server of this process has the same buckets.
    fsspec.filesystem("s3", use_listings_cache=False, **options).makedirs("states", exist_ok=True)
    yield options
    server.stop()


@pytest.fixture(params=["folder", "memory", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Makes a store of one place; the next one finds what the one before has saved."""
    if request.param == "folder":
        return lambda: Folder(tmp_path / "states")
    if request.param == "memory":
        pytest.importorskip("fsspec")
        url = f"memory://{uuid4().hex}"
        return lambda: Bucket(url)
    url, options = f"s3://states/{uuid4().hex}", request.getfixturevalue("s3")
    return lambda: Bucket(url, storage_options=options)
