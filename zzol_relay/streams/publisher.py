"""Publishing through the script: batches of commands out, one outcome per command back.

Synchronous, for the relay's threads. It decides nothing about rows; it says what Redis said, whose fault an error is
(with a probe write where the reply alone does not tell), and keeps the epoch of each shard.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.resources import files
from typing import Any

import redis
from hiredis import pack_command
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from zzol_relay.core.errors import BrokerUnavailableError
from zzol_relay.core.observer import DataLossDetected, Fact
from zzol_relay.core.policy import Blame, blame
from zzol_relay.core.sequence import Mode
from zzol_relay.streams.connect import connect
from zzol_relay.streams.keys import ShardKeys
from zzol_relay.streams.presence import Presence, look_for

__all__ = ["Command", "Outcome", "OutcomeKind", "ScriptPublisher"]

_log = logging.getLogger("zzol_relay.streams")

PUBLISH_LUA = files(__package__).joinpath("publish.lua").read_text(encoding="utf-8")
EPOCH_LUA = files(__package__).joinpath("epoch.lua").read_text(encoding="utf-8")

_LOSSES = {
    "behind": "the stream is older than an acknowledged entry",
    "hole": "an acknowledged entry is gone, while older ones are there",
    "new": "Redis came back empty",
}

_SLICE = 50
"""Commands per write: Redis works on the first while the next are packed."""


class OutcomeKind(StrEnum):
    """What became of a command."""

    PUBLISHED = "PUBLISHED"
    """The entry stands in the stream; ``detail`` is its id."""
    DUPLICATE = "DUPLICATE"
    """It stood there already; ``detail`` is its id."""
    PAST = "PAST"
    """The sequence is not above the aggregate's tail, and the event id is not remembered."""
    DEFERRED = "DEFERRED"
    """The predecessor is not in the stream yet."""
    EPOCH = "EPOCH"
    """Redis lost data since the order was proven; prove it again."""
    UNAVAILABLE = "UNAVAILABLE"
    """Redis cannot be reached or refuses everybody; whether the entry stands there is unknown."""
    SHARD = "SHARD"
    """This shard cannot be written, though Redis is up."""
    EVENT = "EVENT"
    """The command failed by the event's own fault; ``detail`` is the error."""


_KINDS = {kind.value: kind for kind in OutcomeKind}


