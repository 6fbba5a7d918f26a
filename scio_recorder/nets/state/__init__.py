"""The state in which a network runs: copying, restoring, and noting it for running again."""
