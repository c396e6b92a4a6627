"""``status --health``: the verdict on a whole deployment, from what its processes wrote into the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from zzol_relay.cli.context import Options, open_relay
from zzol_relay.cli.failures import Exit
from zzol_relay.cli.output import print_json, print_pairs, print_table, seconds, when
from zzol_relay.store.migrate import schema_fits
from zzol_relay.store.upkeep import Instance

__all__ = ["report", "verdict"]

_LONGEST_SILENCE = 30.0


def report(options: Options, *, json: bool) -> None:
    """Print the verdict; exit code 1 where it is bad."""
    silence = max(_LONGEST_SILENCE, 6 * options.settings.heartbeat_interval)
    with open_relay(options) as relay:
        fits = schema_fits(options.settings.database_url, options.settings)
        status = relay.status() if fits else None
    instances = status.instances if status is not None else []
    live, ready, reasons = verdict(fits, instances, silence)
    oldest = status.backlog.oldest_unpublished_age if status is not None else None
    last = status.backlog.last_published_at if status is not None else None
    if json:
        print_json(
            {
                "live": live,
                "ready": ready,
                "reasons": reasons,
                "oldest_unpublished_age": oldest,
                "last_published_at": last,
                "instances": [
                    {"name": i.name, "role": i.role, "beat_age": i.beat_age, "silent": i.beat_age > silence, **_of(i)}
                    for i in instances
                ],
            }
        )
    else:
        print_pairs(
            [
                ("Live", "yes" if live else "no"),
                ("Ready", "yes" if ready else "no"),
                *(("Reason", reason) for reason in reasons),
                ("Oldest unpublished", seconds(oldest)),
                ("Last published", when(last)),
            ]
        )
        print_table(
            ("Instance", "Role", "Live", "Ready", "Last beat"),
            [(i.name, i.role, *("yes" if _of(i)[key] else "no" for key in ("live", "ready")), seconds(i.beat_age))
             for i in instances],
        )  # fmt: skip
    if not (live and ready):
        raise typer.Exit(Exit.FAILED)


def verdict(fits: bool, instances: Sequence[Instance], silence: float) -> tuple[bool, bool, list[str]]:
    """Live, ready, and what keeps them from it.

    A process silent for ``silence`` seconds counts as gone: its row stays for a day. Live: a worker is there, and all
    that are there say so of themselves. Ready: the schema fits, and a worker is ready.
    """
    if not fits:
        return False, False, ["the relay's tables are missing or too old; run 'zzol-relay migrate'"]
    there = [instance for instance in instances if instance.beat_age <= silence]
    workers = [instance for instance in there if "worker" in instance.role]
    hung = [instance for instance in there if not _of(instance)["live"]]
    reasons = [f"{instance.name}: {'; '.join(_of(instance)['reasons']) or 'not live'}" for instance in hung]
    if not workers:
        reasons.append(f"no worker has given a sign of life within {silence:g} s")
    elif not any(_of(worker)["ready"] for worker in workers):
        reasons.append("no worker is ready")
    return bool(workers) and not hung, any(_of(worker)["ready"] for worker in workers), reasons


def _of(instance: Instance) -> dict[str, Any]:
    found = instance.counters.get("health")
    # One of an older release tells nothing but that it beats.
    return {"live": True, "ready": True, "reasons": [], **(found if isinstance(found, dict) else {})}
