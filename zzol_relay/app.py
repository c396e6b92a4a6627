"""The composition root: what a relay is made of, and the order in which it starts and stops."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Self

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session, scoped_session

from zzol_relay.core.counters import Counters
from zzol_relay.core.errors import BrokerUnavailableError, ConfigurationError, UnknownStreamError
from zzol_relay.core.events import Event
from zzol_relay.core.observer import Observer, Observers
from zzol_relay.relay.after_commit import AfterCommit, Settler
from zzol_relay.relay.circuit import Circuit
from zzol_relay.relay.delivery import Delivery
from zzol_relay.relay.health import Health, Vitals
from zzol_relay.relay.recorder import Recorder, complete
from zzol_relay.relay.tools import operator_tools
from zzol_relay.relay.upkeep import Cleanup, Recovery
from zzol_relay.relay.worker import Worker
from zzol_relay.scheduler import Daily, Duty, Scheduler
from zzol_relay.settings import Settings, Stream
from zzol_relay.store.claims import ClaimStore
from zzol_relay.store.database import Database
from zzol_relay.store.gauges import Backlog, GaugeStore
from zzol_relay.store.outbox import OutboxStore, OutboxWriter
from zzol_relay.store.upkeep import Instance, UpkeepStore
from zzol_relay.streams.direct import DirectPublisher
from zzol_relay.streams.keys import stream_keys
from zzol_relay.streams.publisher import ScriptPublisher
from zzol_relay.streams.tail import Listener, Tail
from zzol_relay.tracing import traced
from zzol_relay.version import __version__

__all__ = ["Relay", "RelayStatus", "migrate"]

_log = logging.getLogger("zzol_relay")


@dataclasses.dataclass(frozen=True, slots=True)
class RelayStatus:
    """What stands where now. ``loops`` maps each loop of this process to the seconds since it last finished."""

    backlog: Backlog
    circuit: str
    loops: dict[str, float]
    counters: dict[str, int]
    instances: list[Instance]
    health: Health


class Relay:
    """Relays events from a database's outbox to Redis Streams.

    ::

        relay = Relay(engine, [Stream(name="room", shards=4)], redis_url="redis://…")
        with relay:
            with Session(engine) as session, session.begin():
                session.add(room)
                relay.record(session, Event(type="room.created", stream="room", aggregate_type="room",
                                            aggregate_id=room.code, data={"host": "ann"}))

    ``engine`` is the application's ``Engine`` or ``AsyncEngine``, or a URL; the relay derives a small pool of its own
    from it. ``streams`` are those that this process records to (none for a bare worker). ``settings`` or ``options``
    (names of ``Settings``) override the environment. ``worker`` says whether the fallback scheduler runs in this
    process too; any number of processes may run it. Nothing connects before ``start()``, and ``start()`` does not
    fail because MySQL or Redis is away. One relay belongs to one process: after a fork, make another. In asyncio use
    ``async with relay``; ``record()`` and ``commit()`` of a synchronous session then belong in ``asyncio.to_thread``.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine | str,
        streams: Iterable[Stream] = (),
        *,
        settings: Settings | None = None,
        observers: Iterable[Observer] = (),
        worker: bool = True,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if settings is not None and options:
            raise ConfigurationError("give settings or single options, not both")
        self.settings = settings or Settings.load(**options)
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._id = uuid.uuid4().bytes
        self._streams = _by_name(streams)
        self._counters = Counters()
        self._observers = Observers((self._counters, *observers))
        self._role = "worker" if worker and not self._streams else "app+worker" if worker else "app"
        self._state_lock = threading.Lock()
        self._state: Literal["new", "started", "stopped"] = "new"
        self._wire(engine, worker)

    def _wire(self, engine: Engine | AsyncEngine | str, worker: bool) -> None:
        settings, observe = self.settings, self._observers
        fill = traced(complete) if settings.tracing else complete
        self._database = Database(engine, settings, observe)
        self._store = OutboxStore(self._database)
        self._claims = ClaimStore(self._database, settings, self.name)
        self._upkeep = UpkeepStore(self._database, settings)
        retentions = {
            key: round(stream.retention * 1000)
            for stream in self._streams.values()
            for key in stream_keys(settings.key_prefix, stream.name, stream.shards)
        }
        self._publisher = ScriptPublisher(
            settings.redis_url,
            timeout=settings.redis_timeout,
            dedup_window=settings.dedup_window,
            tail_ttl=settings.tail_ttl,
            retentions=retentions,
            observe=observe,
        )
        self._circuit = Circuit(
            self._probe, base=settings.probe_base, cap=settings.probe_cap, observe=observe, on_close=self.wake
        )
        delivery = Delivery(self._publisher, self._circuit, settings, observe)
        settler = Settler(self._claims, self._id, settings, observe)
        self._after_commit = AfterCommit(
            delivery, settler, self._store, self._publisher, self._circuit, settings, observe
        )
        hybrid = settings.mode == "hybrid"
        self._recorder = Recorder(
            self._database,
            OutboxWriter(self._database.tables, self._id, settings.born_lease if hybrid else 0.0, self.name),
            self._streams,
            settings,
            self._publisher.epoch,
            self._after_commit if hybrid else None,
            observe,
            fill,
        )
        self._worker = Worker(self._claims, self._store, delivery, self._publisher, self._circuit, settings, observe)
        self._recovery = Recovery(self._claims, settings, observe)
        self._cleanup = Cleanup(self._upkeep, settings, self._id, observe)
        duties = [Duty("heartbeat", self._heartbeat, settings.heartbeat_interval)]
        daily = []
        if worker:
            duties += [
                Duty("poller", self._worker.run_once, settings.poll_interval),
                Duty("recovery", self._recovery.run_once, settings.recovery_interval),
                # At start when overdue, and whenever a day has passed without the daily run.
                Duty("overdue-cleanup", lambda: self._cleanup.run_once(not_within=25 * 3600.0), 3600.0),
            ]
            daily.append(Daily("cleanup", self._cleanup.run_once, settings.cleanup_at, settings.cleanup_timezone))
        self._scheduler = Scheduler(duties, daily, observe)
        intervals = {duty.name: duty.interval for duty in duties}
        if hybrid:
            intervals |= dict.fromkeys(("dispatcher", "settler"), settings.heartbeat_interval)
        allowances = {loop: interval + settings.liveness_grace for loop, interval in intervals.items()}
        self._vitals = Vitals(GaugeStore(self._database), self._upkeep, self._id, allowances)
        observe.add(self._vitals.pulse)
        self._direct = DirectPublisher(settings, self._streams, fill, observe)
        self._tails: weakref.WeakSet[Tail] = weakref.WeakSet()
        self.dead_letters, self.events, self.republish = operator_tools(
            self._database, self._store, self._publisher, settings, self.wake
        )

    def start(self) -> Self:
        """Start the threads: dispatcher, settler, scheduler. Raises ``ConfigurationError`` when started before."""
        with self._state_lock:
            if self._state != "new":
                raise ConfigurationError(f"this relay is {self._state}; make a new Relay to start again")
            self._state = "started"
        try:
            self._learn()
        except BrokerUnavailableError as error:
            self._circuit.open(str(error))
        if self.settings.mode == "hybrid":
            self._after_commit.start()
        self._vitals.pulse.start()
        self._scheduler.start()
        _log.info("relay started", extra={"relay": self.name, "role": self._role, "version": __version__})
        return self

    def stop(self) -> None:
        """Stop gracefully within ``shutdown_timeout``: no more claims; what is claimed is finished or given back at no
        cost; what is queued is published and settled. Safe to call twice."""
        with self._state_lock:
            if self._state == "stopped":
                return
            started, self._state = self._state == "started", "stopped"
        deadline = time.monotonic() + self.settings.shutdown_timeout
        self._worker.stop()
        self._cleanup.stop()
        if started:
            if self.settings.mode == "hybrid":
                self._after_commit.stop(deadline)
            self._scheduler.stop(max(0.0, deadline - time.monotonic()))
            self._circuit.stop()
            try:
                self._upkeep.leave(self._id)
                self._vitals.leave()
            except Exception:
                _log.warning("could not sign off from relay_instance", exc_info=True)
        self._publisher.close()
        self._database.dispose()
        _log.info("relay stopped", extra={"relay": self.name})

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop the tails, send what ``publish`` has queued, then ``stop()``; the event loop is never blocked."""
        for tail in tuple(self._tails):
            await tail.stop()
        await self._direct.close()
        await asyncio.to_thread(self.stop)

    def record(self, target: Session | scoped_session[Session] | Connection, event: Event) -> Event:
        """Record ``event`` in the transaction of ``target``; returns it completed (id, time, sequence).

        ``target`` is a ``Session`` or ``scoped_session`` (with an ``AsyncSession``:
        ``await session.run_sync(relay.record, event)``) or a ``Connection`` of ``begin()``. When the transaction
        commits, the event is published before ``commit()`` returns, as far as ``commit_wait`` allows; when it rolls
        back, or its savepoint does, nothing is.

        Raises, before anything is written and with the session still usable: ``InvalidEventError``,
        ``PayloadTooLargeError``, ``UnknownStreamError``, ``SequenceError``, ``RecordingError``.
        """
        return self._recorder.record(target, event)

    def record_all(
        self, target: Session | scoped_session[Session] | Connection, events: Iterable[Event]
    ) -> list[Event]:
        """Record several events; aggregates are locked in sorted order, so that two such calls cannot deadlock.

        Every event is checked before the first is written. Returns them completed, in the given order, which is also
        their order within each aggregate.
        """
        return self._recorder.record_all(target, events)

    def begin(self, engine: Engine) -> AbstractContextManager[Connection]:
        """A transaction for SQLAlchemy Core: ``with relay.begin(engine) as conn: …; relay.record(conn, event)``.

        Yields the real ``Connection``; commits, or rolls back when the block raises. Core's own ``commit`` event fires
        before the driver's commit, so it cannot tell when to publish.
        """
        return self._recorder.begin(engine)

    async def publish(self, event: Event) -> str:
        """Publish an event that belongs to no database change, past the database; returns its entry id (Z20).

        At most once. Raises ``EventError`` before anything is sent; ``BrokerUnavailableError`` when nothing was
        written, within ``redis_timeout``; ``PublishUncertainError`` when the reply was lost; ``BrokerError`` when
        Redis refused this event. Calls on one stream and aggregate keep their order. For one event loop per relay.
        """
        return await self._direct.publish(event)

    def publish_soon(self, event: Event) -> Event:
        """As ``publish``, without waiting: returns the completed event; a later failure is only logged."""
        return self._direct.publish_soon(event)

    def tail(self, stream: str, *listeners: Listener) -> Tail:
        """A reader of the live end of ``stream``: ``async with relay.tail("room", listener):``, or its ``start()`` and
        ``stop()``. ``listener(stream, entries)`` is called on the event loop with each batch of one shard, in order.

        Raises ``UnknownStreamError``. Listeners that want the same stream share one tail (``tail.add``).
        """
        if stream not in self._streams:
            raise UnknownStreamError(stream, tuple(self._streams))
        tail = Tail(self.settings, self._streams[stream], listeners, self._observers)
        self._tails.add(tail)
        return tail

    def run_once(self) -> int:
        """Poll once, now, on this thread; returns how many rows were settled. Needs no ``start()``."""
        return self._worker.run_once()

    def recover(self) -> int:
        """Return expired claims to PENDING now; returns how many rows moved."""
        return self._recovery.run_once()

    def cleanup(self) -> int | None:
        """Delete settled rows past their retention now; None where another process is at it."""
        return self._cleanup.run_once(not_within=0.0)

    def wake(self) -> None:
        """Let the poller of this process run now."""
        if self._state == "started":
            self._scheduler.wake("poller")

    def ping_redis(self) -> None:
        """Ask Redis for a sign of life, now; raises ``BrokerUnavailableError``."""
        self._publisher.probe()

    def beat(self) -> None:
        """Write this process's heartbeat."""
        health = self.health()
        counters: dict[str, Any] = {
            **self.counters,
            "health": {"live": health.live, "ready": health.ready, "reasons": health.reasons},
        }
        self._upkeep.beat(self._id, self.name, __version__, self._role, self.circuit, counters)

    def status(self) -> RelayStatus:
        """Backlog, circuit, loops, counters and instances. Reads the database."""
        return RelayStatus(
            self._store.backlog(),
            self.circuit,
            self._counters.beat_ages(),
            self.counters,
            self._upkeep.instances(),
            self.health(),
        )

    def health(self) -> Health:
        """Whether this process lives and is ready; asks neither MySQL nor Redis, so their outages change nothing."""
        return self._vitals.health(self._state)

    def gauges(self, timeout: float = 2.0) -> Backlog | None:
        """The backlog without settled rows, where this process is the one of all to report it, else None.

        Raises ``TimeoutError`` where MySQL does not answer in time, and what SQLAlchemy raises.
        """
        return self._vitals.gauges(timeout)

    def errors(self) -> dict[str, int]:
        """What was swallowed since the start: ``observer``, ``hook`` (after commit), ``direct_dropped``."""
        return {
            "observer": self._observers.errors,
            "hook": self._recorder.hook_errors,
            "direct_dropped": self._direct.dropped,
        }

    @property
    def circuit(self) -> str:
        """``open`` while this process finds Redis unavailable, else ``closed``."""
        return "open" if self._circuit.is_open else "closed"

    @property
    def counters(self) -> dict[str, int]:
        """What this process has counted since it began."""
        return self._counters.counts()

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The declared streams, by name."""
        return dict(self._streams)

    def observe(self, observer: Observer) -> None:
        """Add an observer; it hears every later fact."""
        self._observers.add(observer)

    def _heartbeat(self) -> None:
        # Without its table there is nothing to beat in; and no backoff, to be ready soon after the migration.
        if self._vitals.schema_fits():
            self.beat()

    def _learn(self) -> None:
        newest: dict[str, str] = {}
        try:
            newest = self._store.newest_entries()
        except Exception:
            _log.warning("could not read the newest published entries", exc_info=True)
        self._publisher.learn((), newest)

    def _probe(self) -> None:
        self._publisher.probe()
        # Whether Redis is still the same is asked before anything is sent to it.
        self._learn()


def migrate(engine: Engine | AsyncEngine | str, *, settings: Settings | None = None, **options: Any) -> tuple[str, ...]:
    """Create or update the relay's tables, as ``zzol-relay migrate`` does; returns the revisions applied, if any.

    Safe to run in several processes at once, and again after a crash. Raises ``SchemaError`` where another process
    has been at it for a minute, and what SQLAlchemy raises.
    """
    # Here, so that only who migrates pays for Alembic.
    from zzol_relay.store.migrate import upgrade

    return upgrade(engine, settings or Settings.load(**options))


def _by_name(streams: Iterable[Stream]) -> dict[str, Stream]:
    named: dict[str, Stream] = {}
    for stream in streams:
        if stream.name in named:
            raise ConfigurationError(f"stream {stream.name!r} is declared twice")
        named[stream.name] = stream
    return named
