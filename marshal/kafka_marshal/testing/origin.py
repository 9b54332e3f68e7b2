"""Where figures come from: the machine and the commit, as they stand beside them in files."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

__all__ = ["where_it_ran"]


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


def _processor() -> str:
    if _PROCESSORS.exists():
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
