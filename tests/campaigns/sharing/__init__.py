"""Members that share partitions by batches, killed and stopped at any moment, and a plain account of each message."""
