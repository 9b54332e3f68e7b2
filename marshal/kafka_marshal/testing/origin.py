"""Where figures come from: the machine and the commit, as they stand beside them in files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["keep_figures", "where_it_ran"]


#: Where Linux tells the processor's name; elsewhere it is what Python knows.
_PROCESSORS = Path("/proc/cpuinfo")


def where_it_ran() -> dict[str, object]:
    """Processor, memory (GB), system, Python, and the commit of this source.

    The commit is "unknown" where it is installed without its history.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "commit": commit,
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def keep_figures(path: Path, which: str, figures: Mapping[str, object]) -> None:
    """Write a campaign's figures, and where they come from, to its part of a file; other parts stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    found = {**known, which: {**where_it_ran(), **figures}}
    path.write_text(json.dumps(found, indent=2) + "\n")


def _processor() -> str:
    if _PROCESSORS.exists():
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
