"""``python -m game_server``: one instance of the game."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal

from game_server.db import create_tables, make_engine
from game_server.server import GameServer
from zzol_relay import Relay, Settings, Stream

__all__ = ["main", "run"]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m game_server", description="The reference game of zzol_relay.")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; the default is reachable from here only")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    parser.add_argument("--database-url", help="SQLAlchemy URL (default: ZZOL_DATABASE_URL)")
    parser.add_argument("--redis-url", help="default: ZZOL_REDIS_URL, or the Redis of this machine")
    parser.add_argument(
        "--origin", action="append", default=[], metavar="ORIGIN", help="a further origin that may connect; repeatable"
    )
    parser.add_argument("--shards", type=int, default=4, help="Redis keys of the stream; equal in all instances")
    parser.add_argument("--retention", type=float, default=600.0, help="seconds of stream to keep; 0 keeps all")
    parser.add_argument("--max-connections", type=int, default=10_000)
    parser.add_argument("--name", help="of this instance, in relay_instance")
    parser.add_argument("--log-level", default="WARNING")
    return parser.parse_args(argv)


async def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT; then close with 1012 and hand over what is under way."""
    given = {"database_url": arguments.database_url, "redis_url": arguments.redis_url}
    settings = Settings.load(**{name: value for name, value in given.items() if value})
    if not settings.database_url:
        raise SystemExit("give --database-url or ZZOL_DATABASE_URL")
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    engine = make_engine(settings.database_url)
    await asyncio.to_thread(create_tables, engine)
    stream = Stream(name="room", shards=arguments.shards, retention=arguments.retention)
    relay = Relay(engine, [stream], settings=settings, name=arguments.name)
    async with relay:
        server = GameServer(relay, engine, origins=arguments.origin, max_connections=arguments.max_connections)
        host, port = await server.start(arguments.host, arguments.port)
        shown = f"[{host}]" if ":" in host else host
        # Whoever started it reads this.
        print(f"game_server: http://{shown}:{port}/", flush=True)
        try:
            await stopping.wait()
        finally:
            await server.stop()
    await asyncio.to_thread(engine.dispose)


def main(argv: list[str] | None = None) -> None:
    """Parse arguments and run."""
    arguments = _arguments(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # A line for each page and socket would bury the rest.
    logging.getLogger("websockets").setLevel(max(logging.WARNING, logging.getLogger().level))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
