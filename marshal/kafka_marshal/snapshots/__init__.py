"""Snapshots in the shell (S2, S3): `reader` reads their log, `start` judges them, `publisher` takes and compares.

The records themselves are in `rationalizer.snapshot_log`; old ones are removed by `kafka_marshal.snapshots.prune`.
"""
