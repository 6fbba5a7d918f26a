"""The programs in pages of the documentation."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: Path, text: str) -> dict[str, Any]:
    """Run a page's Python blocks in one namespace; a block ``text`` after one is its output.

    Return what the blocks have left in the namespace.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in BLOCK.finditer(text):
        language, source = block.groups()
        if language == "python":
            # Line numbers of the page, so that a failure points into it.
            padding = "\n" * (text.count("\n", 0, block.start()) + 1)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(padding + source, page, "exec"), namespace)
            printed = output.getvalue()
        elif language == "text":
            assert _without_trailing_space(printed) == _without_trailing_space(source)
    return namespace


def _without_trailing_space(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
