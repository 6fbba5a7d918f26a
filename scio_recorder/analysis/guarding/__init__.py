"""Which call of a network makes the first NaN or infinity."""
