"""What keeps the questions of this room from running a network on the side."""

from __future__ import annotations

import sys

from scio_recorder.errors import ComparisonError, UnsupportedNetError
from scio_recorder.lowlevel import Capture, is_sharded
from scio_recorder.tensors import private


def refuse_side_runs(capture: Capture, what: str) -> None:
    """Refuse to run a network inside a block of its recorder, or one whose hooks see too little.

    Parameters
    ----------
    capture : Capture
        Knows the network.
    what : str
        What runs it, such as ``"a sweep"``.
    """
    if capture.blocks.open or capture.is_running:
        raise ComparisonError(
            f"{what} runs the network itself, and its runs must not count as passes of a block "
            "around it: leave the block of watch(...) or collecting(...) first"
        )
    net, has_compiler = capture.net, private.DYNAMO in sys.modules
    if (has_compiler and any(map(private.is_compiled, net.modules()))) or is_sharded(net):
        raise UnsupportedNetError(
            "the network is compiled or sharded, in whole or in part, and compiled code does not "
            f"call hooks: {what} needs the network without torch.compile, in one process"
        )
