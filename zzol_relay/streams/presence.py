"""Which acknowledged entries still stand in their streams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum
from importlib.resources import files
from typing import Any

import redis
from redis.exceptions import RedisError

from zzol_relay.core.errors import BrokerUnavailableError
from zzol_relay.streams.keys import ShardKeys

__all__ = ["Presence", "look_for"]

_PRESENT_LUA = files(__package__).joinpath("present.lua").read_text(encoding="utf-8")
_PAIRS = 100
"""Entries per call: Redis serves nobody else meanwhile."""


class Presence(StrEnum):
    """Where an entry is; the values are the letters of ``present.lua``."""

    PRESENT = "P"
    ABSENT = "A"
    """Not there, and not for its age."""
    TRIMMED = "T"
    """Not there, and older than the shard's retention: trimmed, or it would be by now."""


def look_for(client: redis.Redis, stream_key: str, entries: Sequence[tuple[str, str]]) -> list[Presence]:
    """Where each of these entries of one shard is; ``entries`` are (entry id, event id).

    An entry counts as present where it holds that event. Raises ``BrokerUnavailableError``.
    """
    found: list[Presence] = []
    rest = iter(entries)
    while batch := list(itertools.islice(rest, _PAIRS)):
        arguments = [part for pair in batch for part in pair]
        try:
            reply: Any = client.eval(_PRESENT_LUA, 2, stream_key, ShardKeys(stream_key).shard, *arguments)
        except RedisError as error:
            raise BrokerUnavailableError(f"Redis cannot be asked for entries of {stream_key}: {error}") from error
        found += map(Presence, reply)
    return found
