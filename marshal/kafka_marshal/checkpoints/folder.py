"""States in a folder that all members share, such as a mounted network file system."""

from __future__ import annotations

import os

from kafka_marshal import arguments
from kafka_marshal.checkpoints.store import FiledStore
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.files import FolderFiles


class Folder(FiledStore):
    """A folder that all members of the group can reach; it is made if its parent is there.

    A state is written beside its place, flushed to the disk, and renamed: it is there as a whole, or not at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = arguments.an_instance("path", path, (str, os.PathLike), "the path of a folder")
        given = arguments.text("path", os.fspath(path), "the path of a folder")
        if "://" in given:
            raise ConfigurationError(
                f"Folder({given!r}): a URL is no folder. Nothing was written. Use kafka_marshal.checkpoints.Bucket"
            )
        super().__init__(FolderFiles(given))
