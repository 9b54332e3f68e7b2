"""What a log says of its groups, in one place for the command, the page and the admin.

===============  =======================================================================================
``log``          the coordination topic, read from here to there, or followed
``fold``         workers: when each was heard, what it lost and how, who evicted it
``view``         the state now: leases and groups as ``rows``, with lag and verdict, speed and silence (``meter``)
``stuck``        why a partition makes no progress, such as a transaction that has not ended
``checkpoints``  those of a group: state, rows, words; ``checkpoint_history``; ``holes``: its open messages
``log_size``     how large the log is, how old, how long it is kept
``problems``     what is wrong with a group and its open messages, in words
``ownership``    who owned a partition, since when, until when
``words``        records and outcomes in words; ``text``: times, spans and names; ``payload``: messages
``report``       a page of figures and tables that opens without a network
===============  =======================================================================================
"""
