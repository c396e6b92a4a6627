"""Use cases, where the store meets the streams."""
