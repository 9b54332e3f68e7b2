"""The method of :class:`~kafka_marshal.admin.Admin` that keeps the history of the log in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kafka_marshal import arguments

if TYPE_CHECKING:
    from kafka_marshal.archive import Archived
    from kafka_marshal.ports import Cluster


class LogArchive:
    """Base of :class:`~kafka_marshal.admin.Admin`: the archive of its log."""

    topic: str
    _open_cluster: Callable[[], Cluster]

    def archive(
        self,
        place: str,
        *,
        verify: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Archived:
        """Write what the archive in this folder, or at this URL such as ``s3://bucket/log``, does not have of the log.

        Call it before ``prune``, as often as you like: only what is new is written, in files that appear whole.
        ``verify``: also replay all that is there, and compare. ``storage_options``: of the store's package for fsspec
        (extra ``[bucket]``). ``timeout`` (seconds): how long Kafka may be silent. ``progress`` is called with (offsets
        done, offsets in all).
        What could not be archived, as it was pruned first or a file is damaged, is in the result (``is_whole``). Raises
        ArchiveError if the archive is of another log or can't be written, ConfigurationError.
        """
        from kafka_marshal.archive import Archive, write_archive

        arguments.text("place", place, "a folder, or a URL such as 's3://bucket/folder'")
        timeout = arguments.seconds("timeout", timeout, above=0)
        if progress is not None:
            arguments.a_function("progress", progress, "offsets done, offsets there are")
        kept = Archive.at(place, make=True, storage_options=storage_options)
        cluster = self._open_cluster()
        try:
            return write_archive(cluster, self.topic, kept, timeout, verify=verify, progress=progress)
        finally:
            cluster.close()
