"""What fork leaves of a relay: in the child its threads are gone, its locks may be held for ever, and its sockets are
the parent's. So the child's copy begins anew, before any code of the application runs there.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Protocol

__all__ = ["Forkable", "begin_anew_after_fork"]

_log = logging.getLogger("zzol_relay")


class Forkable(Protocol):
    """Something that can begin anew in a forked child."""

    def after_fork(self) -> None: ...


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def begin_anew_after_fork(thing: Forkable) -> None:
    """Have ``thing.after_fork()`` called in every child that this process forks; refers to it weakly."""
    _known.add(thing)


def _after_in_child() -> None:
    for thing in tuple(_known):
        try:
            thing.after_fork()
        except Exception:
            # Nothing may come out of a fork; what follows fails by itself, in the application's sight.
            _log.exception("a relay could not begin anew after fork")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
