"""The whole story on real flights: publish, share out, process, kill a worker, add one, check, report.

``kafka-marshal demo`` runs it; :func:`run` is what it calls. The steps stand apart:

==============  ==================================================================================================
``publish``     every row of the file becomes a message
``process``     Spark drivers (``driver``, started by ``supervisor``) claim partitions and fill a database (``ledger``)
``check``       the same is computed from the file, by a plain loop (``reference``), and compared
``auditor``     the coordination log is audited by Spark
``report``      a page and a picture (``timeline``) of who owned what when (``ownership``, from the log alone)
``job``         runs them, and sees to it that nothing is left behind
``plain``       the same steps with worker processes in plain Python (``worker``), without Spark
==============  ==================================================================================================
"""

from flights.errors import DataMissingError, DemoError, SinkError, StalledError
from flights.options import DemoOptions

__all__ = ["DataMissingError", "DemoError", "DemoOptions", "SinkError", "StalledError", "run"]


def run(options: DemoOptions) -> int:
    """Run the demo: 0 if the workers' result equals the file's, else 1 (see :func:`flights.job.run`)."""
    # Imported here: a worker is a module of this package and needs nothing of it.
    from flights.run import run as run_job

    return run_job(options)
