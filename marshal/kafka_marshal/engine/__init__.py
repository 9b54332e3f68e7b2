"""The client's logic without I/O, clock or threads: events and the time go in, effects come out.

:mod:`.engine` lists what the caller must do, in order. ``claims`` and ``groups`` hold partitions and stop in time;
``work`` delivers messages and tracks which are done; ``policies`` choose partitions.
"""
