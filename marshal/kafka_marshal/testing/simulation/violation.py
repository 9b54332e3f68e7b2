"""A broken promise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise."""

    #: Which one: "two owners", "lost", "repeated" …
    promise: str
    message: str
    at_ms: float

    def __str__(self) -> str:
        return f"{self.promise}: {self.message} (at {self.at_ms:.1f} ms)"
