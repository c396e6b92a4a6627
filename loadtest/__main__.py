"""``python -m loadtest``."""

from loadtest.cli import app

__all__: list[str] = []

app(prog_name="python -m loadtest")
