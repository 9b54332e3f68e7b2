"""The command ``kafka-marshal``. This module loads without the extra ``[cli]``, to say which one to install."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kafka_marshal.errors import lacks_cli

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (see ``kafka_marshal.cli.failures``)."""
    try:
        from kafka_marshal.cli.app import run

        return run(args)
    except ModuleNotFoundError as error:
        if not lacks_cli(error):
            raise
        sys.stderr.write(
            f"error: the command needs the package {error.name!r}, which is not installed. Nothing was done.\n"
            "Install it with: pip install 'kafka-marshal[cli]'\n"
        )
        return 2
