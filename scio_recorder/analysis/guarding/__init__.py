"""The guard that finds the call of a network that makes the first NaN or infinity."""
