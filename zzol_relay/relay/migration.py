"""Migrating from within an application."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from zzol_relay.settings import Settings

__all__ = ["migrate"]


def migrate(engine: Engine | AsyncEngine | str, *, settings: Settings | None = None, **options: Any) -> tuple[str, ...]:
    """Create or update the relay's tables, as ``zzol-relay migrate`` does; returns the revisions applied, if any.

    Safe to run in several processes at once, and again after a crash. Raises ``SchemaError`` where another process
    has been at it for a minute, and what SQLAlchemy raises.
    """
    # Here, so that only who migrates pays for Alembic.
    from zzol_relay.store.migrate import upgrade

    return upgrade(engine, settings or Settings.load(**options))
