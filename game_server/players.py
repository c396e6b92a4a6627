"""Simulated players: real WebSocket clients that write down all they get."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from game_server.protocol import (
    Create,
    Created,
    EventFrame,
    Join,
    Joined,
    Refused,
    ServerMessage,
    Start,
    Started,
    Tap,
)

__all__ = ["Player", "Received", "RefusedError"]

_decoder = msgspec.json.Decoder(ServerMessage)
_encoder = msgspec.json.Encoder()
_ANSWER_TIMEOUT = 15.0


class RefusedError(Exception):
    """The server refused a request; ``code`` is its reason."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.code = refused.code


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """One event frame. ``at`` is when it came: Unix time in milliseconds, as ``committed_at`` and ``sent`` are."""

    at: float
    id: str
    event_id: str
    type: str
    sequence: int | None
    data: dict[str, Any]


class Player:
    """One client. ``url`` is the server's ``ws://…/ws``."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.room = ""
        self.host = False
        self.created: Created | None = None
        self.committed: dict[str, float] = {}
        """When this host's changes were committed, by the event's type."""
        self.log: list[Received] = []
        self.taps: dict[int, float] = {}
        """What was sent, by ``ref``: its ``sent``."""
        self.refused: dict[int, str] = {}
        """Which taps were refused, by ``ref``: the code."""
        self.closed_by: int | None = None
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[ServerMessage]] = {}
        self._ref = 0

    async def connect(self) -> None:
        """Open the socket."""
        self._socket = await connect(self.url, compression=None, proxy=None, max_queue=None)
        self._reader = asyncio.create_task(self._read(), name=f"player {self.name}")

    async def create(self) -> Created:
        """Make a room; returns when it is committed. Raises ``RefusedError``."""
        self.host = True
        answer = await self._ask(lambda ref: Create(self.name, ref))
        assert isinstance(answer, Created)
        self.room, self.created = answer.room, answer
        self.committed["room.created"] = answer.committed_at
        return answer

    async def start(self) -> None:
        """Begin the game; returns when that is committed. Raises ``RefusedError``."""
        answer = await self._ask(lambda ref: Start(ref))
        assert isinstance(answer, Started)
        self.committed["room.started"] = answer.committed_at

    async def join(self, room: str) -> None:
        """Enter a room. Raises ``RefusedError``."""
        answer = await self._ask(lambda ref: Join(room, self.name, ref))
        assert isinstance(answer, Joined)
        self.room = room

    async def tap_for_ever(self, per_second: float, pick: random.Random) -> None:
        """Tap at about that rate until cancelled or disconnected."""
        while self.closed_by is None:
            await asyncio.sleep(pick.uniform(0.5, 1.5) / per_second)
            await self.tap()

    async def tap(self) -> None:
        """Tap once; whether it was refused shows in ``refused``."""
        assert self._socket is not None
        self._ref += 1
        sent = time.time() * 1000
        self.taps[self._ref] = sent
        try:
            await self._socket.send(_encoder.encode(Tap(1, sent, self._ref)).decode())
        except ConnectionClosed:
            self.refused[self._ref] = "closed"

    async def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await self._reader

    async def _ask(self, make: Any) -> ServerMessage:
        assert self._socket is not None
        self._ref += 1
        ref = self._ref
        answer: asyncio.Future[ServerMessage] = asyncio.get_running_loop().create_future()
        self._waiting[ref] = answer
        try:
            await self._socket.send(_encoder.encode(make(ref)).decode())
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                result = await answer
        finally:
            del self._waiting[ref]
        if isinstance(result, Refused):
            raise RefusedError(result)
        return result

    async def _read(self) -> None:
        assert self._socket is not None
        try:
            async for frame in self._socket:
                at = time.time() * 1000
                message = _decoder.decode(frame)
                if isinstance(message, EventFrame):
                    data = msgspec.json.decode(message.data)
                    self.log.append(Received(at, message.id, message.event_id, message.type, message.sequence, data))
                    continue
                ref = message.ref or 0
                if isinstance(message, Refused) and ref in self.taps:
                    self.refused[ref] = message.code
                elif ref in self._waiting and not self._waiting[ref].done():
                    self._waiting[ref].set_result(message)
        except ConnectionClosed:
            pass
        finally:
            self.closed_by = self._socket.close_code or 1006
