"""Exit statuses."""

FAILED = 1
# The status with which diff and cmp report a difference.
DIFFERENT = 1
# The status with which argparse itself exits.
WRONG_USE = 2
# The status that shells report for a process that Ctrl-C ended.
INTERRUPTED = 130
# The status that shells report for a process that SIGTERM ended.
TERMINATED = 143
