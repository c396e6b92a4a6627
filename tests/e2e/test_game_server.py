"""The game server with real clients: rooms by way of the outbox, taps direct, all back through tail and hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from game_server.db import GameRoom, create_tables, make_code
from game_server.players import Player, Received, RefusedError
from game_server.rooms import is_code
from game_server.server import GameServer
from tests.support.streams import entries
from zzol_relay import Event, Relay, Settings, Stream
from zzol_relay.embedded import RedisServer
from zzol_relay.store.migrate import upgrade
from zzol_relay.store.tables import Tables

FAST: dict[str, Any] = {
    "poll_interval": 0.05,
    "probe_base": 0.02,
    "probe_cap": 0.1,
    "redis_timeout": 0.5,
    "born_lease": 0.3,
    "commit_wait": 0.25,
}


@contextlib.asynccontextmanager
async def serving(engine: Engine, redis_url: str, **options: Any) -> AsyncIterator[tuple[GameServer, str]]:
    """An instance; yields it and its host:port."""
    create_tables(engine)
    Tables("zzol_", None).metadata.create_all(engine)
    settings = Settings.load({}, redis_url=redis_url, **FAST)
    async with Relay(engine, [Stream(name="room", shards=2)], settings=settings) as relay:
        server = GameServer(relay, engine, **options)
        host, port = await server.start("127.0.0.1", 0)
        try:
            yield server, f"{host}:{port}"
        finally:
            await server.stop()


@contextlib.asynccontextmanager
async def playing(address: str, *names: str) -> AsyncIterator[list[Player]]:
    """Connected players."""
    players = [Player(f"ws://{address}/ws", name) for name in names]
    await asyncio.gather(*(player.connect() for player in players))
    try:
        yield players
    finally:
        await asyncio.gather(*(player.close() for player in players))


async def got(player: Player, kind: str, count: int = 1, timeout: float = 10.0) -> list[Received]:
    """Wait until the player has got so many events of a type."""
    async with asyncio.timeout(timeout):
        while len(found := [received for received in player.log if received.type == kind]) < count:
            await asyncio.sleep(0.005)
    return found


def kinds(player: Player) -> list[str]:
    return [received.type for received in player.log]


def test_a_room_is_created_in_one_transaction_and_comes_back_through_the_stream(
    sqlite_engine: Engine, redis_server: RedisServer, redis_client: Any
) -> None:
    """Z6, Z22, Z23: row, outbox row, entry, and the creator's first frame."""

    async def scenario() -> Player:
        async with serving(sqlite_engine, redis_server.url) as (server, address), playing(address, "ann") as (ann,):
            created = await ann.create()
            assert is_code(created.room)
            assert not created.waiting
            await got(ann, "room.created")
            assert server.rooms.get(created.room) is not None
            return ann

    ann = asyncio.run(scenario())
    (entry,) = [entry for entry in entries(redis_client, "room", 2) if entry.type == "room.created"]
    with sqlite_engine.connect() as connection:
        assert connection.execute(text("SELECT code, host, state FROM game_room")).all() == [(ann.room, "ann", "READY")]
        rows = connection.execute(text("SELECT aggregate_id, sequence FROM zzol_outbox_event")).all()
    assert rows == [(ann.room, 1)]
    assert ann.log[0].id == entry.entry_id
    assert (ann.log[0].type, ann.log[0].sequence, ann.log[0].data) == ("room.created", 1, {"host": "ann"})


def test_players_at_two_instances_see_the_same_story(
    engine: Engine, redis_server: RedisServer, redis_client: Any
) -> None:
    """Z1, Z3: the other instance hears of the room; whoever joins gets its creation first, then all from then on."""

    async def scenario() -> None:
        async with (
            serving(engine, redis_server.url) as (_, one),
            serving(engine, redis_server.url) as (_, two),
            playing(one, "ann") as (ann,),
            playing(two, "bob", "cid") as (bob, cid),
        ):
            await ann.create()
            await got(ann, "room.created")
            await asyncio.sleep(0.1)
            await bob.join(ann.room)
            await asyncio.gather(*(bob.tap() for _ in range(10)), *(ann.tap() for _ in range(5)))
            await got(ann, "tap", 15)
            await cid.join(ann.room)
            await ann.start()
            await cid.tap()
            for player in (ann, bob, cid):
                await got(player, "room.started")
                await got(player, "tap", 1 if player is cid else 16)
            told = [e for e in entries(redis_client, "room", 2) if e.subject == f"room/{ann.room}"]
            ids = [entry.entry_id for entry in told]
            arrived = {entry.data["player"]: i for i, entry in enumerate(told) if entry.type == "room.joined"}
            assert [received.id for received in ann.log] == ids
            assert [received.id for received in bob.log] == [ids[0], *ids[arrived["bob"] :]]
            assert [received.id for received in cid.log] == [ids[0], *ids[arrived["cid"] :]]

    asyncio.run(scenario())


