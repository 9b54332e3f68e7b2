"""A child process that gets lines of JSON on its standard input and answers on its standard output."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any


class Child:
    """One process. Its standard input stays open; when it closes, the child knows that we have ended."""

    def __init__(
        self,
        argv: Sequence[str],
        heard: Callable[[Mapping[str, Any]], object],
        silent: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        """Start it. Raises OSError.

        heard: called with each line, on a separate thread; silent: called after the last one. options: of Popen.
        """
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
        )
        self._listener = threading.Thread(target=self._listen, args=(heard, silent), daemon=True)
        self._listener.start()

    def _listen(self, heard: Callable[[Mapping[str, Any]], object], silent: Callable[[], object]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # else it was killed while writing
                heard(json.loads(line))
        silent()

    def tell(self, **message: object) -> None:
        """Send a message; has no effect if the child has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close its standard input."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends within timeout_s. Then all its output was read, unless other processes hold its pipe."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._listener.join(timeout_s)
        if not self._listener.is_alive():
            self.hang_up()
            assert self.process.stdout is not None
            self.process.stdout.close()
        return True
