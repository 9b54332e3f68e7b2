"""One thread and one lock: reads the log, applies it, tells the engine, carries out its effects."""
