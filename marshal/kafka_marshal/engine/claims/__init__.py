"""Leases: claimed, kept, let go; who else is there, and who shall have what."""
