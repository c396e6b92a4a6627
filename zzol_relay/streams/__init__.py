"""The only room with Redis."""
