"""The archive of a coordination log: dumps by coordination partition and offsets, which outlive what is pruned.

`writer` adds what is new, `joined` reads an archive beside the live log as one history, `stored` knows the files.
"""

from kafka_marshal.archive.joined import ArchivedLog
from kafka_marshal.archive.stored import Archive
from kafka_marshal.archive.writer import Archived, ArchivedPartition, Gap, write_archive

__all__ = ["Archive", "Archived", "ArchivedLog", "ArchivedPartition", "Gap", "write_archive"]
