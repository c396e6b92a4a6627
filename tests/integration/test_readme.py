"""The README's quick start is run as it stands there; only its URLs are replaced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text

from tests.support.streams import entries

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.usefixtures("relay_tables")
def test_the_quick_start_runs(
    engine: Engine, redis_server: Any, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 1
    source = blocks[0]
    for url, real in (
        ("mysql+pymysql://app:secret@127.0.0.1/game", engine.url.render_as_string(hide_password=False)),
        ("redis://127.0.0.1:6379/0", redis_server.url),
    ):
        assert url in source
        source = source.replace(url, real)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE room (code VARCHAR(8) PRIMARY KEY, host VARCHAR(20))"))
    names: dict[str, Any] = {}
    exec(compile(source, str(README), "exec"), names)
    names["engine"].dispose()
    (entry,) = entries(redis_client, shards=4)
    assert (entry.type, entry.data, entry.sequence) == ("room.created", {"host": "ann"}, 1)
    assert capsys.readouterr().out.split() == [entry.event_id, "1"]
