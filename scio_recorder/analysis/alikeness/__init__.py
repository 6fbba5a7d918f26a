"""How alike the layers of two recordings are."""
