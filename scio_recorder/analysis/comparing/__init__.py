"""Two runs side by side: where they differ, and which layer makes the difference."""
