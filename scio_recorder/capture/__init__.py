"""The engine that records a network while it runs."""
