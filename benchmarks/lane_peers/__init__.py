"""The contestants of `benchmarks.lanes`: each in its own process, which prints one line of JSON at the end.

    ours.py       consumer.run(), threads or coroutines
    pool.py       the usual own solution: threads with a queue each, keys distributed by their hash
    pyrallel.py   pyrallel-consumer, in its own environment
    Peers.java    Confluent's Parallel Consumer, and a share group

All do the same with a record (`work.py`, and the same in Java). Arguments are name=value: see `work.Order`.
"""
