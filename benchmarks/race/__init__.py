"""The race: kafka-marshal beside every group protocol of Kafka, on the same machine in the same run.

    python -m benchmarks.race [--rounds N] [--only start,handover,…] [--quick] [--json FILE] [--plot FILE] …

Rules, the same for all sides:

- One broker per static broker setting; only the one being measured runs, the others are stopped (SIGSTOP).
- Contestants take turns in every round; figures are medians and 95th percentiles over the rounds.
- Clocks start at the constructor, in a process that has imported everything; they are the system's monotonic one, so
  that stamps of different processes compare.
- Where there are many workers, they are threads of one process on all sides; where one is killed, each side has one
  process for those that die and one for those that survive.
- Records keep coming at the same pace on all sides, and are delivered one by one.
- Losses are printed like wins.

``contestants`` says who runs with which settings, ``worker`` and ``loops`` are the process that hosts the workers,
``hosts`` its parent's side, ``events/`` what is measured, ``results`` and ``plot`` what comes of it.
"""
