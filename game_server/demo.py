"""``python -m game_server.demo``: both paths live, an outage of Redis in the middle, and a verdict from the evidence.

Starts a private database and Redis, one or two game servers (with MySQL two, so that players of one room sit at
different instances), and simulated players. Ends with 1 if anything was lost, duplicated or out of order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from sqlalchemy import Engine

from game_server import report
from game_server.db import create_tables, make_engine
from game_server.players import Player, RefusedError
from game_server.verdict import Verdict, judge, read_rows, read_streams
from zzol_relay import EmbeddedServiceError, Settings, migrate
from zzol_relay.embedded import RedisServer, StartedDatabase, start_database

__all__ = ["main"]

SHARDS = 4
_TAPS_PER_SECOND = 4.0
_ROOT = Path(__file__).resolve().parents[1]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m game_server.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--db",
        choices=("auto", "mysql", "sqlite"),
        default=os.environ.get("DB") or "auto",
        help="mysql: a private MariaDB or MySQL from PATH; auto: SQLite where there is none (default: $DB, or auto)",
    )
    parser.add_argument("--rooms", type=int, default=6, help="rooms to begin with")
    parser.add_argument("--players", type=int, default=4, help="players of each, 1 to 9")
    parser.add_argument("--before", type=float, default=6.0, help="seconds of play before the outage")
    parser.add_argument("--outage", type=float, default=5.0, help="seconds without Redis")
    parser.add_argument("--after", type=float, default=4.0, help="seconds of play after it")
    parser.add_argument("--instances", type=int, help="game servers (default: 2; with SQLite only 1)")
    parser.add_argument("--serve", action="store_true", help="leave it running for browsers at the end")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON and nothing else")
    parser.add_argument("--seed", type=int, default=1, help="of the players' pauses")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.players <= 9 or arguments.rooms < 1:
        parser.error("a room holds 1 to 9 players, and there must be one room")
    return arguments


@dataclasses.dataclass(slots=True)
class Show:
    """What is on stage."""

    arguments: argparse.Namespace
    console: Console
    engine: Engine
    redis: RedisServer
    urls: list[str]
    pick: random.Random
    players: list[Player] = dataclasses.field(default_factory=list)
    outage_rooms: list[Player] = dataclasses.field(default_factory=list)
    tappers: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.monotonic)
    redis_back_at: float = 0.0
    recovered_in: float = 0.0

    def socket(self, number: int) -> str:
        """The socket of an instance, the players spread over all."""
        return self.urls[number % len(self.urls)].replace("http", "ws", 1) + "ws"

    async def host(self) -> Player:
        """A new player with a new room, on any instance."""
        number = len(self.players)
        player = Player(self.socket(number), f"host{number}")
        self.players.append(player)
        await player.connect()
        await player.create()
        await player.start()
        return player

    async def guest(self, room: str) -> Player:
        """A new player in a room that another hosts."""
        number = len(self.players)
        player = Player(self.socket(number), f"guest{number}")
        self.players.append(player)
        await player.connect()
        for _ in range(20):
            try:
                await player.join(room)
                return player
            except RefusedError as error:
                # Another instance may learn of the room a moment later than the host's.
                if error.code not in ("room", "unavailable"):
                    raise
                await asyncio.sleep(0.1)
        raise RuntimeError(f"{player.name} could not join {room}")

    def start_tapping(self, *players: Player) -> None:
        """Let them tap until the end."""
        self.tappers += [asyncio.create_task(player.tap_for_ever(_TAPS_PER_SECOND, self.pick)) for player in players]


async def _in_order(show: Show) -> None:
    """Rooms are created and filled while everything works."""
    show.console.print(report.heading("Both paths, everything healthy"))
    show.console.print(report.columns())
    playing = asyncio.create_task(_play(show, show.arguments.before))
    for _ in range(show.arguments.rooms):
        host = await show.host()
        guests = [await show.guest(host.room) for _ in range(show.arguments.players - 1)]
        show.start_tapping(host, *guests)
    await _keep_creating(show, playing, 0.5)


async def _without_redis(show: Show) -> None:
    """Redis dies; rooms go on being created."""
    show.console.print(report.heading(f"Redis is killed for {show.arguments.outage:g} s; rooms go on being created"))
    show.console.print(report.columns())
    await asyncio.to_thread(show.redis.kill)
    playing = asyncio.create_task(_play(show, show.arguments.outage))
    show.outage_rooms += await _keep_creating(show, playing, 0.25)


async def _with_redis_again(show: Show) -> None:
    """Redis returns; the backlog drains, and the rooms of the outage are played in."""
    waiting = await asyncio.to_thread(_unpublished, show.engine)
    show.console.print(report.heading(f"Redis is back; {waiting} events wait in the outbox"))
    await asyncio.to_thread(show.redis.start)
    back = time.monotonic()
    show.redis_back_at = time.time() * 1000
    await _until(lambda: all(any(e.type == "room.started" for e in p.log) for p in show.outage_rooms), 15.0)
    show.recovered_in = time.monotonic() - back
    for line in report.backlog(show.outage_rooms, show.redis_back_at):
        show.console.print(line)
    for host in show.outage_rooms[:6]:
        show.start_tapping(host, await show.guest(host.room))
    show.console.print(report.columns())
    await _keep_creating(show, asyncio.create_task(_play(show, show.arguments.after)), 0.5)


async def _keep_creating(show: Show, playing: asyncio.Task[None], pause: float) -> list[Player]:
    """Create a room every ``pause`` seconds until ``playing`` is done; returns their hosts."""
    hosts: list[Player] = []
    while not playing.done():
        hosts.append(await show.host())
        await asyncio.wait((playing,), timeout=pause)
    await playing
    return hosts


async def _play(show: Show, seconds: float) -> None:
    """Let the players play; a line each second."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        since = time.time() * 1000
        await asyncio.sleep(min(1.0, left))
        waiting = await asyncio.to_thread(_unpublished, show.engine)
        show.console.print(
            report.second(show.players, since, time.monotonic() - show.began, waiting, show.redis.running)
        )


