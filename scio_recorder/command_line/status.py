"""Exit statuses."""

__all__ = ["FAILED", "INTERRUPTED", "WRONG_USE"]

FAILED = 1
# What argparse itself exits with for wrong use.
WRONG_USE = 2
# What shells report of a process that Ctrl-C ended.
INTERRUPTED = 130
