"""This tree beside a commit: the same five measurements of both, in turns, on one broker.

    python -m benchmarks.against REV [--rounds N] [--only iteration,…] [--json FILE]    (make bench-pair REV=a7c5f59)

- iteration, at least once and at most once: messages of 100 bytes a second, and the processor time that each takes, of
  the caller's thread, of the library's threads and of librdkafka's;
- hand-over: from ``close()`` of one of two workers to the first record of its partition at the other;
- replay: records a second of ``World.apply_many``; of claims, and of a coordinated group (0: the commit knows none).

Both sides run the same measuring code, this tree's ``benchmarks``, with the product of one tree each. Their processes
live from the first round to the last. Ratios are of the two runs of a round, which stand next to each other, so that
what disturbs the machine disturbs both; which side goes first alternates.
"""
