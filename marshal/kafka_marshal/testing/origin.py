"""Where figures come from: the machine and the commit, as they stand beside them in files."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

__all__ = ["where_it_ran"]


def where_it_ran() -> dict[str, object]:
    """Cores, Python, and the commit of this source; "unknown" where it is installed without its history."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {"cores": os.cpu_count(), "python": platform.python_version(), "commit": commit}
