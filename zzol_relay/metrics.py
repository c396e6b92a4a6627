"""Facts into Prometheus metrics (G23, G24, S15). ``docs/metrics.md`` describes each, and what to be alarmed by.

Counting is done here and costs about a microsecond a fact, whatever their batch; prometheus-client (the extra
``metrics``) is asked when somebody scrapes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from zzol_relay.core.errors import ConfigurationError
from zzol_relay.core.lifecycle import UNPUBLISHED, Status
from zzol_relay.core.observer import (
    CircuitChanged,
    Claimed,
    ClaimLost,
    CleanedUp,
    DataLossDetected,
    DeadLettered,
    DeadlockRetried,
    Deferred,
    DirectPublished,
    DuplicatesSuppressed,
    Fact,
    Failed,
    LoopBeat,
    LoopFailed,
    Observer,
    Published,
    Recorded,
    Recovered,
    Settled,
    ShardUnusable,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["BUCKETS", "METRICS", "Metric", "Metrics", "Watched"]

_log = logging.getLogger("zzol_relay.metrics")

BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
)  # fmt: skip
"""Upper bounds of the histograms, in seconds: an event right after its commit takes one or two milliseconds, one of
an outage as long as that lasts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A family: a counter's samples end in ``_total``, a histogram's ``_bucket``, ``_sum``, ``_count``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = (
    Metric("zzol_outbox_backlog", "gauge", "Rows by status; 100001 means more than 100000.", ("status",)),
    Metric("zzol_outbox_oldest_unpublished_age_seconds", "gauge", "Age of the oldest unpublished row; 0 if none."),
    Metric("zzol_outbox_last_published_timestamp_seconds", "gauge", "When a row of the outbox was last published."),
    Metric("zzol_outbox_commit_to_publish_seconds", "histogram", "From a row's creation to its entry.", ("path",)),
    Metric("zzol_outbox_commit_wait_seconds", "histogram", "How long commits waited for their events' publishing."),
    Metric("zzol_outbox_recorded", "counter", "Rows committed by this process."),
    Metric("zzol_outbox_published", "counter", "Entries that Redis acknowledged.", ("path",)),
    Metric("zzol_outbox_duplicates_suppressed", "counter", "Resent events that stood there already.", ("path",)),
    Metric("zzol_outbox_settled", "counter", "Rows marked PUBLISHED.", ("path",)),
    Metric("zzol_outbox_deferred", "counter", "Rows left to the poller or given back, at no cost.", ("path", "reason")),
    Metric("zzol_outbox_claimed", "counter", "Rows claimed by this process's poller."),
    Metric("zzol_outbox_retried", "counter", "Of the claimed rows, those that had failed before."),
    Metric("zzol_outbox_failed", "counter", "Attempts that failed by the event's own fault and will be repeated."),
    Metric("zzol_outbox_dead_lettered", "counter", "Rows that became dead letters."),
    Metric("zzol_outbox_recovered", "counter", "Expired claims returned to PENDING."),
    Metric("zzol_outbox_claims_lost", "counter", "Rows that were no longer this process's when it settled.", ("path",)),
    Metric("zzol_outbox_cleaned_up", "counter", "Rows deleted after their retention.", ("table",)),
    Metric("zzol_outbox_deadlock_retries", "counter", "The relay's transactions that ran again.", ("operation",)),
    Metric("zzol_direct_published", "counter", "Events acknowledged on the direct path."),
    Metric("zzol_direct_dropped", "counter", "Events of publish_soon() that were not acknowledged."),
    Metric("zzol_last_publish_timestamp_seconds", "gauge", "When this process last published.", ("path",)),
    Metric("zzol_circuit_open", "gauge", "1 while Redis is found to be unavailable."),
    Metric("zzol_circuit_openings", "counter", "Times that Redis became unavailable."),
    Metric("zzol_redis_data_losses", "counter", "Times that a shard had lost acknowledged entries."),
    Metric("zzol_redis_shards_unusable", "counter", "Times that one shard could not be written while Redis was up."),
    Metric("zzol_loop_last_success_timestamp_seconds", "gauge", "When a loop last finished a round.", ("loop",)),
    Metric("zzol_loop_failures", "counter", "Rounds of a loop that raised.", ("loop",)),
    Metric("zzol_observer_errors", "counter", "Errors raised by observers and swallowed."),
    Metric("zzol_hook_errors", "counter", "Errors of the after-commit hook; the poller took over."),
    Metric("zzol_gauges_failures", "counter", "Scrapes whose backlog could not be read: MySQL away or slow."),
)
"""Every family, as it is exposed. Those of the database are reported by one process of all that share an outbox."""

