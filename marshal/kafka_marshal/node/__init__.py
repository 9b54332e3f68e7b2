"""One thread and one lock: reads the log, applies it, passes it to the engine, carries out its effects."""
