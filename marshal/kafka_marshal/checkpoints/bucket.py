"""States in a bucket of an object store: S3, or another that fsspec reaches (extra ``[bucket]``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.checkpoints.store import Folders, Place, Store, failed
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.extras import needs

__all__ = ["Bucket"]


class Bucket(Store):
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
        super().__init__()
        needs("bucket", "fsspec")
        import fsspec

        url = arguments.text("url", url, "a URL such as 's3://bucket/folder'")
        scheme = url.partition("://")[0]
        if scheme in (url, "file", "local"):
            raise ConfigurationError(
                f"Bucket({url!r}) is no URL of an object store, such as s3://bucket/folder. Nothing was written. For a "
                "folder use kafka_marshal.checkpoints.Folder, which flushes what it writes to the disk"
            )
        if scheme in ("s3", "s3a"):
            needs("bucket", "s3fs")
        try:
            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"Bucket({url!r}) is a URL of a store that fsspec can't reach here: {error}. Nothing was written"
            ) from error
        self._url = url.rstrip("/")
        self._options = arguments.a_mapping("storage_options", storage_options)
        self._opened: tuple[int, Any, str] | None = None

    def _open(self) -> tuple[Any, str]:
        """(the file system of fsspec, path): its own, in each process. Raises StateError."""
        import fsspec

        if self._opened is None or self._opened[0] != os.getpid():
            # No listing from before: others save there, too.
            options = {**self._options, "use_listings_cache": False}
            try:
                fs, path = fsspec.core.url_to_fs(self._url, **options)
            except Exception as error:  # of any package
                raise failed(self._name(), "the store can't be opened", error) from error
            self._opened = os.getpid(), fs, path
        return self._opened[1:]

    def _name(self) -> str:
        return self._url

    def _check(self) -> None:
        fs, path = self._open()
        what = "the bucket can't be listed, so no state can be found. Nothing was read"
        try:
            fs.ls(path, detail=False, refresh=True)
        except FileNotFoundError as error:
            if error.__cause__ is not None:  # the store's own word: there is no such bucket, and not only nothing in it
                raise failed(self._name(), what, error) from error
        except Exception as error:
            raise failed(self._name(), what, error) from error

    def _write(self, place: Place, data: bytes) -> None:
        fs, path = self._open()
        try:
            fs.pipe_file(f"{path}/{place}", data)
        except Exception as error:
            what = f"the state {place} was not saved, and its piece keeps the one before"
            raise failed(self._name(), what, error) from error

    def _read(self, place: Place) -> bytes | None:
        fs, path = self._open()
        try:
            found: bytes = fs.cat_file(f"{path}/{place}")
        except FileNotFoundError:
            return None
        except Exception as error:
            raise failed(self._name(), f"the state {place} can't be read", error) from error
        return found

    def _list(self, folders: Folders) -> list[str]:
        fs, path = self._open()
        try:
            found: list[str] = fs.ls("/".join((path, *folders)), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise failed(self._name(), f"the states in {'/'.join(folders)} can't be listed", error) from error
        return [each.rpartition("/")[2] for each in found]

    def _delete(self, places: list[Place]) -> None:
        fs, path = self._open()
        paths = [f"{path}/{place}" for place in places]
        try:
            try:
                fs.rm(paths)
            except FileNotFoundError:  # another member deletes, too
                for each in paths:
                    with suppress(FileNotFoundError):
                        fs.rm_file(each)
        except Exception as error:
            raise failed(self._name(), f"{len(places)} states can't be deleted", error) from error
