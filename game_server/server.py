"""The server: WebSocket clients on one side, the relay on the other.

Both paths of the relay meet here: a room is created in a database transaction with its event (Z22), joins and taps go
direct (Z20). Everything that clients see comes back through the tail and the hub, so that every instance shows the
same, in the same order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from game_server.db import create_room, make_code, start_room
from game_server.pages import SOCKET_PATH, origin_allowed, plain, static
from game_server.protocol import (
    ClientMessage,
    Create,
    Created,
    Join,
    Joined,
    ProtocolError,
    Refused,
    ServerMessage,
    Start,
    Started,
    Tap,
    decode,
    encode,
    event_frame,
)
from game_server.rooms import Applied, Room, Rooms, TokenBucket, clean_name, is_code
from zzol_relay import BrokerUnavailableError, Entry, Event, PublishUncertainError, Relay, RelayError
from zzol_relay.hub import Frames, Hub, WebSocketConnection

__all__ = ["MAX_MESSAGE", "MESSAGES_PER_SECOND", "GameServer"]

_log = logging.getLogger("game_server")

MAX_MESSAGE = 16 * 1024
MESSAGES_PER_SECOND = 20.0
JOIN_TIMEOUT = 5.0
"""How long a join waits for its own entry to come back (Z17)."""
CREATE_WAIT = 0.1
"""How long a committed creation waits for its entry before the host is told that it comes later."""
_CODE_ATTEMPTS = 8


@dataclasses.dataclass(eq=False, slots=True)
class _Player:
    """One client's connection, and where it is."""

    connection: WebSocketConnection
    bucket: TokenBucket
    room: str | None = None
    name: str = ""
    host: bool = False


