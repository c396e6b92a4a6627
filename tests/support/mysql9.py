"""MySQL 9 from a Debian tree: its ``mysqld`` runs under chroot, with its data inside the tree.

``prepare.sh`` makes the tree. No current Debian release has MySQL, only Debian's unstable suite does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from zzol_relay.core.errors import EmbeddedServiceError
from zzol_relay.embedded import DatabaseServer
from zzol_relay.embedded.mysql import DatabaseProgram

__all__ = ["COMPLETE", "DEFAULT_ROOT", "ChrootMySQL", "why_not"]

DEFAULT_ROOT = "/var/cache/zzol-relay-tests/sid"
COMPLETE = ".zzol-complete"
"""The file that ``prepare.sh`` leaves in a finished tree."""

_MYSQLD = "/usr/sbin/mysqld"


def why_not(root: Path) -> str | None:
    """Why MySQL cannot run in this tree, or None if it can."""
    if os.geteuid() != 0:
        return "chroot needs root"
    if shutil.which("chroot") is None:
        return "no chroot on PATH"
    if not (root / COMPLETE).exists() or not (root / _MYSQLD.lstrip("/")).exists():
        return f"no complete Debian tree at {root}; run tests/support/prepare.sh as root"
    return None


class ChrootMySQL(DatabaseServer):
    """A ``DatabaseServer`` whose program is the tree's; its temporary directory lies inside the tree."""

    def __init__(self, root: Path, *, port: int | None = None, options: tuple[str, ...] = ()) -> None:
        reason = why_not(root)
        if reason is not None:
            raise EmbeddedServiceError(reason)
        self._root = root
        super().__init__(kind="mysql", port=port, options=options)

    def _find(self, kind: Literal["mariadb", "mysql"] | None) -> DatabaseProgram:
        answer = subprocess.run(
            ["chroot", str(self._root), _MYSQLD, "--no-defaults", "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        match = re.search(r"\bVer (\d+\.\d+\.\d+)", answer.stdout)
        if match is None:
            raise EmbeddedServiceError(f"mysqld in {self._root} does not run: {answer.stderr.strip()}")
        return DatabaseProgram("mysql", _MYSQLD, match[1])

    def _make_temporary(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="zzol-mysql-", dir=self._root / "tmp"))

    def _inside(self, path: Path) -> str:
        return f"/{path.relative_to(self._root)}"

    def _run(self, argv: list[str]) -> list[str]:
        # chroot becomes mysqld by exec: the process id is the server's.
        return ["chroot", str(self._root), *argv]
