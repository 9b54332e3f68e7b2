"""Build the compiled core into a separate folder, never into the tree:

    python -m benchmarks.compiled [FOLDER]        (default: out/compiled)

The folder then holds a package `rationalizer` of the same source, its hot modules compiled by mypyc (setup.py says
which). Put it first on sys.path to use it. The same source is not built again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT_FOLDER = ROOT / "out" / "compiled"


class CompileError(RuntimeError):
    """The core could not be compiled, with the compiler's message. The pure Python core is not affected."""


def build(folder: Path = DEFAULT_FOLDER, level: str = "3") -> Path:
    """The folder with a compiled `rationalizer`, built if it is missing or of other source.

    level: the C compiler's, 0 … 3.
    """
    sources = [ROOT / "setup.py", *sorted((ROOT / "rationalizer").rglob("*.py"))]
    state = hashlib.sha256(
        b"".join(source.read_bytes() for source in sources) + (sys.version + level).encode()
    ).hexdigest()
    stamp = folder / "built-from"
    if stamp.is_file() and stamp.read_text() == state:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "rationalizer"
    shutil.copytree(ROOT / "rationalizer", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "setup.py", folder)
    run = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=folder,
        env={"KAFKA_MARSHAL_OPT_LEVEL": level, **os.environ, "KAFKA_MARSHAL_COMPILE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    built = list(package.glob("world.*.so")) + list(package.glob("world.*.pyd"))
    if run.returncode != 0 or not built:
        raise CompileError(f"mypyc or the C compiler failed; install mypy and a C compiler.\n{run.stdout}{run.stderr}")
    stamp.write_text(state)
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))
