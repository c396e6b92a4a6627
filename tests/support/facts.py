"""What a relay announced, kept for a test that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from zzol_relay.core.observer import Fact, LoopBeat

__all__ = ["Facts"]

T = TypeVar("T")


class Facts:
    """An observer that keeps every fact in order. Thread-safe; waiting is woken by facts, not by a clock."""

    def __init__(self) -> None:
        self._facts: list[Fact] = []
        self._news = threading.Condition()

    def __call__(self, fact: Fact) -> None:
        with self._news:
            self._facts.append(fact)
            self._news.notify_all()

    def all(self) -> list[Fact]:
        """Every fact since the start or the last ``clear()``."""
        with self._news:
            return list(self._facts)

    def of(self, kind: type[T]) -> list[T]:
        """The facts of one type."""
        return [fact for fact in self.all() if isinstance(fact, kind)]

    def clear(self) -> None:
        """Forget what was heard."""
        with self._news:
            self._facts.clear()

    @overload
    def wait_for(self, wanted: type[T], timeout: float = 10.0, count: int = 1) -> list[T]: ...
    @overload
    def wait_for(self, wanted: Callable[[Any], object], timeout: float = 10.0, count: int = 1) -> list[Any]: ...
    def wait_for(self, wanted: Any, timeout: float = 10.0, count: int = 1) -> list[Any]:
        """Wait until ``count`` facts of the type ``wanted``, or that the predicate ``wanted`` accepts, were heard since
        the last ``clear()``; returns them. Fails the test after ``timeout`` seconds.
        """
        accepts = (lambda fact: isinstance(fact, wanted)) if isinstance(wanted, type) else wanted

        def found() -> list[Any]:
            return [fact for fact in self._facts if accepts(fact)]

        deadline = time.monotonic() + timeout
        with self._news:
            while len(matching := found()) < count:
                left = deadline - time.monotonic()
                if left <= 0:
                    heard = "\n".join(f"  {fact}" for fact in self._facts[-20:]) or "  nothing"
                    name = getattr(wanted, "__name__", wanted)
                    raise AssertionError(
                        f"{len(matching)} of {count} facts {name!r} within {timeout:g} s; the last facts:\n{heard}"
                    )
                self._news.wait(left)
        return matching

    def wait_until(self, condition: Callable[[], object], timeout: float = 15.0) -> None:
        """Wait until ``condition()`` holds, asked again after each fact. Fails the test after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            with self._news:
                heard = len(self._facts)
            if condition():
                return
            with self._news:
                while len(self._facts) == heard and (left := deadline - time.monotonic()) > 0:
                    self._news.wait(left)
                if time.monotonic() >= deadline:
                    last = "\n".join(f"  {fact}" for fact in self._facts[-20:])
                    raise AssertionError(f"not within {timeout:g} s; the last facts:\n{last}")

    def wait_for_beats(self, loop: str, count: int) -> None:
        """Wait until a loop has finished ``count`` more rounds."""
        already = sum(1 for beat in self.of(LoopBeat) if beat.loop == loop)
        self.wait_for(lambda fact: isinstance(fact, LoopBeat) and fact.loop == loop, count=already + count)
