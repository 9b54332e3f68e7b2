"""Groups that take checkpoints: workers with state are killed, stopped, deployed and rolled back; a plain count."""
