"""Leases: claiming, keeping and releasing them; the other members, and which member gets what."""
