"""The direct path for synchronous applications: one event, one exchange, on the caller's thread (Z20).

At most once, as the asyncio one: acknowledged or refused, and never sent again by itself. With ``once=True`` the
script remembers the event's id for the dedup window, so that the caller may send it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from zzol_relay.core.errors import (
    BrokerError,
    BrokerUnavailableError,
    InvalidEventError,
    PublishUncertainError,
    UnknownStreamError,
)
from zzol_relay.core.events import Event, encode_data, entry_fields, validate
from zzol_relay.core.observer import DirectPublished, Fact
from zzol_relay.core.policy import Blame, blame
from zzol_relay.core.sequence import Mode
from zzol_relay.settings import Settings, Stream
from zzol_relay.streams.connect import connect
from zzol_relay.streams.keys import ShardKeys, shard_of, stream_key
from zzol_relay.streams.publisher import PUBLISH_LUA, describe

__all__ = ["SyncPublisher"]

_CONNECTIONS = 8


class SyncPublisher:
    """Publishes from any thread; up to eight exchanges run at a time, further calls wait for ``redis_timeout``."""

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
        self._client = connect(settings.redis_url, timeout=settings.redis_timeout, max_connections=_CONNECTIONS)
        self._turns = threading.BoundedSemaphore(_CONNECTIONS)
        # Redis's own clock, as its entry ids tell it: a client whose clock runs ahead must not trim what is fresh.
        self._clocks: dict[str, int] = {}
        self._sha = ""

    def publish(self, event: Event, *, once: bool = False) -> str:
        """Publish one event; returns its entry id. As ``Relay.publish_sync``."""
        validate(event)
        if once and event.event_id is None:
            raise InvalidEventError("event_id", "once=True tells a resend by the event's id; give it one")
        stream = self._streams.get(event.stream)
        if stream is None:
            raise UnknownStreamError(event.stream, tuple(self._streams))
        data = encode_data(event.data, self._settings.max_payload_bytes)
        event = self._complete(event)
        key = stream_key(
            self._settings.key_prefix,
            event.stream,
            shard_of(event.aggregate_id or str(event.event_id), stream.shards),
        )
        fields = entry_fields(event, data, self._settings.source)
        if not self._turns.acquire(timeout=self._settings.redis_timeout):
            raise BrokerUnavailableError("too many events wait for Redis already; nothing was written")
        try:
            if once:
                entry = self._run_script(key, str(event.event_id), fields)
            else:
                entry = self._exchange(*self._xadd(key, round(stream.retention * 1000), fields))
        finally:
            self._turns.release()
        self._clocks[key] = int(entry.partition("-")[0])
        self._observe(DirectPublished(1))
        return entry

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def _xadd(self, key: str, retention_ms: int, fields: list[str | bytes]) -> tuple[Any, ...]:
        clock = self._clocks.get(key, 0)
        if clock and retention_ms:
            return ("XADD", key, "MINID", "~", str(max(0, clock - retention_ms)), "*", *fields)
        return ("XADD", key, "*", *fields)

    def _run_script(self, key: str, event_id: str, fields: list[str | bytes]) -> str:
        # RESTORE is the script's way to add an event outside the order that it has not seen: no tail, no epoch.
        dedup = str(round(self._settings.dedup_window * 1000))
        keys = (key, ShardKeys(key).shard, ShardKeys(key).seen(event_id), f"{key}:tail:", ShardKeys(key).seen(event_id))
        arguments = (len(keys), *keys, Mode.RESTORE.value, "", "0", "0", dedup, dedup, *fields)
        try:
            reply = self._exchange("EVALSHA", self._sha or "0" * 40, *arguments)
        except NoScriptError:
            self._sha = self._exchange("SCRIPT", "LOAD", PUBLISH_LUA)
            reply = self._exchange("EVALSHA", self._sha, *arguments)
        return reply.partition(" ")[2]

    def _exchange(self, *command: Any) -> str:
        """One command, one reply. Raises ``NoScriptError``, and ``BrokerError`` and its kin."""
        pool = self._client.connection_pool
        try:
            connection = pool.get_connection()
        except (RedisError, OSError) as error:
            raise BrokerUnavailableError(f"Redis cannot be reached; nothing was written: {describe(error)}") from error
        try:
            connection.send_command(*command, check_health=False)
            reply: str = connection.read_response()
        except NoScriptError:
            raise
        except (RedisConnectionError, RedisTimeoutError, ResponseError, OSError) as error:
            if not isinstance(error, ResponseError) and not getattr(error, "status_code", None):
                connection.disconnect()
                raise PublishUncertainError(f"the reply was lost: {describe(error)}") from error
            # LOADING and NOAUTH are connection errors to redis-py, but they are replies.
            broker = blame(describe(error)) is Blame.BROKER or not isinstance(error, ResponseError)
            refusal = BrokerUnavailableError if broker else BrokerError
            raise refusal(f"Redis refused the event; nothing was written: {describe(error)}") from error
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
        return reply
