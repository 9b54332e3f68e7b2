"""What a member of a coordinated group does: join, beat, start owned partitions, release revoked ones (G20)."""
