"""Files and folders that appear whole or not at all: written beside their place, then renamed into it.

What a killed process left beside a place is removed by the next one that writes there. Each attempt holds a lock while
its process lives, so an attempt in progress is never taken for a leftover.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kafka_marshal.errors import ConfigurationError

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