class GameServer:
    """One instance. ``relay`` must be started, and its stream ``room`` declared; ``engine`` is the game's own."""

    def __init__(
        self,
        relay: Relay,
        engine: Engine,
        *,
        origins: Collection[str] = (),
        max_connections: int = 10_000,
    ) -> None:
        self.hub = Hub()
        self.rooms = Rooms()
        self._relay = relay
        self._engine = engine
        self._origins = frozenset(origins)
        self._max_connections = max_connections
        self._players: set[_Player] = set()
        # Who waits for which entry. Nothing in here is a room: a creation that rolls back leaves nothing behind.
        self._creators: dict[str, tuple[_Player, asyncio.Future[None]]] = {}
        self._joiners: dict[str, tuple[_Player, asyncio.Future[Applied]]] = {}
        self._server: Server | None = None
        self._draining = False
        self._tail = relay.tail("room", self.listen)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Read the stream and take connections; returns the address bound."""
        await self._tail.start()
        self._server = await serve(
            self._handle,
            host,
            port,
            process_request=self._process_request,
            compression=None,
            max_size=MAX_MESSAGE,
            server_header=None,
        )
        address: tuple[Any, ...] = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def stop(self) -> None:
        """Refuse new connections, close the present ones with 1012 ("come back"), stop reading."""
        self._draining = True
        if self._server is not None:
            self._server.close(code=1012, reason="the server restarts")
            await self._server.wait_closed()
        await self._tail.stop()

    # -- what the stream brings

    def listen(self, stream: str, entries: Sequence[Entry]) -> None:
        """Fold what one read brought, and pass it on: one write a connection for all that its room got."""
        gathered: dict[str, list[bytes]] = {}
        for entry in entries:
            applied = self.rooms.apply(entry)
            if applied is None:
                continue
            code = applied.room.code
            if applied.kind == "joined":
                joiner = self._joiners.pop(entry.event_id, None)
                if joiner is not None:
                    self._let_in(joiner[0], applied, gathered)
                    _resolve(joiner[1], applied)
                if applied.refused:
                    continue
            elif applied.kind == "created" and code in self._creators:
                creator, arrived = self._creators.pop(code)
                self.hub.join(code, creator.connection)
                _resolve(arrived, None)
            gathered.setdefault(code, []).append(event_frame(entry))
        for code, messages in gathered.items():
            self.hub.publish(code, messages)
        for room in self.rooms.expire(entries[-1].milliseconds):
            self.hub.drop(room.code)

    def _let_in(self, player: _Player, applied: Applied, gathered: dict[str, list[bytes]]) -> None:
        if applied.refused or player not in self._players:
            return
        room = applied.room
        # Those inside get what came before; the newcomer begins with the room's creation, then its own arrival.
        self.hub.publish(room.code, gathered.pop(room.code, ()))
        self.hub.join(room.code, player.connection)
        self.hub.send(player.connection, Frames([event_frame(room.created)]))
        player.room, player.name = room.code, applied.player

    # -- what the clients send

    async def _handle(self, websocket: ServerConnection) -> None:
        player = _Player(WebSocketConnection(websocket), TokenBucket(MESSAGES_PER_SECOND, time.monotonic()))
        self._players.add(player)
        try:
            async for message in websocket:
                answer = await self._answer(player, message)
                if answer is not None:
                    self.hub.send(player.connection, Frames([encode(answer)]))
        except ConnectionClosed:
            pass
        finally:
            self._gone(player)

    async def _answer(self, player: _Player, message: str | bytes) -> ServerMessage | None:
        if not player.bucket.take(time.monotonic()):
            return Refused("rate", f"more than {MESSAGES_PER_SECOND:g} messages a second")
        try:
            request = decode(message)
        except ProtocolError as error:
            return Refused("invalid", str(error))
        try:
            return await self._do(player, request)
        except BrokerUnavailableError:
            return Refused("unavailable", "Redis is away; try again", request.ref)
        except PublishUncertainError:
            return Refused("uncertain", "nobody knows whether this went through", request.ref)
        except (RelayError, SQLAlchemyError):
            _log.exception("a request failed")
            return Refused("internal", "the server could not do this", request.ref)

    async def _do(self, player: _Player, request: ClientMessage) -> ServerMessage | None:
        match request:
            case Create():
                return await self._create(player, request)
            case Join():
                return await self._join(player, request)
            case Start():
                return await self._start(player, request)
            case Tap():
                if player.room is None:
                    return Refused("room", "join a room first", request.ref)
                data = {"player": player.name, "count": request.count, "sent": request.sent}
                await self._relay.publish(_event("tap", player.room, data))
                return None

    async def _create(self, player: _Player, request: Create) -> ServerMessage:
        name = clean_name(request.name)
        if name is None:
            return Refused("name", "a name is 1 to 10 printable characters", request.ref)
        if player.room is not None:
            return Refused("room", f"you are in room {player.room}", request.ref)
        for _ in range(_CODE_ATTEMPTS):
            code = make_code()
            if code in self._creators or self.rooms.get(code) is not None:
                continue
            # Before the transaction: its entry may be here before the commit has returned to this task.
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._creators[code] = (player, arrived)
            new = None
            try:
                new = await asyncio.to_thread(create_room, self._engine, self._relay, name, code)
            finally:
                if new is None:
                    self._creators.pop(code, None)
            if new is None:
                continue
            player.room, player.name, player.host = code, name, True
            await asyncio.wait((arrived,), timeout=CREATE_WAIT)
            return Created(code, not arrived.done(), new.committed_at, request.ref)
        return Refused("internal", "no free room code was found", request.ref)

    async def _join(self, player: _Player, request: Join) -> ServerMessage:
        name = clean_name(request.name)
        if name is None:
            return Refused("name", "a name is 1 to 10 printable characters", request.ref)
        if player.room is not None:
            return Refused("room", f"you are in room {player.room}", request.ref)
        code = request.room.upper()
        if not is_code(code) or self.rooms.get(code) is None:
            return Refused("room", f"there is no room {code}", request.ref)
        entered: asyncio.Future[Applied] = asyncio.get_running_loop().create_future()
        event = _event("room.joined", code, {"player": name})
        event_id = str(event.event_id)
        self._joiners[event_id] = (player, entered)
        try:
            await self._relay.publish(event)
            async with asyncio.timeout(JOIN_TIMEOUT):
                applied = await entered
        except TimeoutError:
            # It may still arrive, and nobody would be behind the name.
            self._relay.publish_soon(_event("room.left", code, {"player": name}))
            return Refused("uncertain", "the room has not answered", request.ref)
        finally:
            self._joiners.pop(event_id, None)
        if applied.refused == "name":
            return Refused("name", f"{name} is taken in room {code}", request.ref)
        if applied.refused == "full":
            return Refused("full", f"room {code} is full", request.ref)
        return Joined(code, list(applied.room.players), request.ref)

    async def _start(self, player: _Player, request: Start) -> ServerMessage:
        if player.room is None or not player.host:
            return Refused("room", "only the host starts the game", request.ref)
        committed_at = await asyncio.to_thread(start_room, self._engine, self._relay, player.room)
        if committed_at is None:
            return Refused("room", f"room {player.room} has started already", request.ref)
        return Started(player.room, committed_at, request.ref)

    def _gone(self, player: _Player) -> None:
        self._players.discard(player)
        self.hub.forget(player.connection)
        if player.room in self._creators and self._creators[player.room][0] is player:
            del self._creators[player.room]
        room: Room | None = self.rooms.get(player.room) if player.room else None
        if room is None or self._draining or player.name not in room.players:
            return
        try:
            self._relay.publish_soon(_event("room.left", room.code, {"player": player.name}))
        except RelayError:
            _log.warning("a departure could not be published", extra={"room": room.code})

    # -- HTTP

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return static(request.path) or plain(HTTPStatus.NOT_FOUND, "there is nothing here")
        if request.path != SOCKET_PATH:
            return plain(HTTPStatus.NOT_FOUND, f"the socket is at {SOCKET_PATH}")
        if not origin_allowed(request.headers.get("Origin"), request.headers.get("Host", ""), self._origins):
            return plain(HTTPStatus.FORBIDDEN, "this origin may not connect")
        if self._draining or len(self._players) >= self._max_connections:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, "try again later")
        return None


def _event(kind: str, code: str, data: dict[str, object]) -> Event:
    # The id is ours from the start, so that the entry can be recognised when it comes back.
    event_id = uuid.uuid4()
    return Event(type=kind, stream="room", aggregate_type="room", aggregate_id=code, event_id=event_id, data=data)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)
