"""Worker processes: ``settings`` are theirs, ``parent`` starts and watches them, ``child`` is one of them."""

from kafka_marshal.runner.parent import Worker

__all__ = ["Worker"]
