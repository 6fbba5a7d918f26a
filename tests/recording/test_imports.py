"""What a program waits for that only reads recordings."""

from __future__ import annotations

import subprocess
import sys


def test_opening_imports_nothing_that_runs_nets():
    code = """
import sys
from scio_recorder import open_recording
assert open_recording.__module__ == "scio_recorder.recording.recording"
running = ("capture", "recorder", "events", "integrations", "command_line")
found = [name for name in sys.modules if name.split(".")[1:2] and name.split(".")[0] ==
         "scio_recorder" and name.split(".")[1] in running]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)
