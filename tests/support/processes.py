"""Python programs that a test runs beside itself, stops, freezes and kills.

A child tells what it has done as lines on its standard output (``print("committed", id, flush=True)``); the test
waits for a line, not for time.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from zzol_relay.embedded.process import Guarded

__all__ = ["ROOT", "Child"]

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


class Child:
    """A Python program: ``script`` is a file, or source text (dedented). A context manager that kills it at the end.

    It runs in the checkout, so that ``zzol_relay`` and ``tests.support`` can be imported, with ``env`` as its whole
    environment. It dies with this process.
    """

    def __init__(self, script: str | Path, *arguments: str, env: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        """What it has printed so far, without line ends."""
        self._news = threading.Condition()
        self._ended = False
        # Errors go to a file: an unread pipe would stop a child that writes much.
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        program = [str(script)] if isinstance(script, Path) else ["-c", textwrap.dedent(script)]
        self._child = Guarded(
            [sys.executable, "-u", "-X", "faulthandler", *program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), **env},
            text=True,
            encoding="utf-8",
        )
        self._reader = threading.Thread(target=self._read, name=f"child-{self._child.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended; a stopped one is running."""
        return self._child.running

    @property
    def errors(self) -> str:
        """What it has written to its standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def wait_for_line(self, prefix: str, timeout: float = 15.0, count: int = 1) -> str:
        """Wait until ``count`` lines that begin with ``prefix`` were printed; returns the last of them.

        Fails the test after ``timeout`` seconds, or when the child ends without it.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            while len(found := [line for line in self.lines if line.startswith(prefix)]) < count:
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    why = "the child ended" if self._ended else f"{timeout:g} s passed"
                    raise AssertionError(
                        f"{why} without {count} lines {prefix!r}; it printed {self.lines[-20:]}, and as errors:\n"
                        f"{self.errors[-4000:]}"
                    )
                self._news.wait(left)
            return found[count - 1]

    def send(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(f"{line}\n")
        self._child.process.stdin.flush()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal: SIGKILL (and wait for its end), SIGSTOP, SIGCONT, SIGTERM …"""
        self._child.signal(number)
        if number == signal.SIGKILL:
            self.wait()

    def wait(self, timeout: float = 15.0) -> int:
        """Wait for its end and its last line; returns its exit code, negative for a signal's number."""
        try:
            code: int = self._child.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the child did not end within {timeout:g} s; it printed {self.lines[-20:]}") from None
        self._reader.join()
        return code

    def close(self) -> None:
        """Kill it if it runs, and let go of its pipes; safe to call twice."""
        self._child.end()
        self._reader.join()
        for stream in (self._child.process.stdin, self._child.process.stdout, self._errors):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._child.process.stdout is not None
        for line in self._child.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()
