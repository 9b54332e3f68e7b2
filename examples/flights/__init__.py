"""The whole story on real flights: publish, share out, process, kill a worker, add one, check, report.

``kafka-marshal demo`` runs it (``run``). The steps stand apart:

==============  ==================================================================================================
``publish``     every row of the file becomes a message
``process``     Spark drivers (``driver``, started by ``supervisor``) claim partitions and fill a database (``ledger``)
``check``       the same is computed from the file, by a plain loop (``reference``), and compared
``tool``        the command kafka-marshal audits the coordination log
``report``      a page and a picture (``timeline``) of who owned what when (``ownership``, from the log alone)
``job``         runs them, and sees to it that nothing is left behind
``plain``       the same steps with worker processes in plain Python (``worker``), without Spark
==============  ==================================================================================================
"""

from flights.errors import DataMissingError, DemoError, SinkError, StalledError
from flights.options import DemoOptions

__all__ = ["DataMissingError", "DemoError", "DemoOptions", "SinkError", "StalledError"]
