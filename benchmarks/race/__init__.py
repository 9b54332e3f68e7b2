"""The race: kafka-marshal beside every group protocol of Kafka, on the same machine in the same run.

    python -m benchmarks.race [--rounds N] [--only start,handover,…] [--quick] [--json FILE] [--plot FILE] …

Rules, the same for all sides:

- One broker per set of static settings; only the one being measured runs, the others are stopped (SIGSTOP).
- Contestants take turns in every round; figures are medians and 95th percentiles over the rounds.
- Time starts at the constructor, in a process that has imported everything; it is the system's monotonic clock, which
  is the same in all processes.
- Many workers are threads of one process on all sides; if one is killed, each side has one process for those that die
  and one for those that survive.
- Records keep coming at the same pace on all sides, and are delivered one by one.
- Losses are printed like wins.

``contestants`` has the contestants' settings, ``worker`` and ``loops`` are the process that hosts the workers,
``hosts`` is its parent's side, ``events/`` has the measurements, ``results`` and ``plot`` their results.
"""
