"""Every notebook runs from its first cell to its last, and shows what it shows when it runs."""

from __future__ import annotations

import base64
import io
import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from PIL import Image

from tests.project.notebooks import (
    LOOSER,
    NOTEBOOKS,
    RELATIVE,
    apart,
    differences,
    environment,
    execute,
    pictures,
    read,
)

MAX_BYTES = 500_000
# Pixels of five inches, with the margin that a notebook adds.
WIDTH = 520


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where kernels of this test work and leave all their files."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.campaign
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_gives_what_it_shows(path: Path, folder: Path) -> None:
    stored = read(path)
    relative = LOOSER.get(path.stem, RELATIVE)
    assert not list(differences(stored, execute(stored, folder), relative))
    # A page is written over by the next run; a recording would refuse it.
    own = {Path(value) for value in environment(folder).values()}
    assert not [left for left in set(folder.iterdir()) - own if left.suffix != ".html"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_clean(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)  # type: ignore[no-untyped-call]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    # The site folds long definitions.
    assert all(cell.metadata in ({}, {"tags": ["hide-input"]}) for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    # Warnings and logs go to stderr.
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_one_title_and_no_gap_in_its_headings(path: Path) -> None:
    prose = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    levels = [len(marks) for marks in re.findall(r"^(#+) ", "\n".join(prose), re.MULTILINE)]
    assert prose[0].startswith("# ")
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_begins_with_a_figure_that_it_draws(path: Path) -> None:
    notebook = read(path)
    (link,) = re.findall(r"^!\[[^]]+\]\((.*)\)$", notebook.cells[0].source, re.MULTILINE)
    shown = Image.open(path.parent / link).convert("RGB")
    # Wider ones scroll on a phone, which hides a part.
    assert shown.width <= WIDTH
    # It has fewer colours than the figure.
    assert min(apart(figure.resize(shown.size), shown) for figure in pictures(notebook)) < 2


def notebook_of(source: str, printed: str) -> NotebookNode:
    output = nbformat.v4.new_output("stream", text=printed)  # type: ignore[no-untyped-call]
    cell = nbformat.v4.new_code_cell(source, outputs=[output])  # type: ignore[no-untyped-call]
    made: NotebookNode = nbformat.v4.new_notebook(cells=[cell])  # type: ignore[no-untyped-call]
    return made


@pytest.mark.parametrize(
    ("stored", "fresh", "same"),
    [
        ("accuracy 0.971", "accuracy  0.969", True),
        ("accuracy 0.971", "accuracy 0.903", True),
        ("accuracy 0.971", "accuracy 0.771", False),
        ("accuracy 0.971", "error 0.971", False),
        ("(597, 16)", "(597, 17)", False),
        ("loss 1e-05", "loss 2e-05", False),
        ("loss 12.3", "loss -12.3", False),
        ("loss 0.1", "", False),
    ],
)
def test_differences_beyond_rounding_are_found(stored: str, fresh: str, same: bool) -> None:
    found = list(differences(notebook_of("", stored), notebook_of("", fresh)))
    assert (not found) == same


def notebook_that_draws(colours: list[int], width: int = 8) -> NotebookNode:
    outputs = []
    for colour in colours:
        file = io.BytesIO()
        Image.new("RGB", (width, 8), (colour,) * 3).save(file, "png")
        data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": "<Figure>"}
        outputs.append(nbformat.v4.new_output("display_data", data))  # type: ignore[no-untyped-call]
    cell = nbformat.v4.new_code_cell("draw()", outputs=outputs)  # type: ignore[no-untyped-call]
    made: NotebookNode = nbformat.v4.new_notebook(cells=[cell])  # type: ignore[no-untyped-call]
    return made


@pytest.mark.parametrize(
    ("fresh", "same"),
    [
        (notebook_that_draws([10, 200]), True),
        (notebook_that_draws([12, 198]), True),
        (notebook_that_draws([10, 210]), False),
        (notebook_that_draws([10]), False),
        (notebook_that_draws([10, 200], width=9), False),
    ],
)
def test_other_pictures_are_found(fresh: NotebookNode, same: bool) -> None:
    assert (not list(differences(notebook_that_draws([10, 200]), fresh))) == same


@pytest.mark.parametrize(
    ("source", "version", "printed", "same"),
    [
        ("from pydoc_data.topics import topics", "3.11.7", "layer 2, loss 1.9", False),
        ("from pydoc_data.topics import topics", "3.13.0", "layer 2, loss 1.9", True),
        ("from pydoc_data.topics import topics", "3.13.0", "layer 1, loss 0.5", False),
        ("", "3.13.0", "layer 2, loss 1.9", False),
    ],
)
def test_numbers_learned_from_another_manual_may_differ(
    source: str, version: str, printed: str, same: bool
) -> None:
    stored, fresh = notebook_of(source, "layer 2, loss 0.5"), notebook_of(source, printed)
    for notebook, its_version in ((stored, "3.11.7"), (fresh, version)):
        notebook.metadata["language_info"] = {"version": its_version}
    assert (not list(differences(stored, fresh))) == same


@pytest.mark.campaign
def test_outputs_are_those_of_the_run(folder: Path) -> None:
    stored = notebook_of("print(1 + 1)", "3")
    assert list(differences(stored, execute(stored, folder)))


@pytest.mark.campaign
def test_warnings_stop_a_notebook(folder: Path) -> None:
    warns = notebook_of("import warnings\nwarnings.warn('old')", "")
    with pytest.raises(RuntimeError, match="UserWarning: old"):
        execute(warns, folder)


@pytest.mark.campaign
def test_errors_stop_a_notebook(folder: Path) -> None:
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(notebook_of("1 / 0", ""), folder)
