"""States in a bucket of an object store: S3, or another that fsspec reaches (extra ``[bucket]``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.checkpoints.store import FiledStore
from kafka_marshal.files import BucketFiles


class Bucket(FiledStore):
    """A bucket, or a part of one, such as ``s3://bucket/delays``. Its extra brings s3fs, for S3.

    An object store shows an object as a whole, or not at all, and has it safe when it says so. For another one install
    its package for fsspec, such as gcsfs. Objects need the rights to be listed, read, written and deleted.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Nothing is opened yet.

        Args:
            url: as fsspec takes it.
            storage_options: credentials and settings of the store, as its package for fsspec takes them. (s3fs finds
                those of the AWS command by itself.)

        Raises:
            ExtraMissingError: the extra is not installed.
            ConfigurationError: the URL is not one of an object store, or the store's package is not installed.
        """
        url = arguments.text("url", url, "a URL such as 's3://bucket/folder'")
        super().__init__(BucketFiles(url, storage_options=storage_options))
