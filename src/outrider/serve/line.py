"""A connection's short way out, for pieces of streamed answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

NAME = "line"
"""Where a request's scope keeps it, under `state`."""


class Line:
    """Pieces of a body go to the socket at once, past the layers of the application and of the protocol, which would only frame
    them: at 64 streams those layers cost more than all else."""

    def __init__(self, protocol: H11Protocol) -> None:
        self._protocol = protocol

    def push(self, piece: bytes) -> bool:
        """Send a piece of a body that has begun and has no known length. False, and nothing sent, where that cannot be done at
        once: the client reads too slowly, has left, or speaks HTTP/1.0."""
        protocol = self._protocol
        if protocol.flow.write_paused or protocol.cycle.disconnected or protocol.transport.is_closing():
            return False
        if protocol.conn.our_state is not h11.SEND_BODY or protocol.conn.their_http_version != b"1.1":
            return False
        protocol.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True
