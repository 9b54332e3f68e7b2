"""Checkpoints of one member: cuts and answers, beginning, leaving, restoring (X11 to X18)."""
