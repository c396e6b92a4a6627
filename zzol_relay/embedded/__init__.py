"""Private MariaDB, MySQL and Redis servers on loopback, for the demo, tests and load tests.

They are found on PATH, live in a temporary directory or a given one, write nothing to the terminal, and end with the
process that started them. Not for production: nothing here is tuned, replicated or backed up.
"""

from zzol_relay.embedded.mysql import DatabaseServer, StartedDatabase, sqlite_url, start_database
from zzol_relay.embedded.process import Server, free_port
from zzol_relay.embedded.redis import RedisServer

__all__ = ["DatabaseServer", "RedisServer", "Server", "StartedDatabase", "free_port", "sqlite_url", "start_database"]
