"""The state in which a network runs: copied, put back, and noted for running it again."""
