"""Reading a stream's live end, for everyone: each instance sees every entry (Z1).

asyncio. One reader per shard, on a connection of its own, since a blocking read occupies it (and XREAD over several
slots fails on a cluster). The position is resolved once, at the start; reading from ``$`` again after a timeout would
lose entries.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from redis.exceptions import ResponseError

from zzol_relay.core.observer import DataLossDetected, Fact, LoopBeat, LoopFailed
from zzol_relay.core.policy import backoff
from zzol_relay.settings import Settings, Stream
from zzol_relay.streams.connect import connect_async
from zzol_relay.streams.keys import stream_keys
from zzol_relay.streams.publisher import describe

__all__ = ["Entry", "Listener", "Tail"]

_log = logging.getLogger("zzol_relay.tail")

_BATCH = 500
_BLOCK = 2.0
# Players watch: whoever waits to reconnect costs more than an attempt does.
_LONGEST_PAUSE = 0.5


class Entry:
    """One entry of a stream; ``id`` is its entry id. Fields are read when asked for."""

    __slots__ = ("_fields", "_raw", "id")

    def __init__(self, id: str, raw: Sequence[bytes]) -> None:
        self.id = id
        self._raw = raw
        self._fields: dict[str, bytes] | None = None

    @property
    def fields(self) -> dict[str, bytes]:
        """All fields as they stand there, by name."""
        if self._fields is None:
            pairs = iter(self._raw)
            self._fields = {name.decode(): value for name, value in zip(pairs, pairs, strict=False)}
        return self._fields

    @property
    def milliseconds(self) -> int:
        """When Redis took it: Unix time by Redis's clock, from the entry id."""
        return int(self.id.partition("-")[0])

    @property
    def event_id(self) -> str:
        """The event's id; '' where the entry is not one of ours."""
        return self._text("id")

    @property
    def type(self) -> str:
        """The event's type; '' where the entry is not one of ours."""
        return self._text("type")

    @property
    def aggregate_type(self) -> str | None:
        """None for an event without aggregate."""
        return self._text("subject").partition("/")[0] or None

    @property
    def aggregate_id(self) -> str | None:
        """None for an event without aggregate."""
        return self._text("partitionkey") or None

    @property
    def sequence(self) -> int | None:
        """None for direct events, which carry none unless given."""
        text = self._text("sequence")
        return int(text) if text else None

    @property
    def schema_version(self) -> int:
        """1 where the entry says nothing."""
        return int(self._text("schemaversion") or 1)

    @property
    def time(self) -> str:
        """When it occurred: RFC 3339, UTC."""
        return self._text("time")

    @property
    def correlation_id(self) -> str | None:
        """None where there is none."""
        return self._text("correlationid") or None

    @property
    def causation_id(self) -> str | None:
        """None where there is none."""
        return self._text("causationid") or None

    @property
    def data(self) -> bytes:
        """The event's data: JSON."""
        return self.fields.get("data", b"null")

    def json(self) -> Any:
        """The event's data, decoded. Raises ``ValueError`` where it is not JSON."""
        return json.loads(self.data)

    def __repr__(self) -> str:
        return f"Entry({self.id}, {self.type}, {self.aggregate_id})"

    def _text(self, name: str) -> str:
        return self.fields.get(name, b"").decode(errors="replace")


_running: set[Tail] = set()
"""Started tails: a task that nobody refers to may be collected in silence."""

Listener = Callable[[str, Sequence[Entry]], None]
"""Called on the event loop with the stream's name and what one read brought of one shard, in order. Must be quick."""


