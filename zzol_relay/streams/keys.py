"""Redis key names. Every key of a shard carries the prefix and the shard's hash tag, so that one script may touch them
all on a cluster, and one ACL pattern covers them."""

from __future__ import annotations

import dataclasses
import re
import zlib

__all__ = ["ShardKeys", "logical_stream", "shard_of", "stream_key", "stream_keys"]

_STREAM_KEY = re.compile(r"(?P<prefix>[^{}]+):\{(?P<stream>[^{}]+):(?P<shard>\d+)\}\Z")


def shard_of(partition: str, shards: int) -> int:
    """The shard of a partition key; stable across processes, versions and machines."""
    return zlib.crc32(partition.encode()) % shards if shards > 1 else 0


def stream_key(prefix: str, stream: str, shard: int) -> str:
    """The Redis key of one shard: ``<prefix>:{<stream>:<shard>}``."""
    return f"{prefix}:{{{stream}:{shard}}}"


def stream_keys(prefix: str, stream: str, shards: int) -> tuple[str, ...]:
    """The keys of all shards of a stream."""
    return tuple(stream_key(prefix, stream, shard) for shard in range(shards))


def logical_stream(key: str) -> str:
    """The logical stream a stored key belongs to (Z26). Raises ``ValueError`` for anything else."""
    match = _STREAM_KEY.match(key)
    if match is None:
        raise ValueError(f"{key!r} is not the key of a stream's shard")
    return match["stream"]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys that stand beside one shard's stream."""

    stream: str

    @property
    def shard(self) -> str:
        """Hash of the shard: its epoch and its retention."""
        return f"{self.stream}:shard"

    @property
    def probe(self) -> str:
        """Written to find out whether the shard takes writes."""
        return f"{self.stream}:probe"

    def seen(self, event_id: str, replay: int = 0) -> str:
        """Remembers an event id, or one replay of it, for the dedup window."""
        return f"{self.stream}:seen:{event_id}:{replay}" if replay else f"{self.stream}:seen:{event_id}"

    def tail(self, aggregate: str) -> str:
        """Remembers an aggregate's last sequence (``aggregate`` is ``type:id``; a type holds no colon)."""
        return f"{self.stream}:tail:{aggregate}"
