"""The state in which a network runs: noting it for running again, copying and restoring it."""
