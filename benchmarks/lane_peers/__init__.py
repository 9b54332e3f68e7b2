"""The contestants of `benchmarks.lanes`: each in its own process, which prints one line of JSON in the end.

    ours.py       consumer.run(), threads or coroutines
    pool.py       what people write themselves: threads, one queue for each, keys dealt out by their hash
    pyrallel.py   pyrallel-consumer, in its own environment
    Peers.java    Confluent's Parallel Consumer, and a share group

All do the same with a record (`work.py`, and the same in Java). Arguments are name=value: see `work.Order`.
"""
