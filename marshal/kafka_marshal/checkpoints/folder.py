"""States in a folder that all members share, such as a mounted network file system."""

from __future__ import annotations

import os
from pathlib import Path

from kafka_marshal import arguments
from kafka_marshal.beside import file_beside, sync_folder
from kafka_marshal.checkpoints.store import Folders, Place, Store, failed
from kafka_marshal.errors import ConfigurationError, StateError

__all__ = ["Folder"]


class Folder(Store):
    """A folder that all members of the group can reach; it is made if its parent is there.

    A state is written beside its place, flushed to the disk, and renamed: it is there as a whole, or not at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        path = arguments.an_instance("path", path, (str, os.PathLike), "the path of a folder")
        given = arguments.text("path", os.fspath(path), "the path of a folder")
        if "://" in given:
            raise ConfigurationError(
                f"Folder({given!r}): a URL is no folder. Nothing was written. Use kafka_marshal.checkpoints.Bucket"
            )
        self._path = Path(given).absolute()
        try:
            if not self._path.is_dir():
                self._path.mkdir(exist_ok=True)
                sync_folder(self._path.parent)
        except OSError as error:
            raise ConfigurationError(
                f"Folder({given!r}): there is no such folder, and it can't be made ({error.strerror}). Nothing was "
                "written. Make it, or mount it, on each machine that has a member"
            ) from error

    def _name(self) -> str:
        return str(self._path)

    def _check(self) -> None:
        """A folder that was there and is gone is not made again: its states are elsewhere."""
        if not self._path.is_dir():
            raise StateError(
                f"{self._path}: the folder is gone, and the states with it. Nothing was read or written. Mount it "
                "again, or bring it back"
            )

    def _write(self, place: Place, data: bytes) -> None:
        try:
            self._make(place.folders)
            with file_beside(self._path.joinpath(*place.folders, place.name)) as file:
                file.write(data)
        except OSError as error:
            self._check()
            what = f"the state {place} was not saved, and its piece keeps the one before"
            raise failed(self._name(), what, error) from error

    def _make(self, folders: Folders) -> None:
        self._check()
        folder = self._path
        for each in folders:
            parent, folder = folder, folder / each
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                sync_folder(parent)

    def _read(self, place: Place) -> bytes | None:
        try:
            return self._path.joinpath(*place.folders, place.name).read_bytes()
        except FileNotFoundError:
            self._check()
            return None
        except OSError as error:
            raise failed(self._name(), f"the state {place} can't be read", error) from error

    def _list(self, folders: Folders) -> list[str]:
        try:
            return os.listdir(self._path.joinpath(*folders))
        except FileNotFoundError:
            self._check()
            return []
        except OSError as error:
            raise failed(self._name(), f"the states in {'/'.join(folders)} can't be listed", error) from error

    def _delete(self, places: list[Place]) -> None:
        for place in places:
            try:
                self._path.joinpath(*place.folders, place.name).unlink(missing_ok=True)
            except OSError as error:
                raise failed(self._name(), f"the state {place} can't be deleted", error) from error
