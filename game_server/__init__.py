"""The reference backend of zzol_relay: rooms, taps and real WebSocket clients, on the public API alone."""
