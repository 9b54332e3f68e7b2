"""The audit: the log replayed by the rationalizer in Spark's executors, and what follows from it."""
