"""Deterministic simulation: the real client, engine, policies and admin on virtual time, with every kind of fault.

:func:`simulate` runs seeds, shrinks the first that breaks a promise and prints it as a script. Your own worker can
take part: a function of one :class:`Job`. See docs/simulation.md. Needs the extra ``kafka-marshal[simulation]``.

======================  ==============================================================================================
``scheduler``           virtual time, and threads (greenlets) that run one at a time
``runtime``             the clock and threads of one process, as :mod:`kafka_marshal.runtime` defines them
``network``             latency, loss, duplicates; each client sees the log at its own time
``producer``            what a process produces to users' topics, in transactions, too
``process``             processes, and what a worker gets (:class:`Job`)
``interrupting``        asynchronous exceptions in workers' calls and in reads
``workers``             the built-in workers: every way to receive messages
``in_checkpoints``      workers that count, and keep their counts with the group's checkpoints
``counting``            what the states of a checkpoint hold: each message once; what its callbacks get
``in_batches``          workers that share partitions by batches, and the operator beside them
``in_lanes``            the worker with many handlers (``consumer.run``)
``in_lists``            its handlers of lists (``batch=``)
``waits``               what its handlers ask to have tried later
``scenario``            clients and faults, drawn from a seed or written down
``checks``              invariants checked with every record and every message
``batch_checks``        the same for partitions that many share by batches
``recorded``            the authoritative log, and an independent judge of it
``ledger``              messages handled, granted and reported as done: in which order, with which outputs
``holdings``            what a process believes to hold, leases or pieces, and what of it a message is
``member_invariants``   invariants of members that the log does not show
``faults``              starts and restarts processes, fills topics, injects faults
``story``               runs a scenario, and fails it if a thread hangs or an exception is logged
``scripted``            members that start, freeze and end when a script says: replays of a log (``what-if``)
``campaign``            runs many seeds, and shrinks a failing scenario
======================  ==============================================================================================
"""

from __future__ import annotations

from kafka_marshal.testing.simulation.campaign import Report, load_worker, simulate
from kafka_marshal.testing.simulation.process import Database, DatabaseTransaction, Job, Worker
from kafka_marshal.testing.simulation.recorded import Judge, Violation
from kafka_marshal.testing.simulation.scenario import Client, Counting, Fault, Scenario
from kafka_marshal.testing.simulation.story import Result, simulate_one

__all__ = [
    "Client",
    "Counting",
    "Database",
    "Fault",
    "Job",
    "Judge",
    "Report",
    "Result",
    "Scenario",
    "DatabaseTransaction",
    "Violation",
    "Worker",
    "load_worker",
    "simulate",
    "simulate_one",
]
