"""The measurements, one event per module."""
