"""A Redis that keeps failing: killed and restarted, frozen, its connections cut, on a seeded schedule."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Self

import redis

from zzol_relay.embedded import RedisServer

__all__ = ["Flapping"]

# Written before each reply and left to the kernel: a killed server loses nothing that it has acknowledged. With
# `everysec` a write may wait in the process for two seconds, behind an fsync.
_DURABLE = {"appendonly": "yes", "appendfsync": "no", "auto-aof-rewrite-percentage": "0"}


class Flapping:
    """A private Redis of its own that fails from ``begin()`` to ``end()``; a context manager.

    Half of the freezes outlast the relay's ``redis_timeout`` of a second, so that replies are given up whose commands
    Redis still carries out.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._server = RedisServer(config=_DURABLE)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flapping")
        self._failure: BaseException | None = None
        self.failures = {"killed": 0, "frozen": 0, "cut": 0}

    @property
    def url(self) -> str:
        """Where it is; the same over every failure."""
        return self._server.url

    def begin(self) -> None:
        """Start failing."""
        self._thread.start()

    def end(self) -> None:
        """Stay up from now on. Raises what made a restart fail."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.end()
        finally:
            self._server.stop()

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._random.uniform(0.2, 0.8)):
                kind = self._random.choice(tuple(self.failures))
                # Drawn for every kind, so that a schedule depends on the seed alone.
                pause, freeze = self._random.uniform(0.05, 0.5), self._random.uniform(0.2, 1.8)
                if kind == "killed":
                    self._server.kill()
                    self._ending.wait(pause)
                    self._server.start()
                elif kind == "frozen":
                    self._server.pause()
                    self._ending.wait(freeze)
                    self._server.resume()
                else:
                    self._cut()
                self.failures[kind] += 1
        except BaseException as error:
            self._failure = error

    def _cut(self) -> None:
        with redis.Redis.from_url(self.url) as client, contextlib.suppress(redis.RedisError):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
