"""Shares by batches (B1 to B5): many members work on one partition, each on a batch at a time. It may use ``work``."""
