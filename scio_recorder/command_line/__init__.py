"""The command ``scio-recorder``."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        The words behind the program's name; None (default) means ``sys.argv[1:]``.

    Returns
    -------
    int
        The exit status: 0; 1 for what failed and 2 for wrong use, with one line on standard error;
        130 after Ctrl-C.

    Examples
    --------
    >>> main(["summary", "torch.nn:ReLU"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    with _leaving_when_interrupted():
        # This import takes seconds, most of them in torch.
        from scio_recorder.command_line.commands import parsed_from, run

        parsed = parsed_from(arguments)
    return run(parsed)


@contextmanager
def _leaving_when_interrupted() -> Iterator[None]:
    """Let Ctrl-C end the process silently; an interrupted import would print a long traceback."""
    before = signal.getsignal(signal.SIGINT)
    is_usual = before is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
