"""The effect of each layer: runs in which its output is replaced by that of another run."""
