"""One thread and one lock: read the log, apply it, pass it to the engine, carry out its effects."""