_BY_NAME = {metric.name: metric for metric in METRICS}
_PATHS = ("after_commit", "poller")
_Labels = tuple[str, ...]


class _Backlog(Protocol):
    @property
    def by_status(self) -> Mapping[str, int]: ...
    @property
    def oldest_unpublished_age(self) -> float | None: ...
    @property
    def last_published_at(self) -> datetime | None: ...


class Watched(Protocol):
    """What ``attach`` needs of a ``Relay``."""

    def observe(self, observer: Observer) -> None:
        """Add an observer."""

    def gauges(self) -> _Backlog | None:
        """The backlog, where this process is to report it; may raise."""

    def errors(self) -> Mapping[str, int]:
        """What was swallowed: ``observer``, ``hook``, ``direct_dropped``."""


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, values: Sequence[float]) -> None:
        # Sorted, so that a batch costs a search per bucket and not one per value.
        ordered = sorted(values)
        self.sum += sum(ordered)
        counts, at, end = self.counts, 0, len(ordered)
        for i, bound in enumerate(BUCKETS):
            upto = bisect_right(ordered, bound, at)
            counts[i] += upto - at
            at = upto
            if at == end:
                return
        counts[-1] += end - at

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class Metrics:
    """An observer that counts, and a collector that reports; one per relay.

    ::

        metrics = Metrics().attach(relay)  # before relay.start()

    ``registry`` defaults to prometheus-client's own. Given as an observer alone it reports facts; ``attach`` adds what
    has to be asked for: the backlog, and the errors that were swallowed. Raises ``ConfigurationError`` without
    prometheus-client. Threads may share it.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError:
            raise ConfigurationError("metrics need prometheus-client: pip install 'zzol-relay[metrics]'") from None
        self._lock = threading.Lock()
        self._values: dict[tuple[str, _Labels], float] = {
            (metric.name, ()): 0.0 for metric in METRICS if metric.kind == "counter" and not metric.labels
        }
        for name, metric in _BY_NAME.items():
            if metric.kind == "counter" and metric.labels == ("path",):
                # There from the beginning: a rate needs a zero to rise from.
                for path in _PATHS:
                    self._values[name, (path,)] = 0.0
        self._values[("zzol_circuit_open", ())] = 0.0
        self._ages = {path: _Histogram() for path in _PATHS}
        self._waits = _Histogram()
        self._watched: Watched | None = None
        self.registry = registry if registry is not None else REGISTRY
        self.registry.register(self)

    def attach(self, relay: Watched) -> Metrics:
        """Observe ``relay`` and report its backlog too; returns itself."""
        self._watched = relay
        relay.observe(self)
        return self

    def close(self) -> None:
        """Leave the registry, so that another relay's metrics can take the names."""
        self.registry.unregister(self)

    def __call__(self, fact: Fact) -> None:
        handle = _HANDLERS.get(type(fact))
        if handle is not None:
            with self._lock:
                handle(self, fact)

    def collect(self) -> Iterator[Any]:
        """What prometheus-client asks at each scrape; waits for the database a bounded time."""
        gauges = self._gauges()
        with self._lock:
            values = dict(self._values)
            histograms: dict[str, dict[_Labels, tuple[list[tuple[str, float]], float]]]
            histograms = {"zzol_outbox_commit_wait_seconds": {(): (self._waits.cumulative(), self._waits.sum)}}
            histograms["zzol_outbox_commit_to_publish_seconds"] = {
                (path,): (ages.cumulative(), ages.sum) for path, ages in self._ages.items()
            }
        errors = self._watched.errors() if self._watched is not None else {}
        values |= {
            ("zzol_observer_errors", ()): errors.get("observer", 0),
            ("zzol_hook_errors", ()): errors.get("hook", 0),
            ("zzol_direct_dropped", ()): errors.get("direct_dropped", 0),
        }
        yield from _families({**values, **gauges}, histograms)

    def describe(self) -> Iterator[Any]:
        """The families without samples: registering asks no database."""
        yield from _families({}, {})

    def _gauges(self) -> dict[tuple[str, _Labels], float]:
        if self._watched is None:
            return {}
        try:
            backlog = self._watched.gauges()
        except Exception as error:
            _log.warning("the backlog could not be read", extra={"error": type(error).__name__})
            with self._lock:
                self._add("zzol_gauges_failures", 1)
            return {}
        if backlog is None:
            return {}
        found: dict[tuple[str, _Labels], float] = {
            ("zzol_outbox_backlog", (status.value,)): backlog.by_status.get(status.value, 0)
            for status in (*sorted(UNPUBLISHED), Status.DEAD_LETTER)
        }
        found["zzol_outbox_oldest_unpublished_age_seconds", ()] = backlog.oldest_unpublished_age or 0.0
        if backlog.last_published_at is not None:
            at = backlog.last_published_at.replace(tzinfo=UTC).timestamp()
            found["zzol_outbox_last_published_timestamp_seconds", ()] = at
        return found

    def _add(self, name: str, number: float, *labels: str) -> None:
        key = (name, labels)
        self._values[key] = self._values.get(key, 0.0) + number

    def _recorded(self, fact: Recorded) -> None:
        self._add("zzol_outbox_recorded", len(fact.event_ids))
        self._waits.add((fact.waited,))

    def _published(self, fact: Published) -> None:
        self._add("zzol_outbox_published", len(fact.event_ids), fact.path)
        self._ages[fact.path].add(fact.ages)
        self._values["zzol_last_publish_timestamp_seconds", (fact.path,)] = time.time()

    def _directly(self, fact: DirectPublished) -> None:
        self._add("zzol_direct_published", fact.count)
        self._values["zzol_last_publish_timestamp_seconds", ("direct",)] = time.time()

    def _claimed(self, fact: Claimed) -> None:
        self._add("zzol_outbox_claimed", len(fact.event_ids))
        self._add("zzol_outbox_retried", fact.retries)

    def _circuit(self, fact: CircuitChanged) -> None:
        self._values["zzol_circuit_open", ()] = float(fact.open)
        self._add("zzol_circuit_openings", int(fact.open))

    def _beat(self, fact: LoopBeat) -> None:
        self._values["zzol_loop_last_success_timestamp_seconds", (fact.loop,)] = time.time()


