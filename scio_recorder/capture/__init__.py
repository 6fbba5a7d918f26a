"""The engine that watches a network run."""
