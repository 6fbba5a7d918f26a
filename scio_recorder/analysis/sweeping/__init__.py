"""What each layer causes: runs in which it returns what it did in another."""
