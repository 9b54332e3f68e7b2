"""The client's logic without I/O, clock or threads: events and now in, effects out.

:mod:`.engine` says what the caller must do, in order. ``claims`` keeps leases and stops in time; ``work`` hands
messages out and hears what is done; ``policies`` says which partitions.
"""
