"""The hub: which connections are in which room, and how a stream's entries reach them.

A frame is encoded once per entry, however many connections it goes to, and the frames that one read of the stream
brings for a room go to each connection as one write: the system call is most of a delivery's cost. Nobody is awaited.
A connection that does not keep up is dropped, never skipped: a gap would break an ordered stream, a new connection
resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from websockets.asyncio.connection import Connection as WebSocket

__all__ = [
    "CLOSE_SLOW",
    "MAX_BUFFERED",
    "Connection",
    "Frames",
    "Hub",
    "WebSocketConnection",
    "text_frame",
]

_log = logging.getLogger("zzol_relay.hub")

MAX_BUFFERED = 1024 * 1024
"""Unsent bytes at which a connection is dropped."""
CLOSE_SLOW = 4408
"""Close code of a connection that did not keep up: come back and resume."""


class Frames:
    """Messages (UTF-8 text) for one room, in order; encoded at most once, whoever writes them."""

    __slots__ = ("_wire", "messages")

    def __init__(self, messages: Sequence[bytes]) -> None:
        self.messages = tuple(messages)
        self._wire: bytes | None = None

    @property
    def wire(self) -> bytes:
        """All of them as unmasked WebSocket text frames, joined: what a server without extensions puts on the wire."""
        if self._wire is None:
            self._wire = b"".join(map(text_frame, self.messages))
        return self._wire


class Connection(Protocol):
    """What the hub needs of a connection. It must be hashable by identity."""

    @property
    def buffered(self) -> int:
        """Bytes written and not yet taken by the network."""
        ...

    def write(self, frames: Frames) -> None:
        """Write at once, without waiting: ``frames.wire`` in one piece where the transport takes raw frames, else one
        write per message. Does nothing on a connection that is closing."""
        ...

    def close(self, code: int, reason: str) -> None:
        """Close at once, unsent bytes and all; nothing is awaited."""
        ...


class Hub:
    """Rooms and their connections. For one event loop; holds no more than the connections that have joined."""

    def __init__(self, max_buffered: int = MAX_BUFFERED) -> None:
        self._max_buffered = max_buffered
        self._rooms: dict[str, dict[Connection, None]] = {}
        self._joined: dict[Connection, set[str]] = {}
        self.dropped = 0

    def join(self, room: str, connection: Connection) -> None:
        """Every later ``publish`` to ``room`` goes to ``connection`` too. Joining twice is joining once."""
        self._rooms.setdefault(room, {})[connection] = None
        self._joined.setdefault(connection, set()).add(room)

    def leave(self, room: str, connection: Connection) -> None:
        """The opposite; no error where it has not joined."""
        members = self._rooms.get(room)
        if members is not None:
            members.pop(connection, None)
            if not members:
                del self._rooms[room]
        rooms = self._joined.get(connection)
        if rooms is not None:
            rooms.discard(room)
            if not rooms:
                del self._joined[connection]

    def forget(self, connection: Connection) -> None:
        """Leave every room."""
        for room in tuple(self._joined.get(connection, ())):
            self.leave(room, connection)

    def drop(self, room: str) -> None:
        """Let every connection leave ``room``."""
        for connection in self.members(room):
            self.leave(room, connection)

    def members(self, room: str) -> tuple[Connection, ...]:
        """The connections in ``room``, in the order they joined."""
        return tuple(self._rooms.get(room, ()))

    def rooms(self, connection: Connection) -> frozenset[str]:
        """The rooms ``connection`` is in."""
        return frozenset(self._joined.get(connection, ()))

    def publish(self, room: str, messages: Iterable[bytes]) -> int:
        """Write messages to every connection of ``room``; returns to how many. Never raises for what one of them does.

        A connection with more than ``max_buffered`` unsent bytes, or whose write fails, is closed and has left when
        this returns; so it holds at most that much plus one call's messages.
        """
        members = self._rooms.get(room)
        if not members:
            return 0
        frames = Frames(tuple(messages))
        written = 0
        for connection in tuple(members):
            written += self.send(connection, frames)
        return written

    def send(self, connection: Connection, frames: Frames) -> bool:
        """Write to one connection, under the same limit; False where it was closed instead."""
        try:
            if connection.buffered <= self._max_buffered:
                connection.write(frames)
                return True
            reason = "too slow"
        except Exception:
            _log.warning("writing to a connection failed", exc_info=True)
            reason = "write failed"
        self.dropped += 1
        self.forget(connection)
        try:
            connection.close(CLOSE_SLOW, reason)
        except Exception:
            _log.warning("closing a connection failed", exc_info=True)
        return False


class WebSocketConnection:
    """A server connection of ``websockets`` (asyncio) for the hub.

    Without extensions the frames go straight to the transport, joined; with permessage-deflate, one by one through
    the protocol. The connection must not send fragmented messages beside it.
    """

    __slots__ = ("_open", "_raw", "websocket")

    def __init__(self, websocket: WebSocket) -> None:
        from websockets.protocol import OPEN

        self.websocket = websocket
        self._open = OPEN
        self._raw = not websocket.protocol.extensions

    @property
    def buffered(self) -> int:
        return self.websocket.transport.get_write_buffer_size()

    def write(self, frames: Frames) -> None:
        websocket = self.websocket
        if websocket.protocol.state is not self._open:
            return
        if self._raw:
            websocket.transport.write(frames.wire)
        else:
            for message in frames.messages:
                websocket.protocol.send_text(message)
            websocket.send_data()

    def close(self, code: int, reason: str) -> None:
        websocket = self.websocket
        if websocket.protocol.state is self._open:
            websocket.protocol.send_close(code, reason)
            websocket.send_data()
        # What is unsent is given up, usually the close frame with it: a client that sees 1006 resumes as well.
        websocket.transport.abort()


def text_frame(message: bytes) -> bytes:
    """A whole unmasked text frame (RFC 6455, 5.2), as a server sends it."""
    size = len(message)
    if size < 126:
        return b"\x81" + size.to_bytes(1, "big") + message
    if size < 65536:
        return b"\x81\x7e" + size.to_bytes(2, "big") + message
    return b"\x81\x7f" + size.to_bytes(8, "big") + message
