"""Files in a folder, or in a bucket of an object store: each appears whole or not at all, and is safe once written.

For checkpoints' states and for archives of a log. A path is relative, with slashes; any thread may use the files.
"""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kafka_marshal import arguments
from kafka_marshal.beside import file_beside, sync_folder
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.extras import needs

T = TypeVar("T")


class FilesError(Exception):
    """Files could not be read or written: the message says why, and no more."""


class Files(ABC):
    """Files of one place. What fails raises FilesError."""

    #: What the place is called in messages; no password in it.
    name: str

    @abstractmethod
    def check(self) -> None:
        """Whether the place can be reached."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Whole, or not at all; safe when it returns."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """None: there is none."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names in a folder of the place ("": itself); none if there is no such folder. Never an old answer."""

    @abstractmethod
    def delete(self, paths: list[str]) -> None:
        """What is gone already does not matter."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for another process with such a block here, if the place knows; a bucket doesn't."""
        yield


def files_at(place: str, *, make: bool, storage_options: Mapping[str, Any] | None = None) -> Files:
    """The files of a folder, or of a URL such as ``s3://bucket/folder``. Raises what the two classes raise."""
    if "://" in place:
        return BucketFiles(place, storage_options=storage_options)
    return FolderFiles(place, make=make)


@contextmanager
def _failing() -> Iterator[None]:
    """Raise FilesError for what any package raises, but what the caller knows how to take."""
    try:
        yield
    except (FilesError, FileNotFoundError):
        raise
    except Exception as error:
        raise FilesError(_why(error)) from error


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


class FolderFiles(Files):
    """A folder of a file system, which may be mounted."""

    def __init__(self, path: str, *, make: bool = True) -> None:
        """make: the folder, if only its parent is there. Raises ConfigurationError if it is not there then."""
        self._path = Path(path).absolute()
        self.name: str = str(self._path)
        try:
            if not self._path.is_dir():
                if not make:
                    raise FileNotFoundError(0, "it is not there")
                self._path.mkdir(exist_ok=True)
                sync_folder(self._path.parent)
        except OSError as error:
            what = "and it can't be made" if make else "so nothing can be read"
            raise ConfigurationError(
                f"{path!r}: there is no such folder, {what} ({error.strerror}). Nothing was written. Make it, or mount "
                "it, on each machine that uses it"
            ) from error

    def check(self) -> None:
        """A folder that was there and is gone is not made again: its files are elsewhere."""
        if not self._path.is_dir():
            raise FilesError("the folder is gone, and what was in it. Mount it again, or bring it back")

    def write(self, path: str, data: bytes) -> None:
        with self._here():
            target = self._path / path
            self._make(target.parent)
            with file_beside(target) as file:
                file.write(data)

    def _make(self, folder: Path) -> None:
        self.check()
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)

    def read(self, path: str) -> bytes | None:
        return self._unless_missing(lambda: (self._path / path).read_bytes())

    def names(self, folder: str) -> list[str]:
        return self._unless_missing(lambda: os.listdir(self._path / folder)) or []

    def _unless_missing(self, read: Callable[[], T]) -> T | None:
        try:
            with self._here():
                return read()
        except FileNotFoundError:
            self.check()
            return None

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            with self._here():
                (self._path / path).unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._here():
            folder = os.open(self._path, os.O_RDONLY)
        try:
            with self._here():
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    @contextmanager
    def _here(self) -> Iterator[None]:
        with _failing():
            try:
                yield
            except OSError:
                self.check()
                raise


class BucketFiles(Files):
    """A bucket of an object store, or a part of one, through fsspec (extra ``[bucket]``).

    An object store shows an object as a whole, or not at all, and has it safe when it says so.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Nothing is opened yet. Raises ExtraMissingError, ConfigurationError."""
        needs("bucket", "fsspec")
        import fsspec

        scheme = url.partition("://")[0]
        if scheme in (url, "file", "local"):
            raise ConfigurationError(
                f"{url!r} is no URL of an object store, such as s3://bucket/folder. Nothing was written. For a folder "
                "use its path (kafka_marshal.checkpoints.Folder for states), so that what is written is flushed to "
                "the disk"
            )
        if scheme in ("s3", "s3a"):
            needs("bucket", "s3fs")
        try:
            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"{url!r} is a URL of a store that fsspec can't reach here: {error}. Nothing was written"
            ) from error
        self.name: str = url.rstrip("/")
        self._options = arguments.a_mapping("storage_options", storage_options)
        self._opened: tuple[int, Any, str] | None = None

    def open(self) -> tuple[Any, str]:
        """(the file system of fsspec, path): its own, in each process."""
        import fsspec

        if self._opened is None or self._opened[0] != os.getpid():
            # No listing from before: others write there, too.
            options = {**self._options, "use_listings_cache": False}
            with _failing():
                self._opened = os.getpid(), *fsspec.core.url_to_fs(self.name, **options)
        assert self._opened is not None
        return self._opened[1:]

    def check(self) -> None:
        try:
            self._listed("")
        except FileNotFoundError as error:
            if error.__cause__ is not None:  # the store's own word: there is no such bucket, and not only nothing in it
                raise FilesError(_why(error)) from error

    def write(self, path: str, data: bytes) -> None:
        fs, root = self.open()
        with self._all_of_it():
            fs.pipe_file(f"{root}/{path}", data)

    def read(self, path: str) -> bytes | None:
        fs, root = self.open()
        try:
            with _failing():
                found: bytes = fs.cat_file(f"{root}/{path}")
        except FileNotFoundError:
            return None
        return found

    def names(self, folder: str) -> list[str]:
        try:
            found = self._listed(folder)
        except FileNotFoundError:
            return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def _listed(self, folder: str) -> list[str]:
        fs, root = self.open()
        with _failing():
            found: list[str] = fs.ls(f"{root}/{folder}" if folder else root, detail=False, refresh=True)
        return found

    def delete(self, paths: list[str]) -> None:
        fs, root = self.open()
        full = [f"{root}/{path}" for path in paths]
        with self._all_of_it():
            try:
                fs.rm(full)
            except FileNotFoundError:  # another process deletes, too
                for each in full:
                    with suppress(FileNotFoundError):
                        fs.rm_file(each)

    @contextmanager
    def _all_of_it(self) -> Iterator[None]:
        """Nothing is expected to be missing, but the bucket."""
        with _failing():
            try:
                yield
            except FileNotFoundError as error:
                raise FilesError(_why(error)) from error
