"""Event ids: UUIDv7 (RFC 9562), so that the unique index on them grows at its right edge."""

from __future__ import annotations

import uuid

__all__ = ["RANDOM_BITS", "uuid7"]

RANDOM_BITS = 74


def uuid7(unix_ms: int, random: int) -> uuid.UUID:
    """Build a UUIDv7 from a Unix time in milliseconds and ``RANDOM_BITS`` random bits.

    Both are arguments, so that a test or a replica can make the same id again.
    """
    high = (random >> 62) & 0xFFF
    low = random & ((1 << 62) - 1)
    value = (unix_ms & ((1 << 48) - 1)) << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low
    return uuid.UUID(int=value)