_HANDLERS: dict[type, Callable[[Metrics, Any], None]] = {
    Recorded: Metrics._recorded,
    Published: Metrics._published,
    DirectPublished: Metrics._directly,
    Claimed: Metrics._claimed,
    CircuitChanged: Metrics._circuit,
    LoopBeat: Metrics._beat,
    DuplicatesSuppressed: lambda self, fact: self._add(
        "zzol_outbox_duplicates_suppressed", len(fact.event_ids), fact.path
    ),
    Settled: lambda self, fact: self._add("zzol_outbox_settled", len(fact.event_ids), fact.path),
    Deferred: lambda self, fact: self._add("zzol_outbox_deferred", len(fact.event_ids), fact.path, fact.reason),
    Failed: lambda self, fact: self._add("zzol_outbox_failed", 1),
    DeadLettered: lambda self, fact: self._add("zzol_outbox_dead_lettered", 1),
    Recovered: lambda self, fact: self._add("zzol_outbox_recovered", fact.count),
    ClaimLost: lambda self, fact: self._add("zzol_outbox_claims_lost", fact.count, fact.path),
    CleanedUp: lambda self, fact: self._add("zzol_outbox_cleaned_up", fact.count, fact.table),
    DeadlockRetried: lambda self, fact: self._add("zzol_outbox_deadlock_retries", 1, fact.operation),
    DataLossDetected: lambda self, fact: self._add("zzol_redis_data_losses", 1),
    ShardUnusable: lambda self, fact: self._add("zzol_redis_shards_unusable", 1),
    LoopFailed: lambda self, fact: self._add("zzol_loop_failures", 1, fact.loop),
}


def _families(
    values: Mapping[tuple[str, _Labels], float],
    histograms: Mapping[str, Mapping[_Labels, tuple[list[tuple[str, float]], float]]],
) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    by_name: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    for (name, labels), value in values.items():
        by_name.setdefault(name, []).append((labels, value))
    for metric in METRICS:
        if metric.kind == "histogram":
            family: Any = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, (buckets, total) in histograms.get(metric.name, {}).items():
                family.add_metric(labels, buckets, total)
        else:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in sorted(by_name.get(metric.name, ())):
                family.add_metric(labels, value)
        yield family
