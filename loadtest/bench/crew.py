"""The processes of a benchmark: each sets up, says that it is ready, works when told, and says what it found."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Self

__all__ = ["Crew"]


class Crew:
    """Child processes with a pipe to each; a context manager that ends them all.

    A target is a function of a module, called with its end of the pipe and the given arguments. It ends when
    ``recv()`` raises ``EOFError``: the parent is gone, or needs it no more.
    """

    def __init__(self) -> None:
        # Not fork: the parent has threads, and connections that must not be shared.
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[SpawnProcess, Connection]] = []

    def start(self, count: int, target: Callable[..., None], *args: Any) -> None:
        """Start ``count`` processes that run ``target(pipe, number, *args)``."""
        for number in range(count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=target, args=(theirs, number, *args), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def tell(self, message: object) -> None:
        """Send to each."""
        for _, pipe in self._members:
            pipe.send(message)

    def hear(self, timeout: float) -> list[Any]:
        """The next message of each. Raises ``TimeoutError``, and ``RuntimeError`` where one has died."""
        deadline = time.monotonic() + timeout
        messages = []
        for process, pipe in self._members:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"process {process.pid} said nothing within {timeout:g} s")
            try:
                messages.append(pipe.recv())
            except EOFError:
                process.join()
                raise RuntimeError(f"process {process.pid} ended with {process.exitcode}") from None
        return messages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            process.join(15.0)
            if process.is_alive():
                process.kill()
                process.join()