class Tail:
    """Hands every entry that comes after ``start()`` to each listener, once and in order per shard.

    It outlives restarts and silences of Redis, and goes on behind the last entry it read. Only where Redis came back
    without that entry (emptied, or older) does it read what is there from its beginning; that is logged, announced as
    ``DataLossDetected``, and listeners may see restored entries again. A listener that raises is logged and counted
    in ``listener_errors``; the others and the reading go on. Holds at most one read (500 entries) per shard.
    """

    def __init__(
        self,
        settings: Settings,
        stream: Stream,
        listeners: Sequence[Listener] = (),
        observe: Callable[[Fact], None] = lambda fact: None,
    ) -> None:
        self.stream = stream.name
        self.listener_errors = 0
        self._listeners = tuple(listeners)
        self._observe = observe
        keys = stream_keys(settings.key_prefix, stream.name, stream.shards)
        self._readers = [_Reader(settings, key, self._deliver, observe) for key in keys]
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, listener: Listener) -> None:
        """Add a listener; it hears every later entry."""
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Forget a listener; no error if it is not there."""
        self._listeners = tuple(kept for kept in self._listeners if kept != listener)

    @property
    def positions(self) -> dict[str, str]:
        """The id of the last entry read, by shard key; '' where Redis was never reached."""
        return {reader.key: reader.position for reader in self._readers}

    async def start(self) -> Self:
        """Resolve where to start, and read from there on in tasks of this loop.

        When it returns and Redis is up, every entry added from now on is delivered. Where Redis is away it returns
        too; reading then begins, once Redis is there, at the time of this call by Redis's clock.
        """
        if not self._tasks:
            _running.add(self)
            await asyncio.gather(*(reader.resolve() for reader in self._readers))
            self._tasks = [
                asyncio.create_task(reader.run(), name=f"zzol-relay-tail-{reader.key}") for reader in self._readers
            ]
        return self

    async def stop(self) -> None:
        """Stop reading; no listener is called any more when this returns. Safe to call twice."""
        _running.discard(self)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for reader in self._readers:
            await reader.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def _deliver(self, entries: Sequence[Entry]) -> None:
        for listener in self._listeners:
            try:
                listener(self.stream, entries)
            except Exception:
                self.listener_errors += 1
                _log.exception(
                    "a listener raised; it misses this batch",
                    extra={"stream": self.stream, "first": entries[0].id, "entries": len(entries)},
                )


class _Reader:
    """Reads one shard."""

    def __init__(
        self,
        settings: Settings,
        key: str,
        deliver: Callable[[Sequence[Entry]], None],
        observe: Callable[[Fact], None],
    ) -> None:
        self.key = key
        self.position = ""
        self._timeout = settings.redis_timeout
        self._base = settings.probe_base
        self._cap = min(settings.probe_cap, _LONGEST_PAUSE)
        self._deliver = deliver
        self._observe = observe
        self._client = connect_async(settings.redis_url, timeout=None, max_connections=1)
        self._connection: Any = None
        self._random = random.Random()
        self._wanted_since = 0.0

    async def resolve(self) -> None:
        """Find the stream's end, if Redis can be reached now."""
        self._wanted_since = time.monotonic()
        try:
            await self._connect()
            self.position = await self._last_id()
        except Exception as error:
            _log.warning("cannot read the stream yet", extra={"key": self.key, "error": describe(error)})
            await self._disconnect()

    async def run(self) -> None:
        """Read and deliver for ever; ends by cancellation alone."""
        failures = 0
        while True:
            try:
                if self._connection is None:
                    await self._connect()
                    await self._reposition()
                    if failures:
                        _log.warning("reading the stream again", extra={"key": self.key, "behind": self.position})
                started = time.monotonic()
                await self._read_once()
                failures = 0
                self._observe(LoopBeat(f"tail {self.key}", time.monotonic() - started))
                # A reply that had arrived already does not yield to the loop.
                await asyncio.sleep(0)
            except Exception as error:
                failures += 1
                pause = backoff(failures, self._random.random(), base=self._base, cap=self._cap)
                if failures == 1:
                    text = describe(error) or type(error).__name__
                    _log.warning("reading the stream failed", extra={"key": self.key, "error": text})
                self._observe(LoopFailed(f"tail {self.key}", repr(error), pause))
                await self._disconnect()
                await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connection."""
        await self._disconnect()
        await self._client.aclose()

    async def _read_once(self) -> None:
        # Longer than the block: a server that hangs, or a connection that is half open, is given up.
        block = str(round(_BLOCK * 1000))
        command = ("XREAD", "COUNT", str(_BATCH), "BLOCK", block, "STREAMS", self.key, self.position)
        reply = await self._ask(*command, timeout=_BLOCK + self._timeout)
        if reply:
            entries = [Entry(id_.decode(), raw or ()) for id_, raw in reply[0][1]]
            self.position = entries[-1].id
            self._deliver(entries)
        else:
            # Nothing came: a connected reader may be deaf all the same where the stream was emptied under it.
            await self._reposition()

    async def _reposition(self) -> None:
        last = await self._last_id()
        if not self.position:
            # Redis was away when we began: what came since then is ours too, by Redis's own clock.
            seconds, microseconds = await self._ask("TIME", timeout=self._timeout)
            waited = time.monotonic() - self._wanted_since
            began = int(seconds) * 1000 + int(microseconds) // 1000 - round(waited * 1000)
            self.position = min(last, f"{max(0, began)}-0", key=_order)
        elif _order(last) < _order(self.position):
            reason = f"the stream ends at {last}, before the last entry read, {self.position}"
            _log.error("Redis lost entries; reading what is there", extra={"key": self.key, "reason": reason})
            self.position = "0-0"
            self._observe(DataLossDetected(self.key, reason))

    async def _last_id(self) -> str:
        try:
            info = await self._ask("XINFO", "STREAM", self.key, timeout=self._timeout)
        except ResponseError as error:
            if "no such key" in str(error):
                return "0-0"
            raise
        found: bytes = dict(zip(info[::2], info[1::2], strict=True))[b"last-generated-id"]
        return found.decode()

    async def _connect(self) -> None:
        connection = self._connection = self._client.connection_pool.make_connection()
        async with asyncio.timeout(self._timeout):
            await connection.connect()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.disconnect(nowait=True)
            except Exception:
                _log.debug("closing a broken connection failed", exc_info=True)

    async def _ask(self, *command: str, timeout: float) -> Any:
        connection = self._connection
        async with asyncio.timeout(timeout):
            await connection.send_command(*command, check_health=False)
            return await connection.read_response()


def _order(entry: str) -> tuple[int, int]:
    ms, _, number = entry.partition("-")
    return (int(ms or 0), int(number or 0))
