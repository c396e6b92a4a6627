"""``zzol-relay`` as tests run it, its output piped."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import pty
import subprocess
import sys
from typing import Any
from unittest import mock

import orjson

from tests.support.processes import ROOT
from zzol_relay.cli import main

__all__ = ["WORKER", "Answer", "run_cli", "run_cli_process", "run_on_a_terminal"]

WORKER = """
    import os, sys
    os.dup2(1, 2)
    from zzol_relay.cli import main
    sys.argv[0] = "zzol-relay"
    main()
"""
"""A script for ``run_child``, whose arguments are the program's; what it logs can be waited for as lines."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a run printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return orjson.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """Tab-separated lines."""
        return [line.split("\t") for line in self.out.splitlines()]


def run_cli(*arguments: str, **env: str) -> Answer:
    """Run the program to its end in this process, which spares a second each; not for ``worker``.

    ``env`` are further environment variables.
    """
    out, err = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # The program replaces the root's handlers, and closes those that it finds.
    root.handlers.clear()
    try:
        with (
            mock.patch.dict(os.environ, env),
            mock.patch.object(sys, "argv", ["zzol-relay", *arguments]),
            mock.patch.object(sys, "stdin", io.StringIO()),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as end:
                code = 0 if end.code is None else int(end.code)
            else:
                raise AssertionError("the program did not end in SystemExit")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return Answer(code, out.getvalue(), err.getvalue())


def run_cli_process(*arguments: str, **env: str) -> Answer:
    """As ``run_cli``, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "zzol_relay.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def run_on_a_terminal(*arguments: str, answer: str, **env: str) -> tuple[int, str]:
    """Run the program in a process of its own on a terminal of 200 columns where ``answer`` is typed in; returns its
    exit code and what stood on the terminal."""
    master, slave = pty.openpty()
    terminal = {"TERM": "xterm", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "zzol_relay.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**os.environ, **terminal, **env},
        )
        os.close(slave)
        os.write(master, f"{answer}\n".encode())
        said = b""
        # Reading fails with EIO once nobody has the other side open.
        with contextlib.suppress(OSError):
            while chunk := os.read(master, 4096):
                said += chunk
        return process.wait(30), said.decode(errors="replace")
    finally:
        os.close(master)
