"""What can go wrong in the demo, besides Kafka itself.

::

    MarshalError
    └── DemoError               the demo can't begin, or can't continue
        ├── DataMissingError    the file of flights is not installed, or is another one
        ├── StalledError        nothing moves any more, or no worker is left
        └── SinkError           the database can't be made, read or written; nothing is lost
"""

from __future__ import annotations

from kafka_marshal.errors import MarshalError

__all__ = ["DataMissingError", "DemoError", "SinkError", "StalledError"]


class DemoError(MarshalError):
    """The demo can't begin, or can't continue."""


class DataMissingError(DemoError):
    """The file of flights is not installed, or is not the one that the demo knows."""


class StalledError(DemoError):
    """No worker is left, or rows stay undone although workers run."""


class SinkError(DemoError):
    """The database can't be made, read or written."""
