"""A demonstration: telling unknown digits from known ones by what happens inside a net."""

from scio_recorder.command_line.demo.run import run_demo

__all__ = ["run_demo"]
