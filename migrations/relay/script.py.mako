"""${message}."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    prefix: str = context.config.attributes["prefix"]
    schema: str | None = context.config.attributes["schema"]
    ${upgrades if upgrades else "pass"}
