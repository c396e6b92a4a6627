"""Whether MySQL and Redis are as the relay needs them."""

from __future__ import annotations

from zzol_relay.core.checks import Finding, judge_database, judge_redis
from zzol_relay.settings import Settings
from zzol_relay.store.check import read_database
from zzol_relay.streams.check import read_redis

__all__ = ["check"]


def check(settings: Settings) -> list[Finding]:
    """Look at both and judge; a server that cannot be reached is a finding too. Changes nothing in either.

    Raises ``ConfigurationError`` where a URL does not fit.
    """
    database = judge_database(read_database(settings), max_payload_bytes=settings.max_payload_bytes)
    return database + judge_redis(read_redis(settings))
