"""The command that looks whether MySQL and Redis are fit."""

from __future__ import annotations

import dataclasses

import typer

from zzol_relay.cli.arguments import Json
from zzol_relay.cli.context import make_relay, options_of
from zzol_relay.cli.failures import Exit
from zzol_relay.cli.output import print_json, print_table
from zzol_relay.relay.check import check as look

__all__ = ["check"]


def check(context: typer.Context, json: Json = False) -> None:
    """Look whether MySQL and Redis are as the relay needs them; says what to mend. Exit code 1: something fails.

    Versions, schema, privileges, isolation, binary log, clocks, eviction, persistence, roles, the script. Changes
    nothing.
    """
    options = options_of(context)
    # Refuses a missing or wrong URL as every command does.
    make_relay(options.settings).stop()
    options.start_logging("warning")
    findings = look(options.settings)
    if json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        print_table(("Check", "Verdict", "Found", "Mend"), [dataclasses.astuple(finding) for finding in findings])
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(Exit.FAILED)
