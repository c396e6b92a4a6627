"""Whose fault an error is, when to try again, and when to stop (Z13, Z27, S9)."""

from __future__ import annotations

import re
from enum import StrEnum

__all__ = ["Blame", "backoff", "blame", "exhausted", "past_is_safe"]

BROKER_CODES = frozenset({
    "LOADING", "READONLY", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN", "OOM", "NOAUTH", "WRONGPASS", "NOPERM",
    "NOREPLICAS", "MISCONF", "BUSY", "MASTERDOWN", "UNKILLABLE", "NOTBUSY", "EXECABORT", "NOMASTERLINK",
})  # fmt: skip
"""Error codes that say the server refuses everybody, not this event."""

_CODE = re.compile(r"-?([A-Z][A-Z0-9]*)\b")


class Blame(StrEnum):
    """Whose fault a failed command is."""

    BROKER = "broker"
    """Connection, timeout or a server-wide code: costs no attempt (Z4), opens the circuit."""
    SUSPECT = "suspect"
    """The event's own only if a probe write on its shard succeeds right after."""


def blame(message: str) -> Blame:
    """Judge an error reply by its code. A script's error carries the inner code somewhere behind its own."""
    match = _CODE.match(message)
    if match and match.group(1) in BROKER_CODES:
        return Blame.BROKER
    return Blame.SUSPECT


def backoff(failures: int, jitter: float, *, base: float, cap: float) -> float:
    """Seconds to wait after the ``failures``-th failure in a row (1 is the first): exponential, with full jitter
    over its upper half. ``jitter`` is from [0, 1); the result lies in [step / 2, step)."""
    # 2.0**1024 overflows; 64 doublings are past any cap.
    step = min(cap, base * 2.0 ** min(max(failures - 1, 0), 64))
    return step * (0.5 + jitter / 2)


def exhausted(retry_count: int, max_attempts: int) -> bool:
    """Whether a row that has now failed ``retry_count`` times is dead: the 10th failure of ten is (Z13)."""
    return retry_count >= max_attempts


def past_is_safe(age_seconds: float, dedup_window: float) -> bool:
    """Whether PAST may settle a row as published†.

    The script answers PAST when the row's sequence is not above the tail and its id is no longer remembered. For a
    row older than the dedup window that is an entry whose memory ran out. For a younger one it can only be a restored
    database or a deleted counter, so it becomes a dead letter, never silence.
    """
    return age_seconds >= dedup_window
