"""How the demo shows what happens: for a terminal of 80 columns, and for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from game_server.players import Player, Received
from game_server.verdict import PathVerdict, Verdict, percentile

__all__ = ["backlog", "columns", "conclusion", "figures", "heading", "second", "stage", "stand_in"]

_BACKLOG_LINES = 6


def stage(database: str, redis_version: str, urls: Sequence[str]) -> Text:
    """What takes part."""
    servers = "1 game server" if len(urls) == 1 else f"{len(urls)} game servers, the players of a room spread over them"
    text = Text.assemble(("zzol_relay", "bold"), f"  {database} · Redis {redis_version}\n{servers}")
    for url in urls:
        text.append(f"\n  {url}", "dim")
    return text


def stand_in(wanted: bool) -> Text:
    """The loud line where there is no MySQL."""
    why = "as asked" if wanted else "no MariaDB or MySQL was found on PATH"
    return Text(
        f"SQLITE STANDS IN FOR MYSQL ({why}): one process, one writer.\nThe real thing: make demo DB=mysql",
        "bold yellow",
    )


def heading(text: str) -> Rule:
    """A new phase."""
    return Rule(text, align="left", style="cyan", characters="─")


def columns() -> Text:
    """What stands above the lines of ``second``."""
    return Text("    time  rooms  commit → client  tap → client  deliveries  in outbox  Redis", "dim")


def second(players: Sequence[Player], since: float, clock: float, waiting: int, redis_up: bool) -> Text:
    """What came to the clients since ``since`` (Unix ms), in one line."""
    rooms = sum(1 for player in players if player.host and player.room)
    commits = [delay for player in players for delay in _commit_delays(player, since)]
    inputs = [delay for player in players for delay in _input_delays(player, since)]
    text = Text(f"{clock:6.1f} s{rooms:7}")
    text.append(_ms(percentile(commits, 0.5)).rjust(17), "green" if commits else "dim")
    text.append(_ms(percentile(inputs, 0.5)).rjust(14), "green" if inputs else "dim")
    text.append(f"{len(inputs):12}", "green" if inputs else "dim")
    text.append(f"{waiting:11}", "bold yellow" if waiting else "dim")
    text.append("  up" if redis_up else "  down", "dim" if redis_up else "bold red")
    return text


def backlog(hosts: Sequence[Player], back_at: float) -> Iterator[Text]:
    """How the rooms of the outage reached their hosts, in the order of their arrival."""
    arrived = sorted(
        ((received, host) for host in hosts if (received := _creation(host)) is not None), key=lambda pair: pair[0].at
    )
    told = sum(1 for host in hosts if host.created is not None and host.created.waiting)
    yield Text(f"{len(hosts)} rooms were committed meanwhile; {told} hosts were told «waiting for Redis».")
    for received, host in arrived[:_BACKLOG_LINES]:
        assert host.created is not None
        waited = (received.at - host.created.committed_at) / 1000
        kinds = " → ".join(f"{got.type} {got.sequence}" for got in host.log if got.sequence is not None)
        yield Text(f"  {host.room}  waited {waited:.2f} s  {kinds}", "green")
    if len(arrived) > _BACKLOG_LINES:
        yield Text(f"  … and {len(arrived) - _BACKLOG_LINES} more", "dim")
    if arrived:
        yield Text(f"  the last one {(arrived[-1][0].at - back_at) / 1000:.2f} s after Redis answered again", "dim")


def figures(players: Sequence[Player], outage_hosts: Sequence[Player], back_at: float) -> dict[str, Any]:
    """Latencies in milliseconds; rooms of the outage apart."""
    healthy = [delay for player in players if player not in outage_hosts for delay in _commit_delays(player, 0.0)]
    late = [delay for player in outage_hosts for delay in _commit_delays(player, 0.0)]
    inputs = [delay for player in players for delay in _input_delays(player, 0.0)]
    return {
        "commit_to_client_ms": _spread(healthy),
        "outage_commit_to_client_ms": _spread(late),
        "input_to_client_ms": _spread(inputs),
        "rooms_in_outage": len(outage_hosts),
        "told_waiting": sum(1 for host in outage_hosts if host.created is not None and host.created.waiting),
        "frames": sum(len(player.log) for player in players),
    }


def conclusion(verdict: Verdict, measured: dict[str, Any]) -> Iterator[RenderableType]:
    """The table at the end."""
    yield heading("The evidence: database rows, stream entries, clients' logs")
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("path")
    for name in ("committed", "in stream", "delivered", "lost", "duplicated", "out of order"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("outbox", *_cells(verdict.outbox))
    table.add_row("direct", *_cells(verdict.direct))
    yield table
    yield Text(f"direct: accepted taps; {verdict.refused} were refused while Redis was away", "dim")
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for name in ("latency, ms", "p50", "p95", "p99", "count"):
        table.add_column(name, justify="left" if name.startswith("latency") else "right")
    for name, key in (
        ("commit → client", "commit_to_client_ms"),
        ("commit → client, committed in the outage", "outage_commit_to_client_ms"),
        ("tap → client", "input_to_client_ms"),
    ):
        spread = measured[key]
        shown = ["–" if spread[p] is None else f"{spread[p]:.1f}" for p in ("p50", "p95", "p99")]
        table.add_row(name, *shown, str(spread["count"]))
    yield Text()
    yield table
    yield Text()
    for problem in verdict.problems:
        yield Text(f"  {problem}", "red")
    if verdict.ok:
        total = verdict.outbox.expected
        yield Text(
            f"{total} committed, {verdict.outbox.delivered} delivered, 0 lost, 0 duplicated, 0 out of order, 0 ghosts",
            "bold green",
        )
    else:
        yield Text(
            f"BROKEN: {verdict.torn} torn, {verdict.ghosts} ghosts, {verdict.unsettled} unsettled; see above",
            "bold red",
        )


def _cells(path: PathVerdict) -> list[Text]:
    faults = (path.lost, path.duplicated, path.out_of_order)
    return [
        *(Text(str(number)) for number in (path.expected, path.in_stream, path.delivered)),
        *(Text(str(number), "bold red" if number else "green") for number in faults),
    ]


def _spread(values: Sequence[float]) -> dict[str, float | int | None]:
    shown: dict[str, float | int | None] = {"count": len(values)}
    for name, fraction in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        value = percentile(values, fraction)
        shown[name] = None if value is None else round(value, 2)
    return shown


def _ms(value: float | None) -> str:
    return f"{value:.1f} ms" if value is not None else "–"


def _creation(player: Player) -> Received | None:
    return next((received for received in player.log if received.type == "room.created"), None)


def _commit_delays(player: Player, since: float) -> list[float]:
    return [
        received.at - player.committed[received.type]
        for received in player.log
        if received.type in player.committed and received.at >= since
    ]


def _input_delays(player: Player, since: float) -> Iterator[float]:
    for received in reversed(player.log):
        if received.at < since:
            return
        if received.type == "tap":
            yield received.at - received.data["sent"]
