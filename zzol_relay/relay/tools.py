"""What operators are given, made of one set of stores."""

from __future__ import annotations

from collections.abc import Callable

from zzol_relay.relay.dead_letters import DeadLetters
from zzol_relay.relay.events import Events
from zzol_relay.relay.republish import Republisher
from zzol_relay.settings import Settings
from zzol_relay.store.audit import AuditStore
from zzol_relay.store.database import Database
from zzol_relay.store.dead_letters import DeadLetterStore
from zzol_relay.store.outbox import OutboxStore
from zzol_relay.store.republish import RepublishStore
from zzol_relay.streams.publisher import ScriptPublisher

__all__ = ["operator_tools"]


def operator_tools(
    database: Database, store: OutboxStore, publisher: ScriptPublisher, settings: Settings, wake: Callable[[], None]
) -> tuple[DeadLetters, Events, Republisher]:
    """``relay.dead_letters``, ``relay.events`` and ``relay.republish``."""
    rows, audit = DeadLetterStore(database, settings), AuditStore(database)
    return (
        DeadLetters(store, rows, audit, wake),
        Events(store, rows, audit, publisher, settings),
        Republisher(RepublishStore(database, settings), audit, publisher, settings),
    )
