"""What users import, from :mod:`kafka_marshal`: a Marshal, its consumers, leases and batches, the state of the log."""
