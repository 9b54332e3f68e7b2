"""Fenced, idempotent writes: rows, last offset and epoch in one transaction (C9)."""
