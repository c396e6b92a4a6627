"""``zzol-relay`` as tests run it: a process of its own, its output piped."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import orjson

from tests.support.processes import ROOT

__all__ = ["WORKER", "Answer", "run_cli"]

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
    """Run ``zzol-relay`` to its end; ``env`` are further environment variables."""
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
