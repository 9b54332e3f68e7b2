"""``python -m tests.campaigns.small_scope``."""

import sys

from tests.campaigns.small_scope.records import main

if __name__ == "__main__":
    sys.exit(main())
