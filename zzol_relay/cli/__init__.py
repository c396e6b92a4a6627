"""``zzol-relay``, the operator's tool. ``docs/cli.md`` describes it."""

from zzol_relay.cli.program import main

__all__ = ["main"]
