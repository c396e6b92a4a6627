"""``zzol-relay``: settings, exit codes and error lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.support.cli import Answer, run_cli, run_cli_process
from zzol_relay.embedded import DatabaseServer, RedisServer, free_port

NOBODY = "0192f0a0-0000-7000-8000-000000000000"


def check_error(answer: Answer, code: int, text: str) -> None:
    assert (answer.code, answer.out) == (code, "")
    assert text in answer.err
    assert answer.err.startswith("zzol-relay: ")
    assert len(answer.err.splitlines()) == 1
    assert "Traceback" not in answer.err


def test_help_documents_every_command_and_exit_code():
    answer = run_cli_process("--help")
    assert answer.code == 0
    for word in ("migrate", "worker", "status", "recover", "cleanup", "dead-letters", "find", "republish", "check"):
        assert f"  {word} " in answer.out
    for line in ("0  done", "1  failed", "2  wrong usage", "3  the database or Redis", "4  the tables"):
        assert line in answer.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("conquer",),
        ("--no-such-option",),
        ("dead-letters", "show", "not-an-id"),
        ("dead-letters", "replay"),
        ("dead-letters", "list", "--limit", "0"),
        ("dead-letters", "list", "--older-than", "soon"),
        ("dead-letters", "list", "--aggregate", "A"),
        ("dead-letters", "replay", "--all", "0192f0a0-0000-7000-8000-000000000000"),
        ("dead-letters", "replay", "--type", "t", "0192f0a0-0000-7000-8000-000000000000"),
        ("dead-letters", "discard", "--type", "t"),
        ("find",),
        ("find", "--aggregate", "room:A", "--correlation", "c"),
        ("find", "--aggregate", "A"),
        ("republish",),
        ("republish", "--since", "yesterday"),
        ("--log-level", "loud", "status"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments: tuple[str, ...], sqlite_url: str):
    answer = run_cli(*arguments, ZZOL_DATABASE_URL=sqlite_url)
    assert answer.code == 2
    assert "Traceback" not in answer.err


def test_a_database_must_be_given():
    check_error(run_cli_process("status"), 2, "no database is given: use --database-url, ZZOL_DATABASE_URL")


def test_an_unknown_setting_is_refused_with_a_suggestion(sqlite_url: str):
    check_error(run_cli("status", ZZOL_DATABSE_URL=sqlite_url), 2, "did you mean 'database_url'?")


def test_a_value_out_of_range_names_its_setting(sqlite_url: str):
    check_error(run_cli("--database-url", sqlite_url, "--table-prefix", "A-", "status"), 2, "table_prefix")


@pytest.mark.parametrize(
    ("option", "url"),
    [
        ("--database-url", "postgresql://u:s3cret@127.0.0.1/x"),
        ("--database-url", "mysql://u:s3cret@127.0.0.1:s3cret/x"),
        ("--database-url", "s3cret"),
        ("--database-url", "sqlite://"),
        ("--redis-url", "http://:s3cret@127.0.0.1"),
        ("--redis-url", "redis://:s3cret/with@127.0.0.1:1"),
    ],
)
def test_urls_that_do_not_fit_are_refused_without_showing_the_password(option: str, url: str, sqlite_url: str):
    answer = run_cli("--database-url", sqlite_url, option, url, "status")
    check_error(answer, 2, "zzol-relay: ")
    assert "s3cret" not in answer.err


@pytest.mark.parametrize(
    "command",
    [("status",), ("recover",), ("cleanup",), ("dead-letters", "list"), ("dead-letters", "replay", NOBODY)],
    ids=" ".join,
)
def test_missing_tables_are_4(command: tuple[str, ...], sqlite_url: str):
    check_error(run_cli(*command, ZZOL_DATABASE_URL=sqlite_url), 4, "run 'zzol-relay migrate'")


@pytest.mark.parametrize("command", [("status",), ("migrate",), ("dead-letters", "list")], ids=" ".join)
def test_an_unreachable_database_is_3(command: tuple[str, ...]):
    url = f"mysql+pymysql://u:s3cret@127.0.0.1:{free_port()}/game"
    answer = run_cli(*command, ZZOL_DATABASE_URL=url)
    check_error(answer, 3, "database: Can't connect to MySQL server on '127.0.0.1'")
    assert "s3cret" not in answer.err


def test_a_refused_login_is_3(database_server: DatabaseServer, database_url: str):
    url = make_url(database_url).set(username="nobody", password="s3cret").render_as_string(hide_password=False)
    answer = run_cli("status", ZZOL_DATABASE_URL=url)
    check_error(answer, 3, "Access denied for user 'nobody'")
    assert "s3cret" not in answer.err


def test_an_unreachable_redis_is_3_and_status_prints_the_rest(sqlite_url: str):
    assert run_cli("migrate", ZZOL_DATABASE_URL=sqlite_url).code == 0
    redis_url = f"redis://:s3cret@127.0.0.1:{free_port()}/0"
    answer = run_cli("status", "--json", ZZOL_DATABASE_URL=sqlite_url, ZZOL_REDIS_URL=redis_url)
    assert answer.code == 3
    assert answer.json["redis"]["reachable"] is False
    assert answer.json["backlog"]["by_status"]["PENDING"] == 0
    assert "s3cret" not in answer.out + answer.err


def test_options_win_over_the_environment(sqlite_url: str, redis_server: RedisServer, tmp_path: Path):
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    assert run_cli("migrate", ZZOL_DATABASE_URL=sqlite_url).code == 0
    env = {"ZZOL_DATABASE_URL": elsewhere, "ZZOL_REDIS_URL": redis_server.url, "ZZOL_TABLE_PREFIX": "other_"}
    assert run_cli("status", **env).code == 4
    assert run_cli("--database-url", sqlite_url, "--table-prefix", "zzol_", "status", **env).code == 0


def test_a_secret_may_come_from_a_file(sqlite_url: str, tmp_path: Path):
    secret = tmp_path / "url"
    secret.write_text(f"{sqlite_url}\n")
    assert run_cli("migrate", ZZOL_DATABASE_URL_FILE=str(secret)).out == "applied 0001\n"


def test_shell_completion_knows_commands_and_their_commands():
    env = {"_ZZOL_RELAY_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    assert run_cli("", **env, COMP_WORDS="zzol-relay dead-letters re").out.split() == ["replay"]
    script = run_cli_process("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_ZZOL_RELAY_COMPLETE=complete_bash" in script.out
