"""``python -m kafka_marshal.pipeline.zip [FILE]``: this package as a zip, for ``spark-submit --py-files``.

Works from an installed wheel or a clone. Its dependencies (confluent-kafka, msgpack, xxhash) are compiled and must be
installed where executors run.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import kafka_marshal
import rationalizer

__all__ = ["main", "write_zip"]


def write_zip(path: Path) -> Path:
    """Write the Python files of both packages to path, and return it; an older file is replaced."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (kafka_marshal, rationalizer):
            folder = Path(package.__file__ or "").parent
            for file in sorted(folder.rglob("*.py")):
                archive.write(file, file.relative_to(folder.parent))
    return path


def main() -> int:
    """Write it, and print its path."""
    sys.stdout.write(f"{write_zip(Path(*sys.argv[1:2] or ['kafka-marshal.zip']))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
