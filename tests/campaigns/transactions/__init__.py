"""Exactly once into Kafka: workers that are killed between all steps of a transaction, and a read_committed reader."""
