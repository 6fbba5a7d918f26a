"""Running recorded calls again."""