# Not frozen, though nobody changes one: freezing costs 1.5 µs of each of millions.
@dataclasses.dataclass(slots=True)
class Command:
    """One event for the script. ``fields`` is the entry, flat; ``epoch`` the one its order was proven under."""

    stream_key: str
    event_id: str
    mode: Mode
    fields: Sequence[str | bytes]
    epoch: str = ""
    aggregate: str | None = None
    sequence: int = 0
    prev_sequence: int = 0
    replay: int = 0


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of one command; see ``OutcomeKind`` for ``detail``."""

    kind: OutcomeKind
    detail: str = ""


@dataclasses.dataclass(slots=True)
class _Shard:
    epoch: str | None = None
    last_id: str = ""


class ScriptPublisher:
    """Sends commands to Redis as one pipeline and reads one outcome each. Safe to use from several threads.

    ``retentions`` maps the stream keys that this process declares to their retention in milliseconds (0: never trim);
    a worker that declares none leaves what the others set.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        dedup_window: float,
        tail_ttl: float,
        retentions: Mapping[str, int] | None = None,
        observe: Callable[[Fact], None] = lambda fact: None,
    ) -> None:
        self._client: redis.Redis = connect(url, timeout=timeout, on_connect=self._verify_connection)
        self._dedup_ms = str(round(dedup_window * 1000))
        self._tail_ms = str(round(tail_ttl * 1000))
        self._retentions = dict(retentions or {})
        self._observe = observe
        self._lock = threading.Lock()
        self._shards: dict[str, _Shard] = {key: _Shard() for key in self._retentions}
        self._sha = ""

    def epoch(self, stream_key: str) -> str | None:
        """The epoch of a shard as this process knows it; None before the first ``learn``."""
        shard = self._shards.get(stream_key)
        return None if shard is None else shard.epoch

    def epochs(self) -> dict[str, str]:
        """All epochs known now."""
        return {key: shard.epoch for key, shard in list(self._shards.items()) if shard.epoch is not None}

    def learn(self, stream_keys: Iterable[str] = (), newest: Mapping[str, str] | None = None) -> None:
        """Read the epochs of these shards and of all declared ones, and look whether Redis is behind what is known.

        ``newest`` are entry ids the database knows to have been acknowledged. Raises ``BrokerUnavailableError``.
        """
        with self._lock:
            for key in stream_keys:
                self._shards.setdefault(key, _Shard())
            for key, entry in (newest or {}).items():
                shard = self._shards.setdefault(key, _Shard())
                shard.last_id = max(shard.last_id, entry, key=_entry_order)
        try:
            connection = self._client.connection_pool.get_connection()
            try:
                self._verify(connection, list(self._shards))
            finally:
                self._client.connection_pool.release(connection)
        except RedisError as error:
            raise BrokerUnavailableError(f"Redis cannot be asked for its epochs: {describe(error)}") from error

    def probe(self) -> None:
        """Find out whether Redis takes commands; raises ``BrokerUnavailableError`` where it does not."""
        try:
            keys = list(self._shards)
            if not keys:
                self._client.ping()
                return
            # A write, since a full, read-only or unpersistable server still answers PING.
            self._client.set(ShardKeys(keys[0]).probe, "1", px=1000)
        except RedisError as error:
            raise BrokerUnavailableError(f"Redis does not take writes: {describe(error)}") from error

    def publish(self, commands: Iterable[Command]) -> list[Outcome]:
        """Send the commands in order as one pipeline; one outcome per command, in their order. Never raises.

        ``commands`` may be made as they are taken: Redis works on the first while the next are made.
        A command after one that failed is not held back: order between them is the script's matter (``next``).
        """
        taken: list[Command] = []

        def packed() -> Iterator[tuple[Any, ...]]:
            for command in commands:
                taken.append(command)
                yield self._pack(command)

        replies = self._exchange(packed())
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            # The server was restarted or its scripts were flushed. Load and send again, once, in the same order.
            self._sha = ""
            again = self._exchange([self._pack(taken[i]) for i in missing])
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        outcomes = [self._judge(reply) for reply in replies]
        self._remember(taken, outcomes)
        return self._sort_out_suspects(taken, outcomes)

    def look_for(self, stream_key: str, entries: Sequence[tuple[str, str]]) -> list[Presence]:
        """Where each of these (entry id, event id) of one shard is. Raises ``BrokerUnavailableError``."""
        return look_for(self._client, stream_key, entries)

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def _pack(self, command: Command) -> tuple[Any, ...]:
        key = command.stream_key
        keys = ShardKeys(key)
        return (
            "EVALSHA", self._sha or self._load(), "5", key, f"{key}:shard", f"{key}:seen:{command.event_id}",
            f"{key}:tail:{command.aggregate or ''}", keys.seen(command.event_id, command.replay), command.mode.value,
            command.epoch, str(command.sequence), str(command.prev_sequence), self._dedup_ms, self._tail_ms,
            *command.fields,
        )  # fmt: skip

    def _load(self) -> str:
        try:
            self._sha = str(self._client.script_load(PUBLISH_LUA))
        except RedisError:
            # The exchange that follows meets the same failure and reports it.
            return "0" * 40
        return self._sha

    def _exchange(self, packed: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Send, and read a reply or an exception for each. After a cut, those already read keep their replies."""
        pool = self._client.connection_pool
        replies: list[Any] = []
        rest = iter(packed)
        sent = 0
        try:
            connection = pool.get_connection()
        except RedisError as error:
            return [error for _ in rest]
        try:
            while batch := list(itertools.islice(rest, _SLICE)):
                sent += len(batch)
                # Packed by hiredis itself: redis-py looks at the type of each of 40 arguments first, 7 µs a command.
                connection.send_packed_command([b"".join(map(pack_command, batch))])
            for _ in range(sent):
                try:
                    replies.append(connection.read_response())
                except (RedisConnectionError, RedisTimeoutError) as error:
                    if not getattr(error, "status_code", None):
                        raise
                    # LOADING and NOAUTH are connection errors to redis-py, but they are replies: read on.
                    replies.append(error)
                except ResponseError as error:
                    replies.append(error)
        except (RedisError, OSError) as error:
            connection.disconnect()
            replies += [error] * (sent - len(replies))
            replies += [error for _ in rest]
        except BaseException:
            # Replies are still on the wire; the connection must not be used for anything else.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
        return replies

    def _remember(self, commands: Sequence[Command], outcomes: Sequence[Outcome]) -> None:
        # The last of each shard is its highest: the script numbers them as it runs.
        newest = {
            command.stream_key: outcome.detail
            for command, outcome in zip(commands, outcomes, strict=True)
            if outcome.kind is OutcomeKind.PUBLISHED
        }
        for key, entry in newest.items():
            shard = self._shards.get(key)
            if shard is not None and _entry_order(entry) > _entry_order(shard.last_id):
                shard.last_id = entry

    def _judge(self, reply: Any) -> Outcome:
        if isinstance(reply, str):
            word, _, detail = reply.partition(" ")
            return Outcome(_KINDS[word], detail)
        message = describe(reply)
        if not isinstance(reply, ResponseError) and not getattr(reply, "status_code", None):
            return Outcome(OutcomeKind.UNAVAILABLE, message)
        if isinstance(reply, NoScriptError) or blame(message) is Blame.BROKER:
            return Outcome(OutcomeKind.UNAVAILABLE, message)
        return Outcome(OutcomeKind.EVENT, message)

    def _sort_out_suspects(self, commands: Sequence[Command], outcomes: list[Outcome]) -> list[Outcome]:
        suspects = {c.stream_key for c, o in zip(commands, outcomes, strict=True) if o.kind is OutcomeKind.EVENT}
        if not suspects:
            return outcomes
        verdicts = {key: self._probe_shard(key) for key in suspects}
        return [
            outcome if outcome.kind is not OutcomeKind.EVENT else verdicts[command.stream_key] or outcome
            for command, outcome in zip(commands, outcomes, strict=True)
        ]

    def _probe_shard(self, key: str) -> Outcome | None:
        """None where the shard takes writes, so that the error was the event's own; else whose fault it is."""
        replies = self._exchange([
            ("SET", ShardKeys(key).probe, "1", "PX", "1000"),
            # A write to the stream itself that changes nothing: it fails where the key is no stream.
            ("XTRIM", key, "MINID", "~", "0"),
            ("HGET", ShardKeys(key).shard, "epoch"),
        ])  # fmt: skip
        for reply in replies:
            if isinstance(reply, ResponseError) and blame(describe(reply)) is Blame.SUSPECT:
                return Outcome(OutcomeKind.SHARD, describe(reply))
            if isinstance(reply, Exception):
                return Outcome(OutcomeKind.UNAVAILABLE, describe(reply))
        return None

    def _verify_connection(self, connection: Any) -> None:
        # On the new connection itself, before anything else is sent on it: a Redis that came back empty or older has
        # a new epoch before the first command proven under the old one can reach it.
        self._verify(connection, [key for key, shard in list(self._shards.items()) if shard.epoch is not None])

    def _verify(self, connection: Any, keys: Sequence[str]) -> None:
        for key in keys:
            shard = self._shards[key]
            retention = self._retentions.get(key)
            connection.send_command(
                "EVAL", EPOCH_LUA, 2, key, ShardKeys(key).shard, secrets.token_hex(8), shard.last_id,
                "" if retention is None else retention,
            )  # fmt: skip
            epoch, last_id, verdict = connection.read_response()
            with self._lock:
                lost = verdict in ("behind", "hole") or (verdict == "new" and shard.last_id != "")
                changed = shard.epoch is not None and epoch != shard.epoch
                if lost:
                    # What is gone is gone; compare with what is there from now on.
                    shard.last_id = ""
                shard.last_id = max(shard.last_id, "" if last_id == "0-0" else last_id, key=_entry_order)
                shard.epoch = epoch
            if lost or changed:
                text = _LOSSES.get(verdict, "another process began a new epoch")
                _log.error(
                    "Redis lost data; 'zzol-relay republish' sends again what the outbox still holds",
                    extra={"stream_key": key, "reason": text},
                )
                self._observe(DataLossDetected(key, text))


def _entry_order(entry: str) -> tuple[int, int]:
    ms, _, number = entry.partition("-")
    return (int(ms or 0), int(number or 0))


def describe(error: BaseException) -> str:
    """An error in one line, with the code that redis-py takes off the message."""
    code = getattr(error, "status_code", None)
    text = str(error) or type(error).__name__
    return f"{code} {text}" if code and not text.startswith(str(code)) else text
