"""A small process beside a worker that releases what it held, should it die without a goodbye.

==============  ========================================================================================
``parent``      :class:`Watchdog`: the worker's side; keeps the process running and its last will up to date
``last_will``   what it is to say: the encoded release of each lease held
``process``     the process: a program of its own, without this package; says when it speaks, and why not
``properties``  what of the worker's configuration and environment the process gets
==============  ========================================================================================
"""

from kafka_marshal.watchdog.parent import Watchdog, is_supported

__all__ = ["Watchdog", "is_supported"]
