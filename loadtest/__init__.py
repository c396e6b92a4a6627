"""Benchmarks and simulated players. Runs from a checkout; not part of the wheel."""
