"""``python -m kafka_marshal``: the command, if the script kafka-marshal is not on the path."""

from __future__ import annotations

import sys

from kafka_marshal.cli import main

if __name__ == "__main__":
    sys.exit(main())
