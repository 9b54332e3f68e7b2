"""Files that appear whole or not at all, and are safe once written: in a folder, or in a bucket of an object store.

On a file system they are written beside their place, then renamed into it. What a killed process left beside a place
is removed by the next one that writes there. Each attempt holds a lock while its process lives, so an attempt in
progress is never taken for a leftover.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kafka_marshal import arguments
from kafka_marshal.errors import ConfigurationError, needs
from kafka_marshal.types import T

#: `s3://bucket/x`, which a Path has made `s3:/bucket/x`. One letter is a drive, not a scheme.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

_PART, _OLD, _LOCK = ".part", ".old", ".lock"


def refuse_url(path: Path) -> None:
    """Raise ConfigurationError where `path` is a URL, which would become a folder of that name."""
    if _URL.match(str(path)):
        raise ConfigurationError(
            f"{str(path).replace(':/', '://', 1)} is a URL, and only a path of a file system can be written to (also "
            "one that is mounted). Nothing was written. Name a path, and copy the result from there"
        )


@contextmanager
def file_beside(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """The file that takes the place of `path` when the block ends; if it raises, `path` stays as it was.

    mode: its permissions, less the umask. What is no file (/dev/null, a pipe) is written to as it is. Raises OSError,
    ConfigurationError for a URL.
    """
    refuse_url(path)
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    prefix = f".{path.name}."
    _sweep(path.parent, prefix, path)
    part = path.with_name(f"{prefix}{uuid.uuid4().hex}{_PART}")
    try:
        with _locked(part, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, form: str, row: Mapping[str, object], refused: str) -> None:
    """Write a file that ``read_json`` reads, whole or not at all. Raises ConfigurationError.

    form: names what the file is, in its first field. refused: what can't be saved, {} for why, and what that means.
    """
    text = json.dumps({"format": form, **row}, indent=1, ensure_ascii=False)
    try:
        with file_beside(path) as file:
            file.write(f"{text}\n".encode())
    except OSError as error:
        raise ConfigurationError(f"{path}: {refused.format(error.strerror)}") from error


def read_json(path: Path, form: str) -> dict[str, Any]:
    """The row of such a file. Raises OSError, ValueError, KeyError, TypeError or AttributeError for any other."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.pop("format") != form:
        raise ValueError("another format")
    return found


class FolderBeside:
    """A new folder, `path`, that takes the place of another, or is removed.

    parent, prefix: it is `parent/<prefix><a unique name>.part`.
    """

    def __init__(self, parent: Path, prefix: str, target: Path | None = None) -> None:
        """Remove what killed processes left, and put back what one of them had moved away. Raises OSError."""
        _sweep(parent, prefix, target)
        self.target = target
        stem = f"{prefix}{uuid.uuid4().hex}"
        self.path: Path = parent / f"{stem}{_PART}"
        self._old = parent / f"{stem}{_OLD}"
        self._lock_path = parent / f"{stem}{_LOCK}"
        self._lock = _locked(self._lock_path)
        try:
            self.path.mkdir(0o700 if target is None else 0o777)
        except BaseException:
            self.drop()
            raise

    @classmethod
    def of(cls, target: Path) -> FolderBeside:
        """The one that is to take the place of `target`, which may be there or not. Raises OSError."""
        target = target.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        return cls(target.parent, f".{target.name}.", target)

    def take_place(self, check: Callable[[Path], object]) -> None:
        """Replace the target. check: raises if the target must not be removed after all. Raises OSError."""
        target = self.target
        assert target is not None
        sync_folder(self.path)
        if target.exists():
            check(target)
            shutil.copymode(target, self.path)
            target.rename(self._old)
        try:
            self.path.rename(target)
        except OSError:
            if self._old.exists():
                self._old.rename(target)
            raise
        sync_folder(target.parent)
        self.drop()

    def drop(self) -> None:
        """Remove what is still beside the target."""
        for path in (self.path, self._old):
            shutil.rmtree(path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()


def _locked(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file, locked as long as it is open: by the end of its process at the latest."""
    while True:
        file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # another process removed it before it was locked


def _sweep(parent: Path, prefix: str, target: Path | None) -> None:
    """Remove what attempts of this prefix left whose process is gone."""
    with suppress(FileNotFoundError, PermissionError):
        for path in sorted(parent.iterdir()):
            name = path.name
            if not re.fullmatch(f"{re.escape(prefix)}[0-9a-f]{{32}}({_LOCK}|{_PART})", name) or path.is_dir():
                continue
            # Of another user, or gone meanwhile: its own process or user removes it.
            with suppress(PermissionError, FileNotFoundError), path.open("r+b") as file:
                if _take(file):
                    _remove_attempt(path, target)


def _take(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_attempt(lock: Path, target: Path | None) -> None:
    """Remove all of one attempt; a process killed between its two renames left the target under another name."""
    old = lock.with_suffix(_OLD)
    if old.exists() and target is not None and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(lock.with_suffix(_PART), ignore_errors=True)
    lock.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """A rename is on the disk once its folder is."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class FilesError(Exception):
    """Files could not be read or written: the message says why, and no more."""


class Files(ABC):
    """Files of one place, for checkpoints' states and for archives of a log. What fails raises FilesError.

    A path is relative, with slashes; any thread may use the files.
    """

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
