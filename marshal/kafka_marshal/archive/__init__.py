"""The archive of a coordination log: dumps by coordination partition and offsets, which outlive what is pruned.

`writer` adds what is new, `stored` knows the files, and reads an archive beside the live log as one history.
"""

from kafka_marshal.archive.stored import Archive, ArchivedLog
from kafka_marshal.archive.writer import Archived, ArchivedPartition, Gap, write_archive

__all__ = ["Archive", "Archived", "ArchivedLog", "ArchivedPartition", "Gap", "write_archive"]
