"""What the private servers have in common: a child process on a loopback port, its directory, its life and its end."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from zzol_relay.core.errors import EmbeddedServiceError

__all__ = ["HOST", "Guarded", "Server", "Watchman", "find_program", "free_port", "tail"]

HOST = "127.0.0.1"

_STOP_TIMEOUT = 20.0
_POLL = 0.01
_LOG_LINES = 15
_SBIN = ("/usr/sbin", "/usr/local/sbin")

# PR_SET_PDEATHSIG would do the same on Linux, but it fires when the *thread* that started the child ends. The pipe
# closes with the process, however that dies.
_WATCH = """
trap '' HUP INT TERM
pid=
while read -r line; do pid=$line; done
[ -z "$pid" ] || kill -9 "$pid" 2>/dev/null
[ -n "$1" ] || exit 0
n=0
while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null && [ $n -lt 20 ]; do sleep 0.1; n=$((n + 1)); done
rm -rf -- "$1"
"""


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now, where possible below the range of outgoing connections.

    A port inside that range may be taken by anybody's outgoing connection while a server on it restarts, or by a
    client's own attempt to reach it (a self-connection).
    """
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    pick = random.SystemRandom()
    for _ in range(50 if low > 12_000 else 0):
        port = pick.randrange(10_000, low)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A connection that lingers in TIME_WAIT does not keep a server from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def find_program(name: str) -> str | None:
    """Where ``name`` is on PATH or in a directory for system programs, which a user's PATH often lacks."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_SBIN)))


def tail(log: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a log, indented, for an error message."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"  (no log: {error})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (the log is empty)"


class Watchman:
    """A process that outlives this one, however that ends, to kill the child it was told of and delete ``temporary``.

    Raises ``OSError`` when it cannot be started.
    """

    def __init__(self, temporary: Path | None = None) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            ["/bin/sh", "-c", _WATCH, "watch", str(temporary or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int | None) -> None:
        """Tell it which child there is now; None: none."""
        assert self._process.stdin is not None
        # Somebody may have killed it.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%s\n" % ("" if pid is None else str(pid)).encode())
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """End it; it does nothing more. Safe to call twice."""
        self._process.kill()
        self._process.communicate()


class Guarded:
    """A child process that ends with this one, even when this one is killed.

    ``watchman`` sees to that, else one of the child's own. ``streams`` go to ``subprocess.Popen``. The child has a
    session of its own: an interrupt typed at the terminal does not reach it. Raises ``OSError`` when it cannot be
    started.
    """

    def __init__(self, argv: Sequence[str], *, watchman: Watchman | None = None, **streams: object) -> None:
        self._own = None if watchman is not None else Watchman()
        self._watchman = watchman or self._own
        try:
            self.process = subprocess.Popen(  # type: ignore[call-overload]  # noqa: S603
                argv, start_new_session=True, **streams
            )
        except OSError:
            if self._own is not None:
                self._own.dismiss()
            raise
        if self._watchman is not None:
            self._watchman.watch(self.process.pid)

    @property
    def pid(self) -> int:
        """The child's process id."""
        pid: int = self.process.pid
        return pid

    @property
    def running(self) -> bool:
        """Whether the child has not ended; a stopped (SIGSTOP) one is running."""
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the child has ended."""
        self.process.send_signal(number)

    def end(self, timeout: float = 0.0) -> None:
        """Ask the child to end (SIGTERM) and wait for ``timeout`` seconds, then kill it; 0 kills at once."""
        if self.running and timeout > 0:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        if self.running:
            self.signal(signal.SIGKILL)
        self.process.wait()
        if self._own is not None:
            self._own.dismiss()
        elif self._watchman is not None:
            self._watchman.watch(None)


class _Held:
    """What a server holds outside this process; separate from it so that a finalizer can let go of it."""

    def __init__(self) -> None:
        self.child: Guarded | None = None
        self.temporary: Path | None = None
        self.watchman: Watchman | None = None
        self.owner = os.getpid()

    def end(self, timeout: float = 0.0) -> None:
        if self.child is not None:
            self.child.end(timeout)
            self.child = None

    def delete(self) -> None:
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary = None
        if self.watchman is not None:
            self.watchman.dismiss()
            self.watchman = None

    def discard(self) -> None:
        # A fork inherits the finalizer, not the server.
        if self.owner == os.getpid():
            self.end()
            self.delete()


class Server(ABC):
    """A private server on a loopback port; a context manager. Not safe to drive from several threads at once.

    Without ``directory`` it lives in a temporary one, deleted by ``stop()`` and at the latest when this process ends,
    however it ends; a given one is made when missing, and kept. The port stays the same over every start and stop.
    Nothing is written to the terminal.
    """

    name = "server"
    """What it is called in messages."""
    start_timeout = 40.0
    """Longest that ``start()`` waits, in seconds."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, port: int | None = None) -> None:
        if os.name != "posix":
            raise EmbeddedServiceError(f"a private {self.name} needs a POSIX system; use a server of your own")
        self._given = None if directory is None else Path(directory).absolute()
        self._port = port or free_port()
        self._may_move = port is None
        self._held = _Held()
        weakref.finalize(self, self._held.discard)

    # -- what it is

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1."""
        return self._port

    @property
    def pid(self) -> int:
        """Its process id. Raises ``EmbeddedServiceError`` when it was not started."""
        return self._child().pid

    @property
    def running(self) -> bool:
        """Whether its process is there; a paused one is running."""
        return self._held.child is not None and self._held.child.running

    @property
    def directory(self) -> Path:
        """Where its files are. Raises ``EmbeddedServiceError`` when it was not started."""
        if self._given is None and self._held.temporary is None:
            raise EmbeddedServiceError(f"this {self.name} has no directory before it is started")
        return self._given or self._held.temporary  # type: ignore[return-value]

    @property
    def log(self) -> Path:
        """The file that its output goes to."""
        return self.directory / "server.log"

    # -- its life

    def start(self) -> Self:
        """Start it and wait until it answers; does nothing when it runs.

        Raises ``EmbeddedServiceError`` with the end of its log when it ends or does not answer in time.
        """
        if self.running:
            return self
        self._held.end()
        if self._given is not None:
            self._given.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif self._held.temporary is None:
            self._held.temporary = self._make_temporary()
            self._held.watchman = Watchman(self._held.temporary)
        try:
            self._launch()
        except BaseException:
            self.stop()
            raise
        # Whoever was told the port may rely on it from now on.
        self._may_move = False
        return self

    def stop(self, *, keep_data: bool = False) -> None:
        """End it in an orderly way and delete its temporary directory; safe to call twice.

        With ``keep_data`` the next ``start()`` finds what it held.
        """
        if keep_data and self.running:
            self.resume()
            self._save()
        self._held.end(_STOP_TIMEOUT)
        if not keep_data:
            self._held.delete()

    def kill(self) -> None:
        """End it at once with SIGKILL; its directory stays for the next ``start()``."""
        self._held.end()

    def restart(self, *, empty: bool = False) -> None:
        """Stop it, if it runs, and start it on the same port, with its data or (``empty``) without any."""
        self.stop(keep_data=True)
        if empty and (self._given is not None or self._held.temporary is not None):
            self._wipe()
        self.start()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay open, and new ones are accepted by the kernel, but nothing answers."""
        self._child().signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after ``pause()``."""
        self._child().signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # -- what a kind of server adds

    @abstractmethod
    def _prepare(self) -> list[str]:
        """Write what it needs into its directory; returns its command line."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it can be used now."""

    @abstractmethod
    def _save(self) -> None:
        """Make a running server's data outlive it."""

    @abstractmethod
    def _wipe(self) -> None:
        """Delete the data of a stopped server."""

    def _make_temporary(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"zzol-{self.name.partition(' ')[0].lower()}-"))

    def _launch(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        for attempt in range(5):
            if self._may_move and attempt:
                self._port = free_port()
            argv = self._prepare()
            with self.log.open("wb") as log:
                try:
                    self._held.child = self._spawn(argv, log)
                except OSError as error:
                    raise EmbeddedServiceError(f"{argv[0]} could not be run: {error}") from error
            if self._wait(self._held.child, deadline):
                return
            self._held.end()
            if not (self._may_move and "in use" in tail(self.log, 50)):
                break
        raise EmbeddedServiceError(
            f"{self.name} ended while it started ({' '.join(argv[:2])}); its log ends:\n{tail(self.log)}{self._hint()}"
        )

    def _spawn(self, argv: list[str], log: IO[bytes]) -> Guarded:
        """Run a program of this server with its output in ``log``. Raises ``OSError`` when it cannot be started."""
        return Guarded(argv, watchman=self._held.watchman, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait(self, child: Guarded, deadline: float) -> bool:
        while child.running:
            if self._answers():
                return True
            if time.monotonic() > deadline:
                raise EmbeddedServiceError(
                    f"{self.name} did not answer on port {self._port} within {self.start_timeout:g} s; its log ends:\n"
                    f"{tail(self.log)}{self._hint()}"
                )
            time.sleep(_POLL)
        return False

    def _hint(self) -> str:
        """Advice below the end of the log, on a line of its own, or nothing."""
        return ""

    def _child(self) -> Guarded:
        if self._held.child is None:
            raise EmbeddedServiceError(f"this {self.name} is not started")
        return self._held.child
