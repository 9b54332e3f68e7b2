"""What connects the client's logic with Kafka, and an in-memory log that can replace it."""
