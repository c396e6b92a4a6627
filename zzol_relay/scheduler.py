"""APScheduler wiring: when each duty runs. What a duty does is elsewhere.

Every duty is supervised: what it raises is logged and announced, and it runs again after a backoff. Delays are counted
from the end of a run (Z27), so a duty that takes long is never run twice at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger

from zzol_relay.core.observer import Fact, LoopBeat, LoopFailed
from zzol_relay.core.policy import backoff

__all__ = ["Daily", "Duty", "Scheduler"]

_log = logging.getLogger("zzol_relay.scheduler")

_BACKOFF_BASE = 0.5
_BACKOFF_CAP = 30.0
_EXECUTOR = "zzol_relay"


@dataclasses.dataclass(frozen=True, slots=True)
class Duty:
    """Runs ``run`` at start and then ``interval`` seconds after each of its ends."""

    name: str
    run: Callable[[], object]
    interval: float


@dataclasses.dataclass(frozen=True, slots=True)
class Daily:
    """Runs ``run`` every day at ``at`` ("HH:MM") in ``timezone``, however late (a busy process must not skip it)."""

    name: str
    run: Callable[[], object]
    at: str
    timezone: str


class Scheduler:
    """Runs duties on threads of its own until ``stop()``."""

    def __init__(self, duties: Sequence[Duty], daily: Sequence[Daily], observe: Callable[[Fact], None]) -> None:
        self._duties = {duty.name: duty for duty in duties}
        self._daily = tuple(daily)
        self._observe = observe
        self._failures: dict[str, int] = {}
        self._random = random.Random()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._woken: set[str] = set()
        self._running: set[str] = set()
        self._stopping = threading.Event()
        for name in ("apscheduler.scheduler.zzol_relay", "apscheduler.executors.zzol_relay"):
            # Its INFO lines, several per poll, would drown the application's own; the facts say more.
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(logging.WARNING)
        self._scheduler = BackgroundScheduler(
            logger=logging.getLogger("apscheduler.scheduler.zzol_relay"),
            executors={_EXECUTOR: ThreadPoolExecutor(len(self._duties) + len(self._daily))},
            # The default grace of 1 s skips 04:00 in silence when the process is busy.
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1},
            timezone=UTC,
            daemon=True,
        )

    def start(self) -> None:
        """Run each duty for the first time, and go on."""
        for duty in self._duties.values():
            self._schedule(duty, 0.0)
        for daily in self._daily:
            hour, minute = daily.at.split(":")
            self._scheduler.add_job(
                self._supervised,
                CronTrigger(hour=hour, minute=minute, timezone=ZoneInfo(daily.timezone)),
                args=(daily.name, daily.run),
                id=f"daily-{daily.name}",
                executor=_EXECUTOR,
            )
        self._scheduler.start()

    def wake(self, name: str) -> None:
        """Run a duty now, or once more right after the run under way."""
        duty = self._duties.get(name)
        if duty is None:
            return
        with self._lock:
            if name in self._running:
                self._woken.add(name)
                return
        self._schedule(duty, 0.0)

    def stop(self, timeout: float) -> None:
        """Start no further run, and wait up to ``timeout`` seconds for those under way."""
        self._stopping.set()
        if self._scheduler.running:
            self._scheduler.remove_all_jobs()
        with self._idle:
            self._idle.wait_for(lambda: not self._running, timeout)
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _schedule(self, duty: Duty, delay: float) -> None:
        if self._stopping.is_set():
            return
        self._scheduler.add_job(
            self._run_duty,
            "date",
            run_date=datetime.now(UTC) + timedelta(seconds=delay),
            args=(duty,),
            id=duty.name,
            executor=_EXECUTOR,
            replace_existing=True,
        )

    def _run_duty(self, duty: Duty) -> None:
        with self._lock:
            if duty.name in self._running or self._stopping.is_set():
                self._woken.add(duty.name)
                return
            self._running.add(duty.name)
        try:
            retry_in = self._supervised(duty.name, duty.run)
        finally:
            with self._lock:
                self._running.discard(duty.name)
                self._idle.notify_all()
                woken = duty.name in self._woken
                self._woken.discard(duty.name)
        delay = retry_in if retry_in is not None else 0.0 if woken else duty.interval
        self._schedule(duty, delay)

    def _supervised(self, name: str, run: Callable[[], object]) -> float | None:
        """Run once; the seconds to wait before the next try where it raised, else None."""
        started = time.monotonic()
        try:
            run()
        except Exception as error:
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            retry_in = backoff(failures, self._random.random(), base=_BACKOFF_BASE, cap=_BACKOFF_CAP)
            _log.exception("a loop's round failed; it goes on", extra={"loop": name, "retry_in": round(retry_in, 3)})
            self._observe(LoopFailed(name, repr(error), retry_in))
            return retry_in
        self._failures[name] = 0
        self._observe(LoopBeat(name, time.monotonic() - started))
        return None
