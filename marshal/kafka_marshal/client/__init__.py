"""What users import, from :mod:`kafka_marshal`: a Marshal, its consumers, leases and batches, a look at the world."""
