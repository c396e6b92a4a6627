"""Runs the relay's migrations; what it needs comes through the attributes that ``zzol_relay.store.migrate`` sets.

``prefix`` and ``schema`` name the tables; ``connection`` is an open connection whose transaction the caller commits,
or ``dialect`` names a dialect to print SQL for. The version table stands beside the tables, under the same prefix.
"""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
where = {
    "version_table": f"{attributes['prefix']}alembic_version",
    "version_table_schema": attributes["schema"],
}

if context.is_offline_mode():
    context.configure(
        dialect_name=attributes["dialect"], literal_binds=True, dialect_opts={"paramstyle": "named"}, **where
    )
else:
    context.configure(connection=attributes["connection"], **where)

with context.begin_transaction():
    context.run_migrations()
