"""The client's logic without I/O, clock or threads: events and now in, effects out.

Read in this order: :mod:`core` (the caller's duties), :mod:`leases` and :mod:`proofs` (keeping a lease, stopping in
time), :mod:`observer` (what the others do), :mod:`consumer`, :mod:`assignment`, :mod:`placement` and :mod:`policies`
(which partitions, from where), :mod:`delivery` and :mod:`tracker` (handing out, done).
"""
