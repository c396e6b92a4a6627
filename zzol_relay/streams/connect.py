"""One small factory for Redis clients.

redis-py retries by default: one ``xadd`` with two lost replies left three entries. Ours never retry by themselves,
have short timeouts, and tell when a connection is new, so that whoever uses it can look whether Redis is still the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from zzol_relay.core.errors import ConfigurationError
from zzol_relay.settings import mask_url

__all__ = ["OnConnect", "connect", "connect_async"]

OnConnect = Callable[[Any], None]
"""Called with each new connection after its handshake; what it raises fails the connection attempt."""

_URL_SCHEMES = ("redis", "rediss", "unix")


def connect(url: str, *, timeout: float, max_connections: int = 8, on_connect: OnConnect | None = None) -> redis.Redis:
    """A synchronous client that decodes replies, never retries, and fails within ``timeout`` seconds a call.

    ``url`` is ``redis://``, ``rediss://``, ``unix://`` or ``sentinel://[user:password@]host:port,…/service[/db]``.
    Raises ``ConfigurationError`` for anything else; connects at the first command.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": True,
        "max_connections": max_connections,
        "protocol": 2,
    }
    if on_connect is not None:
        options["redis_connect_func"] = _announcing(on_connect)
    sentinel = _sentinel(url)
    if sentinel is not None:
        hosts, service, extra = sentinel
        manager = redis.sentinel.Sentinel(
            hosts, sentinel_kwargs={"socket_timeout": timeout, "socket_connect_timeout": timeout}
        )
        client: redis.Redis = manager.master_for(service, **extra, **options)
        return client
    return redis.Redis.from_url(_checked(url), maint_notifications_config=_no_notifications(), **options)


def connect_async(url: str, *, timeout: float | None, max_connections: int = 8) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio; ``timeout=None`` is for blocking reads, which need a client of their own."""
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout or 5.0,
        "retry": redis.asyncio.retry.Retry(NoBackoff(), 0),
        "decode_responses": False,
        "max_connections": max_connections,
        "protocol": 2,
    }
    sentinel = _sentinel(url)
    if sentinel is not None:
        hosts, service, extra = sentinel
        manager = redis.asyncio.sentinel.Sentinel(hosts, sentinel_kwargs={"socket_connect_timeout": 5.0})
        client: redis.asyncio.Redis = manager.master_for(service, **extra, **options)
        return client
    return redis.asyncio.Redis.from_url(_checked(url), **options)


def _announcing(on_connect: OnConnect) -> OnConnect:
    def established(connection: Any) -> None:
        connection.on_connect()
        on_connect(connection)

    return established


def _no_notifications() -> MaintNotificationsConfig:
    return MaintNotificationsConfig(enabled=False)


def _checked(url: str) -> str:
    if urlsplit(url).scheme not in _URL_SCHEMES:
        raise ConfigurationError(
            f"redis_url {mask_url(url)!r}: use redis://, rediss://, unix:// or sentinel://host:port,host:port/service"
        )
    return url


def _sentinel(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]] | None:
    if not url.startswith("sentinel://"):
        return None
    rest, _, query = url.removeprefix("sentinel://").partition("?")
    authority, _, path = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    service, _, db = path.partition("/")
    try:
        parsed = [(host, int(port or 26379)) for host, _, port in (part.partition(":") for part in hosts.split(","))]
        extra: dict[str, Any] = {"db": int(db or parse_qs(query).get("db", ["0"])[0])}
    except ValueError:
        raise ConfigurationError(f"redis_url {mask_url(url)!r}: a port or database is not a number") from None
    if not service or not all(host for host, _ in parsed):
        raise ConfigurationError(f"redis_url {mask_url(url)!r}: use sentinel://host:port,host:port/service[/db]")
    if userinfo:
        user, _, password = userinfo.partition(":")
        extra |= {"username": unquote(user) or None, "password": unquote(password) or None}
    return parsed, service, extra