def test_a_transaction_that_rolls_back_leaves_no_ghost(
    sqlite_engine: Engine, redis_server: RedisServer, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z2: neither in Redis nor in any instance's memory."""

    def failing(engine: Engine, relay: Relay, host: str, code: str) -> None:
        with Session(engine) as session, session.begin():
            session.add(GameRoom(code=code, host=host, state="READY", created_at=datetime(2026, 1, 1)))
            relay.record(
                session,
                Event(
                    type="room.created", stream="room", aggregate_type="room", aggregate_id=code, data={"host": host}
                ),
            )
            raise OperationalError("INSERT", {}, Exception("the disk is full"))

    async def scenario() -> None:
        async with serving(sqlite_engine, redis_server.url) as (server, address), playing(address, "ann") as (ann,):
            with monkeypatch.context() as patched:
                patched.setattr("game_server.server.create_room", failing)
                with pytest.raises(RefusedError) as refused:
                    await ann.create()
            assert refused.value.code == "internal"
            assert len(server.rooms) == 0
            assert not server._creators
            # The connection is as good as before.
            await ann.create()
            await got(ann, "room.created")
            assert len(server.rooms) == 1

    asyncio.run(scenario())
    assert sum(entry.type == "room.created" for entry in entries(redis_client, "room", 2)) == 1


def test_while_redis_is_away_rooms_are_committed_and_come_later_and_taps_are_refused(sqlite_engine: Engine) -> None:
    """Z4, Z7: the host is told that it waits, and gets room and start once, in order, when Redis is back."""

    async def scenario(redis: RedisServer) -> None:
        async with (
            serving(sqlite_engine, redis.url) as (server, address),
            playing(address, "ann", "bob", "cid") as (ann, bob, cid),
        ):
            await ann.create()
            await got(ann, "room.created")
            await asyncio.to_thread(redis.kill)
            await ann.tap()
            created = await bob.create()
            await bob.start()
            assert created.waiting
            assert server.rooms.get(bob.room) is None
            with pytest.raises(RefusedError) as unknown:
                await cid.join(bob.room)
            assert unknown.value.code == "room"
            with pytest.raises(RefusedError) as away:
                await cid.join(ann.room)
            assert away.value.code in ("unavailable", "uncertain")
            assert next(iter(ann.refused.values())) in ("unavailable", "uncertain")
            assert bob.log == []
            await asyncio.to_thread(redis.start)
            await got(bob, "room.started")
            assert kinds(bob) == ["room.created", "room.started"]
            await cid.join(bob.room)
            await ann.tap()
            await got(ann, "tap")
            assert len(ann.refused) == 1

    with RedisServer(config={"appendonly": "yes"}) as redis:
        asyncio.run(scenario(redis))


def test_the_rules_of_names_rooms_and_places(sqlite_engine: Engine, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        names = ["host", *(f"p{n}" for n in range(9)), "HOST", "\u202e", "late"]
        async with serving(sqlite_engine, redis_server.url) as (_, address), playing(address, *names) as players:
            host, *others, twin, unprintable, late = players

            async def refused(action: Any) -> str:
                with pytest.raises(RefusedError) as error:
                    await action
                return error.value.code

            assert await refused(late.start()) == "room"
            assert await refused(unprintable.create()) == "name"
            await host.create()
            await got(host, "room.created")
            assert await refused(host.create()) == "room"
            assert await refused(late.join("AAAA")) == "room"
            assert await refused(late.join(make_code())) == "room"
            assert await refused(twin.join(host.room)) == "name"
            for player in others[:8]:
                await player.join(host.room.lower())
            assert await refused(others[8].join(host.room)) == "full"
            assert await refused(others[0].start()) == "room"
            await host.start()
            assert await refused(host.start()) == "room"
            # A place that becomes free is taken again, and the leaver's name too.
            await others[0].close()
            await got(host, "room.left")
            late.name = "p0"
            await late.join(host.room)
            assert kinds(twin) == []

    asyncio.run(scenario())


def test_what_is_not_the_protocol_is_answered_with_an_error(sqlite_engine: Engine, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with serving(sqlite_engine, redis_server.url) as (_, address):
            async with connect(f"ws://{address}/ws", proxy=None) as socket:
                assert not socket.protocol.extensions
                for message in (
                    "{",
                    "[]",
                    '{"op": "fly"}',
                    '{"op": "create"}',
                    '{"op": "create", "name": "eleven long"}',
                    '{"op": "create", "name": "ann", "admin": true}',
                    '{"op": "tap", "count": 1000}',
                    b'{"op": "tap"}',
                    '{"op": "tap"}',
                ):
                    await socket.send(message)
                    answer = json.loads(await socket.recv())
                    assert answer["op"] == "error"
                    assert answer["code"] == ("room" if message == '{"op": "tap"}' else "invalid")
            async with connect(f"ws://{address}/ws", proxy=None) as socket:
                for _ in range(30):
                    await socket.send('{"op": "tap"}')
                codes = [json.loads(await socket.recv())["code"] for _ in range(30)]
                assert codes[:20] == ["room"] * 20
                assert codes.count("rate") >= 8
                await socket.send('{"op": "create", "name": "' + "x" * 20_000 + '"}')
                with pytest.raises(ConnectionClosed):
                    await socket.recv()
                assert socket.close_code == 1009

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://{address}", True),
        ("https://game.example", True),
        ("http://evil.example", False),
        ("null", False),
        ("http://127.0.0.1:1", False),
    ],
)
def test_pages_of_strangers_may_not_connect(
    origin: str | None, allowed: bool, sqlite_engine: Engine, redis_server: RedisServer
) -> None:
    """CORS does not cover WebSockets."""

    async def scenario() -> None:
        listed = ["https://game.example"]
        async with serving(sqlite_engine, redis_server.url, origins=listed) as (_, address):
            shown: Any = origin and origin.format(address=address)
            if allowed:
                async with connect(f"ws://{address}/ws", origin=shown, proxy=None):
                    return
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://{address}/ws", origin=shown, proxy=None)
            assert refused.value.response.status_code == 403

    asyncio.run(scenario())


def test_the_page_is_served_with_a_policy_and_without_inline_script(
    sqlite_engine: Engine, redis_server: RedisServer
) -> None:
    def fetch(url: str) -> tuple[int, dict[str, str], str]:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status, dict(response.headers), response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read().decode()

    async def scenario() -> None:
        async with serving(sqlite_engine, redis_server.url) as (_, address):
            status, headers, body = await asyncio.to_thread(fetch, f"http://{address}/")
            assert status == 200
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "<script>" not in body
            assert "style=" not in body
            script = await asyncio.to_thread(fetch, f"http://{address}/app.js")
            assert script[1]["Content-Type"].startswith("text/javascript")
            assert "innerHTML" not in script[2]
            for path in ("/ws", "/../server.py", "/static/app.js"):
                assert (await asyncio.to_thread(fetch, f"http://{address}{path}"))[0] == 404

    asyncio.run(scenario())


def test_sigterm_closes_with_1012_and_ends(
    sqlite_url: str, redis_server: RedisServer, run_child: Callable[..., Any]
) -> None:
    """``python -m game_server``: clients are told to come back, and nothing is left undone."""
    engine = create_engine(sqlite_url)
    upgrade(engine, Settings.load({}))
    script = "from game_server.__main__ import main\nmain(['--port', '0', '--log-level', 'ERROR'])"
    child = run_child(script, ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=redis_server.url)
    address = child.wait_for_line("game_server: ").split("/")[2]

    async def scenario() -> None:
        async with playing(address, "ann") as (ann,):
            await ann.create()
            await got(ann, "room.created")
            child.kill(signal.SIGTERM)
            async with asyncio.timeout(10):
                while ann.closed_by is None:
                    await asyncio.sleep(0.01)
            assert ann.closed_by == 1012

    asyncio.run(scenario())
    child.wait()
    assert child.errors == ""
    with engine.connect() as connection:
        assert connection.execute(text("SELECT status FROM zzol_outbox_event")).scalars().all() == ["PUBLISHED"]
    engine.dispose()
