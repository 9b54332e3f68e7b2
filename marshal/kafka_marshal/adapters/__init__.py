"""What stands between the client's logic and Kafka, and an in-memory log that can stand in for it."""
