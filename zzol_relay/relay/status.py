"""What ``Relay.status()`` answers."""

from __future__ import annotations

import dataclasses

from zzol_relay.relay.health import Health
from zzol_relay.store.gauges import Backlog
from zzol_relay.store.upkeep import Instance

__all__ = ["RelayStatus"]


@dataclasses.dataclass(frozen=True, slots=True)
class RelayStatus:
    """What stands where now. ``loops`` maps each loop of this process to the seconds since it last finished."""

    backlog: Backlog
    circuit: str
    loops: dict[str, float]
    counters: dict[str, int]
    instances: list[Instance]
    health: Health
