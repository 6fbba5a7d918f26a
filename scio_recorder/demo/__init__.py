"""A demonstration: telling unknown digits from known ones by what happens inside a net."""

from scio_recorder.demo.run import run_demo

__all__ = ["run_demo"]
