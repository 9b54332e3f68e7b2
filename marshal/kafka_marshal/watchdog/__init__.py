"""A small process beside a worker that releases what it held, should it die without a goodbye.

==============  ========================================================================================
``keeper``      :class:`Watchdog`: the worker's side; keeps the process running and its will up to date
``process``     the process: a program of its own, without this package; says when it speaks, and why not
``properties``  what of the worker's configuration and environment the process gets
==============  ========================================================================================
"""

from kafka_marshal.watchdog.parent import Watchdog, is_supported

__all__ = ["Watchdog", "is_supported"]
