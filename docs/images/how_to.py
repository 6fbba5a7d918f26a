"""Make the pictures of the how-to pages: ``python docs/images/how_to.py`` in a clone of the repository.

Each is drawn by the code of its page, from the beginning of the page.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
# What is drawn, once the code of the page has run.
FIGURES = {
    "attention": 'attention.plot(tokens="When Mary and John went".split())',
    "comparing-checkpoints": "difference.plot()",
    "dead-and-exploding-units": "recording.plot()",
    "patching": "effects.plot(['When', 'Mary', 'and', 'John'])",
    "which-layer-of-my-port": "difference.plot()",
}


def main() -> None:
    """Write the pictures into the folder ``how-to`` beside this file."""
    (HERE / "how-to").mkdir(exist_ok=True)
    for page, drawing in FIGURES.items():
        figure = eval(drawing, after_first_program(page))
        figure.savefig(HERE / "how-to" / f"{page}.png", dpi=80)


def after_first_program(page: str) -> dict[str, Any]:
    """Return the variables that the first program of a page leaves."""
    text = (HERE.parent / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    program = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]
    torch.manual_seed(0)
    variables: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.chdir(folder),
    ):
        exec(program, variables)
    return variables


if __name__ == "__main__":
    main()
