"""Members of one process that read partitions together (U13): opened, closed, slow, killed and stopped."""
