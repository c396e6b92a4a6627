"""The direct path: events that belong to no database change go straight to their streams (Z19, Z20).

asyncio. What one turn of the event loop publishes goes out as one pipeline (83,000/s instead of 13,000/s). At most
once: an event is acknowledged or refused, and never sent again by itself. For events that go with a database change
there is ``record()``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hiredis import pack_command
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from zzol_relay.core.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigurationError,
    PublishUncertainError,
    UnknownStreamError,
)
from zzol_relay.core.events import Event, encode_data, entry_fields, validate
from zzol_relay.core.observer import DirectPublished, Fact
from zzol_relay.core.policy import Blame, blame
from zzol_relay.settings import Settings, Stream
from zzol_relay.streams.connect import connect_async
from zzol_relay.streams.keys import shard_of, stream_key
from zzol_relay.streams.publisher import describe

__all__ = ["MAX_PENDING", "DirectPublisher"]

_log = logging.getLogger("zzol_relay.direct")

MAX_PENDING = 20_000
"""Events that may wait to be sent; one more is refused with ``BrokerUnavailableError``."""
MAX_PENDING_BYTES = 32 * 1024 * 1024
"""Bytes of data that may wait to be sent; an event that would go past them is refused likewise."""
_PIPELINE = 1000
_PIPELINE_BYTES = 4 * 1024 * 1024


@dataclasses.dataclass(slots=True)
class _Waiting:
    key: str
    retention_ms: int
    fields: list[str | bytes]
    size: int
    answer: asyncio.Future[str]


class DirectPublisher:
    """Publishes from one event loop, the one of its first call, over one connection: entries of a key keep the order
    of the calls.

    ``complete`` fills in id and time (the clock and the randomness are its). Nothing connects before the first event.
    """

    def __init__(
        self,
        settings: Settings,
        streams: Mapping[str, Stream],
        complete: Callable[[Event], Event],
        observe: Callable[[Fact], None] = lambda fact: None,
    ) -> None:
        self._settings = settings
        self._streams = dict(streams)
        self._complete = complete
        self._observe = observe
        # No timeout of its own: one bounds the whole exchange.
        self._client = connect_async(settings.redis_url, timeout=None, max_connections=1)
        self._connection: Any = None
        self._pending: deque[_Waiting] = deque()
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        # Redis's own clock, as its entry ids tell it: a client whose clock runs ahead must not trim what is fresh.
        self._clocks: dict[str, int] = {}
        self.dropped = 0

    async def publish(self, event: Event) -> str:
        """Publish one event; returns its entry id. ``event.sequence`` is carried if given, never allocated.

        Raises ``EventError`` before anything is sent; ``BrokerUnavailableError`` when nothing was written, within
        ``redis_timeout``; ``PublishUncertainError`` when the reply was lost: the entry may or may not stand there;
        ``BrokerError`` when Redis refused this one. Cancelled before it was sent, it is not sent.
        """
        return await self._enqueue(event)[1]

    def publish_soon(self, event: Event) -> Event:
        """Queue one event without waiting; returns it completed. A later failure is logged and counted in ``dropped``.

        Raises what ``publish`` raises before it sends. Call it on the event loop's thread.
        """
        completed, answer = self._enqueue(event)
        answer.add_done_callback(self._note_dropped)
        return completed

    async def close(self) -> None:
        """Send what is queued, within ``redis_timeout``; then refuse whatever is left. No awaiter stays behind."""
        self._closed = True
        flusher = self._flusher
        if flusher is not None and flusher.get_loop() is asyncio.get_running_loop():
            self._wake.set()
            _, unfinished = await asyncio.wait((flusher,), timeout=self._settings.redis_timeout)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(flusher, return_exceptions=True)
        self._refuse_pending("the publisher was closed")
        await self._disconnect()
        await self._client.aclose()

    def _enqueue(self, event: Event) -> tuple[Event, asyncio.Future[str]]:
        validate(event)
        stream = self._streams.get(event.stream)
        if stream is None:
            raise UnknownStreamError(event.stream, tuple(self._streams))
        data = encode_data(event.data, self._settings.max_payload_bytes)
        event = self._complete(event)
        if self._closed:
            raise BrokerUnavailableError("the publisher was closed; nothing was written")
        if len(self._pending) >= MAX_PENDING or self._pending_bytes + len(data) > MAX_PENDING_BYTES:
            raise BrokerUnavailableError(f"{len(self._pending)} events wait for Redis already; nothing was written")
        loop = asyncio.get_running_loop()
        if self._flusher is None or self._flusher.done():
            self._flusher = loop.create_task(self._run(), name="zzol-relay-direct")
            self._loop = loop
        elif loop is not self._loop:
            raise ConfigurationError("this relay publishes from another event loop already; make one relay per loop")
        shard = shard_of(event.aggregate_id or str(event.event_id), stream.shards)
        key = stream_key(self._settings.key_prefix, event.stream, shard)
        answer: asyncio.Future[str] = loop.create_future()
        fields = entry_fields(event, data, self._settings.source)
        self._pending.append(_Waiting(key, round(stream.retention * 1000), fields, len(data), answer))
        self._pending_bytes += len(data)
        self._wake.set()
        return event, answer

    async def _run(self) -> None:
        """Send pipeline after pipeline, each when the one before it is answered: that keeps the order."""
        while True:
            if not self._pending:
                if self._closed:
                    return
                self._wake.clear()
                # Awakes in the loop's next turn, when all that this one publishes is queued.
                await self._wake.wait()
            batch = self._take()
            if batch:
                await self._send(batch)

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._pending and len(batch) < _PIPELINE and size < _PIPELINE_BYTES:
            waiting = self._pending.popleft()
            self._pending_bytes -= waiting.size
            if not waiting.answer.done():
                batch.append(waiting)
                size += waiting.size
        return batch

    async def _send(self, batch: list[_Waiting]) -> None:
        sent = False
        replies: list[Any] = []
        try:
            async with asyncio.timeout(self._settings.redis_timeout):
                connection = await self._connected()
                # redis-py's asyncio connection packs in Python, which would cost more than all the rest here.
                packed = b"".join([pack_command(self._command(waiting)) for waiting in batch])
                sent = True
                await connection.send_packed_command(packed, check_health=False)
                for _ in batch:
                    replies.append(await _read(connection))
        except (RedisError, OSError, TimeoutError) as error:
            await self._disconnect()
            self._settle(batch, replies)
            reason = str(error) or f"no answer within {self._settings.redis_timeout:g} s"
            self._fail(batch[len(replies) :], reason, sent)
            # What is queued behind was not sent at all; it would only wait for the same.
            self._refuse_pending(reason)
        except BaseException as error:
            # Cancelled, or a defect. Replies are still on the wire: the connection is of no more use.
            self._settle(batch, replies)
            self._fail(batch[len(replies) :], repr(error), sent)
            self._refuse_pending(repr(error))
            await self._disconnect()
            if not isinstance(error, Exception):
                raise
            _log.exception("a pipeline of direct events failed", extra={"events": len(batch)})
        else:
            self._settle(batch, replies)

    def _command(self, waiting: _Waiting) -> Any:
        clock = self._clocks.get(waiting.key, 0)
        if clock and waiting.retention_ms:
            horizon = str(max(0, clock - waiting.retention_ms))
            return ("XADD", waiting.key, "MINID", "~", horizon, "*", *waiting.fields)
        return ("XADD", waiting.key, "*", *waiting.fields)

    async def _connected(self) -> Any:
        connection = self._connection
        if connection is not None:
            # Unread data or an end of file: Redis went away while nothing was sent.
            if connection.is_connected and not await connection.can_read():
                return connection
            await self._disconnect()
        connection = self._connection = self._client.connection_pool.make_connection()
        await connection.connect()
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)

    def _settle(self, batch: list[_Waiting], replies: list[Any]) -> None:
        published = 0
        for waiting, reply in zip(batch, replies, strict=False):
            if isinstance(reply, bytes):
                published += 1
                entry = reply.decode()
                self._clocks[waiting.key] = int(entry.partition("-")[0])
                if not waiting.answer.done():
                    waiting.answer.set_result(entry)
                continue
            message = describe(reply)
            broker = blame(message) is Blame.BROKER or not isinstance(reply, ResponseError)
            refusal = BrokerUnavailableError if broker else BrokerError
            _raise_in(waiting, refusal(f"Redis refused the event; nothing was written: {message}"))
        if published:
            self._observe(DirectPublished(published))

    def _fail(self, unanswered: list[_Waiting], reason: str, sent: bool) -> None:
        for waiting in unanswered:
            if sent:
                error: BrokerError = PublishUncertainError(f"the reply was lost: {reason}")
            else:
                error = BrokerUnavailableError(f"Redis cannot be reached; nothing was written: {reason}")
            _raise_in(waiting, error)

    def _refuse_pending(self, reason: str) -> None:
        pending = list(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        self._fail(pending, reason, sent=False)

    def _note_dropped(self, answer: asyncio.Future[str]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is not None:
            self.dropped += 1
            _log.warning("an event published without waiting was not acknowledged", extra={"error": str(error)})


async def _read(connection: Any) -> Any:
    """One reply, error replies included. Raises only where the connection itself failed."""
    try:
        return await connection.read_response(disconnect_on_error=False)
    except (RedisConnectionError, RedisTimeoutError) as error:
        if not getattr(error, "status_code", None):
            raise
        # LOADING and NOAUTH are connection errors to redis-py, but they are replies: read on.
        return error
    except ResponseError as error:
        return error


def _raise_in(waiting: _Waiting, error: BrokerError) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)
