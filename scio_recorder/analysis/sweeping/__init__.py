"""The effect of each layer: runs in which its output is that of another run."""
