"""Deterministic simulation."""

from kafka_marshal.testing.simulation.scenario import Client, Fault, Scenario
from kafka_marshal.testing.simulation.story import Result, simulate_one

__all__ = ["Client", "Fault", "Result", "Scenario", "simulate_one"]
