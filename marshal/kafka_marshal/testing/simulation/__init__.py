"""Deterministic simulation: the real client, engine, policies and admin on virtual time, with everything going wrong.

:func:`simulate` runs seeds, and what broke a promise is made small and printed as a script. Your own worker can take
part: a function of one :class:`Job`. See docs/simulation.md. Needs the extra ``kafka-marshal[simulation]``.

======================  ==============================================================================================
``scheduler``           virtual time, and threads (greenlets) that run one at a time
``runtime``             the clock and threads of one process, as :mod:`kafka_marshal.runtime` wants them
``network``             latency, loss, repetition; each client sees the log at a time of its own
``producer``            what a process produces to users' topics
``process``             processes, and what a worker in one is given (:class:`Job`)
``interrupting``        exceptions out of nowhere, in workers' calls and in reads
``logs``                what must not be logged
``workers``             the built-in workers: every way in which messages can be had
``in_lanes``            the one with many handlers (``consumer.run``)
``scenario``            who takes part and what goes wrong, from a seed or written down
``checks``              what must hold with every record and every message
``recorded``            the log as it truly is, and a judge's second opinion
``ordering``            in which order messages were handled
``ledger``              what was done with messages, granted, and known by holders
``holdings``            what a process has by its own account, leases or pieces
``states``              what a world is like, to be compared
``member_invariants``   what members owe each other beyond what the log shows
``data``                the topics whose messages are handled
``clients``             the processes, started and started again
``faults``              what goes wrong
``story``               runs a scenario
``shrink``              makes a failing one small
``campaign``            runs many
======================  ==============================================================================================
"""

from __future__ import annotations

from kafka_marshal.testing.simulation.campaign import Report, simulate
from kafka_marshal.testing.simulation.checks import Judge, Violation
from kafka_marshal.testing.simulation.process import Database, Job, Transaction, Worker
from kafka_marshal.testing.simulation.scenario import Client, Fault, Scenario
from kafka_marshal.testing.simulation.story import Result, simulate_one
from kafka_marshal.testing.simulation.worker_loader import load_worker

__all__ = [
    "Client",
    "Database",
    "Fault",
    "Job",
    "Judge",
    "Report",
    "Result",
    "Scenario",
    "Transaction",
    "Violation",
    "Worker",
    "load_worker",
    "simulate",
    "simulate_one",
]
