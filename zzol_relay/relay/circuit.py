"""The circuit to Redis: open while it cannot be reached, closed by a background probe.

While it is open no commit waits and no row is claimed. One warning per change of state, not per event.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from zzol_relay.core.errors import BrokerUnavailableError
from zzol_relay.core.observer import CircuitChanged, Fact
from zzol_relay.core.policy import backoff

__all__ = ["Circuit"]

_log = logging.getLogger("zzol_relay.circuit")


class Circuit:
    """``probe`` raises ``BrokerUnavailableError`` while Redis is away. ``on_close`` runs on the probing thread."""

    def __init__(
        self,
        probe: Callable[[], None],
        *,
        base: float,
        cap: float,
        observe: Callable[[Fact], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe = probe
        self._base = base
        self._cap = cap
        self._observe = observe
        self._on_close = on_close
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._random = random.Random()
        self.is_open = False
        self.reason = ""

    def open(self, reason: str) -> None:
        """Open the circuit and start probing; nothing happens where it is open already."""
        with self._lock:
            if self.is_open or self._stopping.is_set():
                return
            self.is_open = True
            self.reason = reason
            self._thread = threading.Thread(target=self._probe_until_up, name="zzol-relay-probe", daemon=True)
            self._thread.start()
        _log.warning("Redis is unavailable; events wait in the outbox", extra={"reason": reason})
        self._observe(CircuitChanged(True, reason))

    def check(self) -> bool:
        """Whether Redis is up; with an open circuit this probes now, on the caller's thread."""
        return not self.is_open or self._try()

    def stop(self) -> None:
        """Stop probing and wait for the probe's thread."""
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def _probe_until_up(self) -> None:
        failures = 0
        while not self._stopping.is_set() and self.is_open:
            failures += 1
            self._stopping.wait(backoff(failures, self._random.random(), base=self._base, cap=self._cap))
            if self._stopping.is_set() or self._try():
                return

    def _try(self) -> bool:
        try:
            self._probe()
        except BrokerUnavailableError as error:
            self.reason = str(error)
            return False
        except Exception:
            _log.exception("the probe of Redis raised")
            return False
        with self._lock:
            if not self.is_open:
                return True
            self.is_open = False
        _log.warning("Redis is available again")
        self._observe(CircuitChanged(False, ""))
        self._on_close()
        return True
