"""``python -m loadtest.bench`` is ``python -m loadtest bench``."""

import sys

from loadtest.cli import app

__all__: list[str] = []

app(["bench", *sys.argv[1:]], prog_name="python -m loadtest")
