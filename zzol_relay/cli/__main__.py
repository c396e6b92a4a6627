"""``python -m zzol_relay.cli`` is ``zzol-relay``."""

from zzol_relay.cli.program import main

main()
