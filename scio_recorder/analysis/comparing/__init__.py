"""Two runs side by side: where they differ, and what makes the difference."""
