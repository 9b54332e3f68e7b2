"""Hands messages out and records what is done; where the leases come from does not matter here."""
