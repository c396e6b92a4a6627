"""Which recorded rows a transaction still holds, savepoint by savepoint.

A rolled-back savepoint takes its rows with it; a released one hands them to what encloses it. Sessions tell through
three events on the *instance* (listeners on the class would hit other relays' sessions); Core connections opened by
``relay.begin`` tell through their savepoint events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from zzol_relay.relay.delivery import Shipment

__all__ = ["ConnectionUnit", "SessionUnit"]

Handover = Callable[[list[Shipment]], None]


class SessionUnit:
    """The rows recorded in one Session, from its first ``record()`` on, over all its transactions.

    ``handover`` is called with a root transaction's rows once it is committed and its connection is back in the pool:
    waiting in ``after_commit`` would still hold it.
    """

    def __init__(self, session: Session, handover: Handover) -> None:
        self._handover = handover
        self._rows: list[tuple[SessionTransaction, Shipment]] = []
        self._outer: Connection | None = None
        self._committed: set[SessionTransaction] = set()
        event.listen(session, "after_commit", self._after_commit)
        event.listen(session, "after_transaction_end", self._after_transaction_end)

    def add(self, session: Session, shipment: Shipment, outer: Connection | None) -> None:
        """Note a row under the innermost savepoint that is open.

        ``outer`` is the Connection that the session was bound to, where it was: such a session may commit inside an
        outside transaction that rolls back later.
        """
        owner = session.get_nested_transaction() or session.get_transaction()
        assert owner is not None
        self._outer = outer
        self._rows.append((owner, shipment))

    def _after_commit(self, session: Session) -> None:
        # Fires on savepoint release too; which of the two is told apart at the transaction's end.
        transaction = session.get_nested_transaction() or session.get_transaction()
        if transaction is not None and self._rows:
            self._committed.add(transaction)

    def _after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        if not self._rows or not (transaction.nested or transaction.parent is None):
            return
        committed = transaction in self._committed
        self._committed.discard(transaction)
        if transaction.nested and committed:
            parent = _enclosing(transaction)
            self._rows = [(parent if owner is transaction else owner, row) for owner, row in self._rows]
        elif transaction.nested:
            self._rows = [(owner, row) for owner, row in self._rows if owner is not transaction]
        else:
            rows = [row for _, row in self._rows]
            self._rows = []
            outer, self._outer = self._outer, None
            if committed and not (outer is not None and outer.in_transaction()):
                self._handover(rows)


class ConnectionUnit:
    """The rows recorded on one Core connection within ``relay.begin``."""

    def __init__(self, connection: Connection) -> None:
        self._savepoints: list[str] = []
        self._opened = 0
        self._rows: list[tuple[int, Shipment]] = []
        event.listen(connection, "savepoint", self._savepoint)
        event.listen(connection, "rollback_savepoint", self._rollback_savepoint)
        event.listen(connection, "release_savepoint", self._release_savepoint)

    def add(self, shipment: Shipment) -> None:
        """Note a row under the innermost savepoint that is open."""
        self._rows.append((len(self._savepoints), shipment))

    def take(self) -> list[Shipment]:
        """The rows that were not rolled back, once the transaction is committed."""
        rows = [row for _, row in self._rows]
        self._rows = []
        return rows

    def _savepoint(self, connection: Connection, name: str | None) -> None:
        # The event fires before SQLAlchemy has numbered an unnamed savepoint; it counts them per connection.
        self._opened += 1
        self._savepoints.append(name or f"sa_savepoint_{self._opened}")

    def _rollback_savepoint(self, connection: Connection, name: str, context: Any) -> None:
        depth = self._close(name)
        self._rows = [(at, row) for at, row in self._rows if at <= depth]

    def _release_savepoint(self, connection: Connection, name: str, context: Any) -> None:
        depth = self._close(name)
        self._rows = [(min(at, depth), row) for at, row in self._rows]

    def _close(self, name: str) -> int:
        """Forget the savepoint and those within it; returns how many enclose it."""
        depth = self._savepoints.index(name)
        del self._savepoints[depth:]
        return depth


def _enclosing(transaction: SessionTransaction) -> SessionTransaction:
    parent = transaction.parent
    while parent is not None and not parent.nested and parent.parent is not None:
        parent = parent.parent
    return parent or transaction