async def _settle(show: Show) -> Verdict:
    """Stop playing, wait until all is quiet, and call the witnesses."""
    for task in show.tappers:
        task.cancel()
    await asyncio.gather(*show.tappers, return_exceptions=True)
    deadline = time.monotonic() + 10.0
    while await asyncio.to_thread(_unpublished, show.engine) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    await _quiet(show.players)
    rows, codes = await asyncio.to_thread(read_rows, show.engine)
    entries = await asyncio.to_thread(read_streams, show.redis.url, SHARDS)
    return judge(rows, codes, entries, show.players)


async def _quiet(players: list[Player]) -> None:
    """Wait until no client has got anything for half a second, at most 5 s."""
    deadline = time.monotonic() + 5.0
    seen = -1
    while time.monotonic() < deadline:
        now = sum(len(player.log) for player in players)
        if now == seen:
            return
        seen = now
        await asyncio.sleep(0.5)


async def _until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


def _unpublished(engine: Engine) -> int:
    rows, _ = read_rows(engine)
    return sum(row.status != "PUBLISHED" for row in rows)


@contextlib.asynccontextmanager
async def _servers(count: int, database_url: str, redis_url: str) -> AsyncIterator[list[str]]:
    """Game servers as processes of their own; yields their URLs."""
    # By the environment, not the command line, which anybody on the machine can read.
    environment = {**os.environ, "ZZOL_DATABASE_URL": database_url, "ZZOL_REDIS_URL": redis_url}
    processes: list[asyncio.subprocess.Process] = []
    try:
        urls = []
        for number in range(count):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "game_server", "--port", "0", "--shards", str(SHARDS), "--retention", "0"),
                *("--name", f"game-{number + 1}", "--log-level", "CRITICAL"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                cwd=_ROOT,
                env=environment,
            )
            processes.append(process)
            assert process.stdout is not None
            async with asyncio.timeout(30.0):
                line = (await process.stdout.readline()).decode()
            if not line.startswith("game_server: "):
                raise RuntimeError("a game server ended while it started")
            urls.append(line.split()[1])
        yield urls
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in processes:
            try:
                async with asyncio.timeout(15.0):
                    await process.wait()
            except TimeoutError:
                process.kill()


async def _perform(
    arguments: argparse.Namespace, console: Console, database: StartedDatabase, redis: RedisServer
) -> int:
    engine = make_engine(database.url)
    await asyncio.to_thread(migrate, engine, settings=Settings.load({}))
    await asyncio.to_thread(create_tables, engine)
    sqlite = database.kind == "sqlite"
    instances = 1 if sqlite else arguments.instances or 2
    async with _servers(instances, database.url, redis.url) as urls:
        console.print(report.stage(database.description if not sqlite else "SQLite", redis.version, urls))
        show = Show(arguments, console, engine, redis, urls, random.Random(arguments.seed))
        try:
            await _in_order(show)
            await _without_redis(show)
            await _with_redis_again(show)
            verdict = await _settle(show)
        finally:
            for task in show.tappers:
                task.cancel()
        figures: dict[str, Any] = report.figures(show.players, show.outage_rooms, show.redis_back_at)
        figures |= {"database": database.kind, "instances": instances, "recovered_in_s": round(show.recovered_in, 3)}
        if arguments.json:
            summary = {"ok": verdict.ok, **dataclasses.asdict(verdict), **figures}
            sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
        else:
            for part in report.conclusion(verdict, figures):
                console.print(part)
        await asyncio.gather(*(player.close() for player in show.players), return_exceptions=True)
        if arguments.serve:
            console.print(f"\n[bold]Open {urls[0]}[/] in two windows; Ctrl-C ends it.", highlight=False)
            sys.stdout.flush()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
    engine.dispose()
    return 0 if verdict.ok else 1


async def _run(arguments: argparse.Namespace, console: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    # Entries that were acknowledged must survive the kill, as they would a restart of a Redis that persists.
    redis = RedisServer(config={"appendonly": "yes"})
    await asyncio.to_thread(redis.start)
    database = await asyncio.to_thread(start_database, "sqlite" if arguments.db == "sqlite" else None)
    with database:
        try:
            if database.kind == "sqlite":
                if arguments.db == "mysql":
                    raise EmbeddedServiceError(database.description)
                console.print(report.stand_in(arguments.db == "sqlite"))
            return await _perform(arguments, console, database, redis)
        finally:
            redis.stop()


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    arguments = _arguments(argv)
    console = Console(quiet=arguments.json, highlight=False, soft_wrap=False)
    try:
        return asyncio.run(_run(arguments, console))
    except EmbeddedServiceError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except asyncio.CancelledError:
        return 130


if __name__ == "__main__":
    sys.exit(main())
