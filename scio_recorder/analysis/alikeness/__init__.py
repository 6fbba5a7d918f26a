"""The similarity of the layers of two recordings."""
