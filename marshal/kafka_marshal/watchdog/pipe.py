"""The worker's end of the connection to its watchdog. Packets arrive whole or not at all."""

from __future__ import annotations

import os
import socket

__all__ = ["NoRoomError", "Pipe"]

#: Connections of this process. A forked child may drop its copy of a Marshal and continue to handle its messages. If
#: that closed the connection, the watchdog would take the worker for dead (see process.py).
_open: set[socket.socket] = set()


class NoRoomError(Exception):
    """The watchdog has not read for long; what was to be sent was not."""


class Pipe:
    """Never blocks; open in forked children, closed by an exec."""

    def __init__(self) -> None:
        """Make a pair; ``theirs`` is for the watchdog."""
        # A pipe in all but name. A pipe proper would raise SIGPIPE, which some programs let kill them.
        self.theirs: socket.socket
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._identity = self._found()
        _open.add(self._socket)

    def fileno(self) -> int:
        """For poll()."""
        return self._socket.fileno()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self._socket.fileno())
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @property
    def is_ours(self) -> bool:
        """Whether the descriptor still is this connection: daemons close all they find, and numbers are used again."""
        return self._identity is not None and self._found() == self._identity

    def send(self, packet: bytes) -> None:
        """Send one packet. Raises NoRoomError, or OSError if the reader is gone."""
        try:
            self._socket.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise NoRoomError from None

    def receive(self, limit: int) -> bytes | None:
        """The next packet; None: there is none yet; b"": the other end is closed. Raises OSError."""
        while True:
            try:
                return self._socket.recv(limit)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # said once, before the rest, where the other side ended without reading everything

    def close(self) -> None:
        """Close both ends, where they are ours."""
        self.theirs.close()
        if not self.is_ours:
            self._socket.detach()  # the number may belong to another process by now
        self._socket.close()
        _open.discard(self._socket)
