"""Settings: their sources, what is refused, and that secrets do not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zzol_relay.core.errors import ConfigurationError
from zzol_relay.settings import Settings, Stream, mask_url


def test_the_defaults_are_the_documented_ones_and_consistent():
    """Z13, Z15, Z36: ten attempts, hybrid, cleanup at 04:00 of what is older than 24 h."""
    settings = Settings.load({})
    assert (settings.max_attempts, settings.mode) == (10, "hybrid")
    assert (settings.cleanup_at, settings.retention) == ("04:00", 24 * 3600)


def test_environment_overrides_defaults_and_arguments_override_both():
    environ = {"ZZOL_BATCH_ROWS": "50", "ZZOL_POLL_INTERVAL": "0.25", "ZZOL_MODE": "polling", "PATH": "/bin"}
    settings = Settings.load(environ, batch_rows=7)
    assert (settings.batch_rows, settings.poll_interval, settings.mode) == (7, 0.25, "polling")


def test_the_process_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZZOL_KEY_PREFIX", "mine")
    assert Settings.load().key_prefix == "mine"


def test_secrets_are_read_from_files(tmp_path: Path):
    secret = tmp_path / "url"
    secret.write_text("mysql+pymysql://u:s3cret@db/game\n")
    settings = Settings.load({"ZZOL_DATABASE_URL_FILE": str(secret)})
    assert settings.database_url == "mysql+pymysql://u:s3cret@db/game"


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"ZZOL_REDIS_URL_FILE: cannot read .*missing"):
        Settings.load({"ZZOL_REDIS_URL_FILE": str(tmp_path / "missing")})


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({"ZZOL_DATABSE_URL": "x"}, {}, "'ZZOL_DATABSE_URL' is not a setting; did you mean 'database_url'"),
        ({"ZZOL_BATCH_ROW_FILE": "x"}, {}, "did you mean 'batch_rows'"),
        ({}, {"poll_intervall": 1}, "'poll_intervall' is not a setting; did you mean 'poll_interval'"),
        ({}, {"xyzzy": 1}, "'xyzzy' is not a setting$"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(
    environ: dict[str, str], arguments: dict[str, Any], message: str, tmp_path: Path
):
    (tmp_path / "x").write_text("1")
    environ = {name: str(tmp_path / value) for name, value in environ.items()}
    with pytest.raises(ConfigurationError, match=message):
        Settings.load(environ, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_rows": 0},
        {"batch_rows": 5001},
        {"poll_interval": 0},
        {"poll_interval": "soon"},
        {"max_attempts": -1},
        {"mode": "cdc"},
        {"on_dead_letter": "ignore"},
        {"cleanup_at": "24:00"},
        {"cleanup_timezone": "Mars/Olympus"},
        {"table_prefix": "Zzol_"},
        {"table_prefix": "a`; DROP"},
        {"schema": "a`b"},
        {"key_prefix": "a{b}"},
        {"key_prefix": ""},
        {"dedup_window": 32.0},
        {"tail_ttl": 60.0},
        {"retention": 60.0},
        {"commit_wait": 2.0},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any]):
    with pytest.raises(ConfigurationError):
        Settings.load({}, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"table_prefix": ""},
        {"schema": "game-1"},
        {"commit_wait": 0},
        {"cleanup_timezone": "Asia/Seoul"},
        {"dedup_window": 32.5, "tail_ttl": 32.5, "retention": 32.5},
    ],
    ids=str,
)
def test_values_at_the_edge_are_taken(arguments: dict[str, Any]):
    settings = Settings.load({}, **arguments)
    assert {name: getattr(settings, name) for name in arguments} == arguments


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        Settings.load({}).mode = "polling"  # type: ignore[misc]


def test_repr_shows_no_password():
    settings = Settings.load({}, database_url="mysql://u:s3cret@db/x", redis_url="redis://:s3cret@r")
    assert "s3cret" not in repr(settings)
    assert "mysql://u:***@db/x" in repr(settings)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("mysql+pymysql://user:pw@host/db?charset=utf8mb4", "mysql+pymysql://user:***@host/db?charset=utf8mb4"),
        ("mysql://user:p#w/d?@host/db", "mysql://user:***@host/db"),
        ("mysql://user:p@w@host/db", "mysql://user:***@host/db"),
        ("sentinel://u:pw@h1:1,h2:2/service/0", "sentinel://u:***@h1:1,h2:2/service/0"),
        ("redis://host/0?password=pw&db=1", "redis://host/0?password=***&db=1"),
        ("cannot reach mysql://u:pw@h/db, sorry", "cannot reach mysql://u:***@h/db, sorry"),
        ("sqlite:////var/lib/x.db", "sqlite:////var/lib/x.db"),
        ("", ""),
    ],
)
def test_passwords_are_masked_even_where_the_url_parses_wrongly(url: str, masked: str):
    assert mask_url(url) == masked


@pytest.mark.parametrize(
    "fields",
    [{"name": ""}, {"name": "a b"}, {"name": "room", "shards": 0}, {"name": "room", "shards": 1025}, {"name": "{r}"}],
    ids=str,
)
def test_a_stream_is_checked_when_it_is_made(fields: dict[str, Any]):
    with pytest.raises(ConfigurationError, match="stream"):
        Stream(**fields)


def test_a_stream_has_one_shard_and_ten_minutes_unless_told():
    stream = Stream(name="room")
    assert (stream.shards, stream.retention) == (1, 600.0)
