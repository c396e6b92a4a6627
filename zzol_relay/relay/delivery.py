"""The one delivery path: after-commit rows, claimed rows and replays are all sent and judged here.

Between sending and settling no transaction and no connection is held (Z29, Z30).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

from zzol_relay.core.errors import BrokerUnavailableError
from zzol_relay.core.events import entry_fields
from zzol_relay.core.observer import DuplicatesSuppressed, Fact, Path, Published, ShardUnusable
from zzol_relay.core.policy import past_is_safe
from zzol_relay.core.sequence import Mode
from zzol_relay.relay.circuit import Circuit
from zzol_relay.settings import Settings
from zzol_relay.store.claims import ClaimedRow
from zzol_relay.streams.publisher import Command, Outcome, OutcomeKind, ScriptPublisher

__all__ = ["Delivery", "Sent", "Shipment"]

_log = logging.getLogger("zzol_relay.delivery")

WaitReason = Literal["outage", "order", "epoch", "shard"]
_WAITS: dict[OutcomeKind, WaitReason] = {
    OutcomeKind.UNAVAILABLE: "outage",
    OutcomeKind.DEFERRED: "order",
    OutcomeKind.EPOCH: "epoch",
    OutcomeKind.SHARD: "shard",
}


# Not frozen, though nobody changes one: freezing costs 1.5 µs a row.
@dataclasses.dataclass(slots=True)
class Shipment:
    """A row to send: in which mode, and under which epoch its order was proven."""

    row: ClaimedRow
    data: bytes
    mode: Mode
    epoch: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What became of shipments, in their order within each list.

    ``done`` may be settled with its entry id ('' where Redis no longer remembers it); ``waiting`` goes back at no
    cost; ``failed`` costs an attempt; ``impossible`` is a dead letter at once.
    """

    done: tuple[tuple[ClaimedRow, str], ...]
    waiting: tuple[tuple[Shipment, WaitReason], ...]
    failed: tuple[tuple[ClaimedRow, str], ...]
    impossible: tuple[tuple[ClaimedRow, str], ...]


class Delivery:
    """Sends shipments and judges the outcomes; opens the circuit, and reads a new epoch where Redis says so."""

    def __init__(
        self, publisher: ScriptPublisher, circuit: Circuit, settings: Settings, observe: Callable[[Fact], None]
    ) -> None:
        self._publisher = publisher
        self._circuit = circuit
        self._settings = settings
        self._observe = observe

    def send(self, shipments: Sequence[Shipment], path: Path) -> Sent:
        """Publish in one pipeline, in the given order. Never raises for what Redis does."""
        started = time.monotonic()
        outcomes = self._publisher.publish(map(self._command, shipments)) if shipments else []
        took = time.monotonic() - started
        done: list[tuple[ClaimedRow, str]] = []
        waiting: list[tuple[Shipment, WaitReason]] = []
        failed: list[tuple[ClaimedRow, str]] = []
        impossible: list[tuple[ClaimedRow, str]] = []
        published: list[ClaimedRow] = []
        duplicates: list[ClaimedRow] = []
        for shipment, outcome in zip(shipments, outcomes, strict=True):
            row = shipment.row
            kind = outcome.kind
            if kind is OutcomeKind.PUBLISHED:
                published.append(row)
                done.append((row, outcome.detail))
            elif kind is OutcomeKind.DUPLICATE:
                duplicates.append(row)
                done.append((row, outcome.detail))
            elif kind is OutcomeKind.PAST:
                if past_is_safe(row.age, self._settings.dedup_window):
                    duplicates.append(row)
                    done.append((row, ""))
                else:
                    impossible.append((row, _past(row, outcome)))
            elif kind is OutcomeKind.EVENT:
                failed.append((row, outcome.detail))
            else:
                waiting.append((shipment, _WAITS[kind]))
        self._announce(path, published, duplicates, took)
        if waiting:
            self._react(shipments, outcomes)
        return Sent(tuple(done), tuple(waiting), tuple(failed), tuple(impossible))

    def _command(self, shipment: Shipment) -> Command:
        row, event = shipment.row, shipment.row.event
        fields = entry_fields(event, shipment.data, self._settings.source)
        if shipment.mode is Mode.REPLAY:
            fields[-2:-2] = ("replay", str(row.replays))
        return Command(
            stream_key=row.stream_key,
            event_id=str(event.event_id),
            mode=shipment.mode,
            fields=fields,
            epoch=shipment.epoch,
            aggregate=event.aggregate,
            sequence=event.sequence or 0,
            prev_sequence=row.prev_sequence or 0,
            replay=row.replays if shipment.mode is Mode.REPLAY else 0,
        )

    def _announce(self, path: Path, published: list[ClaimedRow], duplicates: list[ClaimedRow], took: float) -> None:
        if published:
            self._observe(
                Published(path, tuple(row.event_id for row in published), tuple(row.age + took for row in published))
            )
        if duplicates:
            self._observe(DuplicatesSuppressed(path, tuple(row.event_id for row in duplicates)))

    def _react(self, shipments: Sequence[Shipment], outcomes: Sequence[Outcome]) -> None:
        stale: set[str] = set()
        unusable: dict[str, str] = {}
        for shipment, outcome in zip(shipments, outcomes, strict=True):
            if outcome.kind is OutcomeKind.UNAVAILABLE:
                self._circuit.open(outcome.detail)
            elif outcome.kind is OutcomeKind.EPOCH:
                stale.add(shipment.row.stream_key)
            elif outcome.kind is OutcomeKind.SHARD:
                unusable[shipment.row.stream_key] = outcome.detail
        if stale:
            try:
                self._publisher.learn(stale)
            except BrokerUnavailableError as error:
                self._circuit.open(str(error))
        for key, error_text in unusable.items():
            _log.error("a shard cannot be written", extra={"stream_key": key, "error": error_text})
            self._observe(ShardUnusable(key, error_text))


def _past(row: ClaimedRow, outcome: Outcome) -> str:
    return (
        f"sequence {row.sequence} is not above the stream's tail {outcome.detail}, yet the event is not remembered:"
        " was the database restored, or a counter deleted? Replay it if it is wanted"
    )
