"""Reading what ``zzol-relay check`` judges of Redis; leaves nothing behind."""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.exceptions import RedisError

from zzol_relay.core.checks import RedisFacts
from zzol_relay.core.policy import Blame, blame
from zzol_relay.settings import Settings
from zzol_relay.streams.connect import connect
from zzol_relay.streams.keys import ShardKeys, stream_key
from zzol_relay.streams.publisher import PUBLISH_LUA, describe

__all__ = ["read_redis"]


def read_redis(settings: Settings) -> RedisFacts:
    """The facts of Redis at ``settings.redis_url``; never raises for what Redis does."""
    client = connect(settings.redis_url, timeout=settings.redis_timeout)
    try:
        return _read(client, settings.key_prefix)
    except RedisError as error:
        return RedisFacts(error=describe(error))
    finally:
        client.close()


def _read(client: redis.Redis, prefix: str) -> RedisFacts:
    info: dict[str, Any] = client.info()
    denied, refused = _try_commands(client, prefix)
    return RedisFacts(
        version=str(info.get("valkey_version") or info.get("redis_version") or ""),
        valkey="valkey_version" in info,
        role=str(info.get("role", "")),
        policy=str(info.get("maxmemory_policy", "")),
        aof=bool(info.get("aof_enabled")),
        rdb=_saves(client),
        persistence_failure=_persistence_failure(info),
        clock_ahead=_clock_ahead(client),
        denied=denied,
        refused=refused,
        scripts="" if refused else _try_scripts(client, prefix),
    )


def _saves(client: redis.Redis) -> bool | None:
    try:
        config: Any = client.config_get("save")
    except RedisError:
        # Hosted servers do not let anybody look.
        return None
    return bool(config.get("save")) if config else None


def _persistence_failure(info: dict[str, Any]) -> str:
    failures = {
        "rdb_last_bgsave_status": "the last dump failed",
        "aof_last_write_status": "the last write of AOF failed",
    }
    return "; ".join(text for name, text in failures.items() if info.get(name, "ok") != "ok")


def _clock_ahead(client: redis.Redis) -> float:
    """The server's clock less ours, by the fastest of three questions."""
    measured: list[tuple[float, float]] = []
    for _ in range(3):
        asked = time.time()
        told: Any = client.time()
        answered = time.time()
        measured.append((answered - asked, told[0] + told[1] / 1e6 - (asked + answered) / 2))
    return min(measured)[1]


def _try_commands(client: redis.Redis, prefix: str) -> tuple[tuple[str, ...], str]:
    """The commands that are not allowed, and why writes are refused.

    They are tried on a string that is gone within a second: permission is looked at before the type is, so that
    WRONGTYPE says yes and changes nothing.
    """
    key = ShardKeys(stream_key(prefix, "zzol-check", 0)).probe
    tries = (
        ("SET", key, "1", "PX", "1000"), ("GET", key), ("HSET", key, "f", "1"), ("HMGET", key, "f"), ("TYPE", key),
        ("XADD", key, "*", "f", "1"), ("XTRIM", key, "MINID", "0"), ("XRANGE", key, "-", "+"),
        ("XREAD", "STREAMS", key, "0"), ("XINFO", "STREAM", key),
    )  # fmt: skip
    denied, refused = [], ""
    for command in tries:
        try:
            client.execute_command(*command)
        except RedisError as error:
            told = describe(error)
            if "no permissions" in told or "unknown command" in told:
                denied.append(command[0])
            elif blame(told) is Blame.BROKER:
                refused = refused or told
    return tuple(denied), refused


def _try_scripts(client: redis.Redis, prefix: str) -> str:
    """Why the script cannot be used; '' where it can. Under an epoch that is not there it writes nothing."""
    key = stream_key(prefix, "zzol-check", 0)
    keys = (key, f"{key}:shard", f"{key}:seen:0", f"{key}:tail:0", f"{key}:seen:0")
    try:
        sha = str(client.script_load(PUBLISH_LUA))
        reply: Any = client.evalsha(sha, 5, *keys, "next", "no epoch", "1", "0", "1000", "1000", "id", "0")
        client.eval("return 1", 0)
    except RedisError as error:
        return describe(error)
    return "" if str(reply).startswith("EPOCH") else f"unexpected reply {reply!r}"
