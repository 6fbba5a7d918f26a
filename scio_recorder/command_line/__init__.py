"""The command ``scio-recorder``, which does nothing that the library can't.

Who writes Python would not miss this room.
"""

from __future__ import annotations

from collections.abc import Sequence

from scio_recorder.command_line.command_arguments import parsed_from

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
    parsed = parsed_from(arguments)
    try:
        # This import takes seconds, most of them in torch.
        from scio_recorder.command_line import commands
        from scio_recorder.command_line.command_words import run
    except KeyboardInterrupt:
        # An interrupted import would print a long traceback.
        return 130
    return run(getattr(commands, parsed.command), parsed)
