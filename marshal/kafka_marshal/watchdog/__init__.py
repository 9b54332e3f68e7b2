"""A small process beside a worker that releases what the worker held, if it dies without a goodbye.

===========  ========================================================================================
``parent``   :class:`Watchdog`: the worker's side; keeps the process running, and its releases up to date
``process``  the process: a separate program without this package; says when it acts, and why not
===========  ========================================================================================
"""

from kafka_marshal.watchdog.parent import Watchdog, is_supported

__all__ = ["Watchdog", "is_supported"]
