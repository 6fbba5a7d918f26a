"""Notebooks: run in a kernel of their own, and compared with what they show.

``python -m tests.project.notebooks [NAME ...]`` runs them (all, if none is named) and stores
what they print and draw.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from nbformat import NotebookNode

__all__ = ["NOTEBOOKS", "apart", "differences", "environment", "execute", "pictures", "read"]

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Not as errors, which the code around an import may catch: what reaches stderr is looked at. The
# kernel's own machinery is not what is tested.
STRICT = """
import warnings

warnings.simplefilter("default")
warnings.filterwarnings("ignore", module="ipykernel")
"""

# Sums in another order, on another processor, lead training to slightly other numbers.
RELATIVE, ABSOLUTE = 0.1, 0.1
# The loss of one text after training: 0.86 and 1.18 were seen on two processors.
LOOSER = {"find_the_bug": 0.4}
# Each version of Python has its own manual, and a net trained on another text has other numbers.
MANUAL = "pydoc_data"
# Curves that end elsewhere on another processor; 255 is black on white.
MOST_APART = 5.0
NUMBER = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?")


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def environment(folder: Path) -> dict[str, str]:
    """Return what keeps a kernel offline, on one thread, and its files inside a folder."""
    homes = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")
    return {
        **{name: str(folder / name.lower()) for name in (*homes, "MPLCONFIGDIR", "HF_HOME")},
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": str(ROOT),
    }


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Return the notebook with what its cells give in a fresh kernel, which works in the folder.

    An error of a cell is raised as ``CellExecutionError``, and what goes to stderr, as warnings
    do, as ``RuntimeError``.
    """
    from nbclient import NotebookClient

    fresh: NotebookNode = nbformat.v4.new_notebook(  # type: ignore[no-untyped-call]
        metadata=deepcopy(notebook.metadata),
        cells=[
            nbformat.v4.new_code_cell(STRICT),  # type: ignore[no-untyped-call]
            *deepcopy(notebook.cells),
        ],
    )
    client = NotebookClient(
        fresh,
        timeout=300,
        record_timing=False,
        coalesce_streams=True,  # what is printed comes in pieces, which differ from run to run
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    del fresh.cells[0]
    for position, cell in enumerate(_code(fresh), start=1):
        complaints = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        if complaints:
            raise RuntimeError(f"cell {position} writes to stderr: {''.join(complaints)}")
        cell.execution_count = position
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = position
    return fresh


def differences(
    stored: NotebookNode, fresh: NotebookNode, relative: float = RELATIVE
) -> Iterator[str]:
    """Yield what differs: words, whole numbers, others beyond rounding, and pictures."""
    reads_manual = any(MANUAL in cell.source for cell in _code(stored))
    are_same_texts = _version(stored) == _version(fresh) or not reads_manual
    for old, new in zip_longest(map(_text, _code(stored)), map(_text, _code(fresh)), fillvalue=""):
        numbers = zip(NUMBER.findall(old), NUMBER.findall(new), strict=False)
        are_close = not are_same_texts or all(
            _close(*map(float, pair), relative) for pair in numbers
        )
        if _words(old) != _words(new) or not are_close:
            yield f"stored:\n{old}\nnow:\n{new}"
    for number, pair in enumerate(zip_longest(pictures(stored), pictures(fresh)), start=1):
        if are_same_texts and (None in pair or apart(*pair) > MOST_APART):
            yield f"picture {number} is another one now"


def pictures(notebook: NotebookNode) -> list[Image.Image]:
    """Return the pictures that a notebook holds, in order."""
    data = [output.get("data", {}) for cell in _code(notebook) for output in cell.outputs]
    encoded = [base64.b64decode(shown["image/png"]) for shown in data if "image/png" in shown]
    return [Image.open(io.BytesIO(each)).convert("RGB") for each in encoded]


def apart(picture: Image.Image, other: Image.Image) -> float:
    """Return the mean difference of two pictures' values, which go up to 255."""
    if picture.size != other.size:
        return 255.0
    return float(np.abs(np.asarray(picture, float) - np.asarray(other, float)).mean())


def _version(notebook: NotebookNode) -> str:
    """Return the version of Python that ran a notebook."""
    return str(notebook.metadata.get("language_info", {}).get("version"))


def _code(notebook: NotebookNode) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _text(cell: Mapping[str, Any]) -> str:
    """Return what a cell printed and its value, pictures left out."""
    printed = [output["text"] for output in cell["outputs"] if output["output_type"] == "stream"]
    data = [output["data"] for output in cell["outputs"] if "data" in output]
    values = [shown["text/plain"] for shown in data if "image/png" not in shown]
    return "\n".join(printed + values)


def _words(text: str) -> list[str]:
    # Columns are as wide as their longest number, so the width of gaps says nothing.
    return re.sub(r"-{2,}|─+", "-", NUMBER.sub(" # ", text)).split()


def _close(old: float, new: float, relative: float) -> bool:
    return abs(old - new) <= max(ABSOLUTE, relative * max(abs(old), abs(new)))


def main(names: list[str]) -> None:
    for path in NOTEBOOKS:
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(environment(Path(folder)))
            fresh = execute(read(path), Path(folder))
        nbformat.write(fresh, path)  # type: ignore[no-untyped-call]
        print(f"{path.stem}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
