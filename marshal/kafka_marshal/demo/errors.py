"""What can go wrong in the demo, besides Kafka itself.

::

    MarshalError
    └── DemoError               the demo can't begin, or can't go on
        ├── DataMissingError    the file of flights is not installed, or is another one
        ├── StalledError        nothing moves any more, or no worker is left
        └── SinkError           the database refused a batch; the batch is not done, so nothing is lost
            └── FencedError     somebody with a newer epoch wrote already (C9); the lease is somebody else's
"""

from __future__ import annotations

from kafka_marshal.errors import MarshalError

__all__ = ["DataMissingError", "DemoError", "FencedError", "SinkError", "StalledError"]


class DemoError(MarshalError):
    """The demo can't begin, or can't go on."""


class DataMissingError(DemoError):
    """The file of flights is not installed, or is not the one that the demo knows."""


class StalledError(DemoError):
    """No worker is left, or rows stay undone although workers run."""


class SinkError(DemoError):
    """The database refused to write. What belongs to the batch was rolled back."""


class FencedError(SinkError):
    """The batch's epoch is older than the one stored with its partition (C9): the lease has a newer holder."""
