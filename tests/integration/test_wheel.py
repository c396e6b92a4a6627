"""The wheel: what is in it, and that it works where nothing else of the checkout is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(180)


def run(*argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    keep = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in argv],
        cwd="/",
        env={**keep, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout without network."""
    out = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel, and sees its dependencies and nothing of the checkout."""
    home = tmp_path_factory.mktemp("venv")
    assert run(sys.executable, "-m", "venv", "--without-pip", home).returncode == 0
    python = home / "bin" / "python"
    # fmt: off
    installed = run(
        sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", python,
        "install", "--no-index", "--no-deps", wheel,
    )
    # fmt: on
    assert installed.returncode == 0, installed.stderr
    (site,) = (home / "lib").glob("python*/site-packages")
    # Read after the wheel's own directory; .pth files in there (an editable install's) are not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_it_holds_the_package_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    assert {name.partition("/")[0] + "/" for name in names} == {"zzol_relay/", info}
    package = [name for name in names if name.startswith("zzol_relay/")]
    assert {Path(name).suffix for name in package} == {".py", ".typed", ".lua", ".mako"}
    assert {name for name in package if not name.endswith(".py")} == {
        "zzol_relay/_migrations/script.py.mako",
        "zzol_relay/py.typed",
        "zzol_relay/streams/epoch.lua",
        "zzol_relay/streams/present.lua",
        "zzol_relay/streams/publish.lua",
    }
    in_checkout = {f"zzol_relay/_migrations/{path.relative_to(ROOT / 'migrations' / 'relay')}"
                   for path in (ROOT / "migrations" / "relay").rglob("*.py")}  # fmt: skip
    assert {name for name in package if "/_migrations/" in name and name.endswith(".py")} == in_checkout
    assert f"{info}licenses/LICENSE" in names


def test_it_runs_without_the_checkout(clean_bin: Path):
    where = run(clean_bin / "python", "-c", "import zzol_relay; print(zzol_relay.__file__, zzol_relay.__version__)")
    assert where.returncode == 0, where.stderr
    file, version = where.stdout.split()
    assert file.startswith(str(clean_bin.parent))
    told = run(clean_bin / "zzol-relay", "--version")
    assert (told.returncode, told.stdout) == (0, f"zzol-relay {version}\n")


def test_it_brings_its_migrations(clean_bin: Path, sqlite_url: str):
    answer = run(clean_bin / "zzol-relay", "migrate", ZZOL_DATABASE_URL=sqlite_url)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "applied 0001\n", "")
    again = run(clean_bin / "zzol-relay", "migrate", ZZOL_DATABASE_URL=sqlite_url)
    assert (again.returncode, again.stdout) == (0, "nothing to do\n")


def test_it_migrates_a_server(clean_bin: Path, database_url: str):
    env = {"ZZOL_DATABASE_URL": database_url, "ZZOL_TABLE_PREFIX": "wheel_"}
    answer = run(clean_bin / "zzol-relay", "migrate", **env)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "applied 0001\n", "")
    assert run(clean_bin / "zzol-relay", "dead-letters", "list", "--json", **env).stdout == "[]\n"
