"""The command ``scio-recorder``."""

from scio_recorder.command_line.commands import main

__all__ = ["main"]
