"""Pure decisions: no I/O, no clock, no randomness. Everything here takes its inputs as arguments and returns values."""
