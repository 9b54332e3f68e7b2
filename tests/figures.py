"""Files in which campaigns keep their figures, with the machine and the commit that they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kafka_marshal.testing.simulate import where_it_ran


def keep_figures(path: Path, which: str, figures: Mapping[str, object]) -> None:
    """Write a campaign's figures, and where they come from, to its part of a file; other parts stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    found = {**known, which: {**where_it_ran(), **figures}}
    path.write_text(json.dumps(found, indent=2) + "\n")
