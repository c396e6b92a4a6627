"""Whether this process lives and is ready, for the probes of an orchestrator (S15, Z4).

Live is about loops, ready about this release and its schema. Neither asks Redis or MySQL: an outage of theirs must not
restart every process, nor take every one out of service. What they do is told by ``status``.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from zzol_relay.core.observer import (
    Claimed,
    ClaimLost,
    CleanedUp,
    Deferred,
    Fact,
    Failed,
    LoopBeat,
    LoopFailed,
    Recovered,
    Settled,
)
from zzol_relay.store.gauges import Backlog, GaugeStore
from zzol_relay.store.upkeep import UpkeepStore

__all__ = ["GAUGES_LEASE", "Health", "InTime", "Pulse", "Schema", "Vitals", "judge"]

_log = logging.getLogger("zzol_relay.health")

T = TypeVar("T")

State = Literal["new", "started", "stopped"]

GAUGES_LEASE = 90.0
"""How long a process that has reported the backlog keeps that duty; scrape more often than this."""
_GAUGES = "gauges"


class Schema(StrEnum):
    """What is known of the tables."""

    UNASKED = "unasked"
    UNREACHABLE = "unreachable"
    UNFIT = "unfit"
    FIT = "fit"


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """``live``: every loop has given a sign of life within its allowance; where not, restart the process. ``ready``:
    started, the schema fits, not stopping. ``reasons`` says what keeps either from being true. ``loops`` maps each
    supervised loop to the seconds since its last sign of life."""

    live: bool
    ready: bool
    reasons: tuple[str, ...]
    loops: dict[str, float]


def judge(state: State, schema: Schema, ages: Mapping[str, float], allowances: Mapping[str, float]) -> Health:
    """Decide from what is known.

    Before the start and while stopping no loop is judged. A database that could never be asked leaves a process ready.
    """
    reasons = []
    live = True
    if state == "started":
        for loop, allowance in allowances.items():
            if ages.get(loop, 0.0) > allowance:
                live = False
                reasons.append(f"loop {loop} has not finished a round for {ages[loop]:.1f} s ({allowance:g} allowed)")
    ready = state == "started" and schema in (Schema.FIT, Schema.UNREACHABLE)
    if state != "started":
        reasons.append({"new": "not started", "stopped": "stopping or stopped"}[state])
    elif schema is Schema.UNASKED:
        reasons.append("the schema was not looked at yet")
    elif schema is Schema.UNFIT:
        reasons.append("the relay's tables are missing or too old; run 'zzol-relay migrate'")
    return Health(live, ready, tuple(reasons), dict(ages))


class Pulse:
    """An observer that keeps when each loop last gave a sign of life: a round that ended, well or not, or a step of a
    long one. ``clock`` is monotonic, in seconds."""

    def __init__(self, allowances: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.allowances = dict(allowances)
        self._clock = clock
        self._seen: dict[str, float] = {}

    def start(self) -> None:
        """The loops run from now on."""
        now = self._clock()
        for loop in self.allowances:
            self._seen.setdefault(loop, now)

    def __call__(self, fact: Fact) -> None:
        sign = _SIGNS.get(type(fact))
        if sign is not None:
            loop = sign(fact)
            if loop in self.allowances:
                self._seen[loop] = self._clock()

    def ages(self) -> dict[str, float]:
        """Seconds since each supervised loop's last sign of life."""
        now = self._clock()
        return {loop: now - seen for loop, seen in list(self._seen.items())}


def _loop(fact: Any) -> str:
    loop: str = fact.loop
    return loop


def _path(fact: Any) -> str:
    # Of the after-commit path the dispatcher's own beats tell.
    return "poller" if fact.path == "poller" else ""


_SIGNS: dict[type, Callable[[Any], str]] = {
    LoopBeat: _loop,
    LoopFailed: _loop,
    # A poll that drains a backlog, or a cleanup of many batches, takes as long as there is work.
    Claimed: lambda fact: "poller",
    Failed: lambda fact: "poller",
    Settled: _path,
    Deferred: _path,
    ClaimLost: _path,
    Recovered: lambda fact: "recovery",
    CleanedUp: lambda fact: "overdue-cleanup",
}


class InTime(Generic[T]):
    """Asks something slow on a thread of its own, at most once at a time, and waits for the answer a bounded time.

    A server that hangs costs each caller its timeout, and the process one thread.
    """

    def __init__(self, ask: Callable[[], T], name: str) -> None:
        self._ask = ask
        self._name = name
        self._lock = threading.Lock()
        self._answer: Future[T] | None = None

    def __call__(self, timeout: float) -> T:
        """The answer to the question under way, or else to a new one. Raises ``TimeoutError``, and what it raised."""
        with self._lock:
            answer = self._answer
            if answer is None or answer.done():
                answer = self._answer = Future()
                threading.Thread(target=self._run, args=(answer,), name=self._name, daemon=True).start()
        return answer.result(timeout)

    def _run(self, answer: Future[T]) -> None:
        try:
            answer.set_result(self._ask())
        except BaseException as error:
            answer.set_exception(error)


class Vitals:
    """What this process knows of its own health, and the backlog where it is the one to report it."""

    def __init__(self, store: GaugeStore, upkeep: UpkeepStore, holder: bytes, allowances: Mapping[str, float]) -> None:
        self._store = store
        self._upkeep = upkeep
        self._holder = holder
        self._schema = Schema.UNASKED
        self._holds = False
        self._gauges = InTime(self._read_gauges, "zzol-relay-gauges")
        self.pulse = Pulse(allowances)

    def health(self, state: State) -> Health:
        """Asks nobody: callable at any rate."""
        return judge(state, self._schema, self.pulse.ages(), self.pulse.allowances)

    def schema_fits(self) -> bool:
        """Look at the schema, until it once did fit: migrations only expand. Raises what the database raises."""
        if self._schema is Schema.FIT:
            return True
        try:
            fault = self._store.schema_fault()
        except Exception:
            if self._schema is Schema.UNASKED:
                self._schema = Schema.UNREACHABLE
            raise
        if fault is not None and self._schema is not Schema.UNFIT:
            _log.error("the schema does not fit", extra={"fault": fault})
        self._schema = Schema.FIT if fault is None else Schema.UNFIT
        return fault is None

    def gauges(self, timeout: float) -> Backlog | None:
        """The backlog, where this process holds the duty of reporting it; else None.

        The duty is taken by asking, so only a process that is scraped can hold it. Raises ``TimeoutError``, and what
        the database raises.
        """
        return self._gauges(timeout)

    def leave(self) -> None:
        """Let another process report the backlog at once."""
        if self._holds:
            self._upkeep.finish_duty(_GAUGES, self._holder)

    def _read_gauges(self) -> Backlog | None:
        self._holds = self._upkeep.take_duty(_GAUGES, self._holder, GAUGES_LEASE)
        return self._store.waiting() if self._holds else None
