"""The partition plane (section 3): leases, the earliest claim wins."""
