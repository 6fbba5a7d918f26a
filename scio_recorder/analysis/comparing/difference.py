"""The difference of two runs, with its table, figure and page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from scio_recorder.analysis.comparing.difference_page import difference_page, tree
from scio_recorder.analysis.comparing.findings import Findings
from scio_recorder.analysis.comparing.showing import (
    FRAME_COLUMNS,
    Measure,
    frame_rows,
    listing,
    profile,
    sentence,
)
from scio_recorder.display.figure import draw_profile
from scio_recorder.display.outline import Listed, Listing, Outline, Outlined
from scio_recorder.display.page import check_page, write_page
from scio_recorder.errors import ComparisonError, needing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Difference(Listed, Outlined, Findings):
    """The difference of two runs, by layer of the reference, in the order in which layers return.

    A key is ``(1, 3)``, ``"1-3"`` or an unambiguous qualified name, all of the reference. The value
    has the figures of that layer. ``print`` shows a sentence and a table, and a notebook shows the
    tree of the network with each layer's difference in it.

    Attributes
    ----------
    first : FirstDifference or None
        The layer that makes the difference: the first to return that differs in a batch in which
        its inputs are equal. If there is none, the first to return that differs. None only if no
        layer differs.
    num_samples : int
        The number of compared samples.
    rtol : float
        The relative tolerance.
    atol : float
        The absolute tolerance.
    unmatched : Unmatched
        Names of layers of each side that were not compared.

    Examples
    --------
    >>> import copy
    >>> import torch
    >>> from scio_recorder import Recorder, compare
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> other = copy.deepcopy(net)
    >>> _ = other[0].weight.data.zero_()
    >>> recorders = [Recorder(one, input_size=(1, 2)) for one in (net, other)]
    >>> difference = compare(*recorders, [torch.ones(3, 2)])
    >>> [str(label) for label, layer in difference.items() if layer.differs]
    ['1-1', '1-2', '0-1']
    """

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each layer, in the order in which layers return.

        Returns
        -------
        pandas.DataFrame
            Indexed by label, ``"1-3"``. Columns: name and type of the reference's layer, the
            candidate's label and name, and the figures of ``LayerDifference``.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder, compare
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> compare(rnet, rnet, [torch.ones(3, 2)]).to_frame()["max_abs"].tolist()
        [0.0, 0.0]
        """
        with needing("frame", "a frame"):
            import pandas as pd

        frame = pd.DataFrame(frame_rows(self), columns=FRAME_COLUMNS, dtype=object)
        # Optional values stay None or as they are.
        others = ("first_sample_id", "inputs_equal", "error")
        kinds = frame.drop(columns=[*others]).infer_objects().dtypes
        return frame.astype(kinds.to_dict()).set_index("label")

    def plot(self, measure: Measure = "relative_error") -> Figure:
        """Draw the difference of each layer, in the order in which layers return.

        The scale is logarithmic. The first difference is marked. Equal layers lie on a line of
        their own below, and layers without a finite figure on one above. If there was a
        ``floor=``, its noise is drawn too.

        Parameters
        ----------
        measure : {"relative_error", "max_abs", "max_rel", "share_different"}
            What to draw. Digests only give "share_different", the share of samples that differ,
            which is then drawn in any case.

        Returns
        -------
        matplotlib.figure.Figure
            Made without pyplot, so it need not be closed.

        Raises
        ------
        ComparisonError
            There is no such measure.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder, compare
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> compare(rnet, rnet, [torch.ones(3, 2)]).plot().axes[0].get_ylabel()
        'relative error'
        """
        return draw_profile(profile(self, measure))

    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Write an HTML page: where the runs begin to differ, the tree, and a table of layers.

        The page is one file. You can send it to others, and it opens without an internet
        connection.

        Parameters
        ----------
        path : str or path-like
            The file, which is replaced if it exists.
        title : str, optional
            The heading; by default made from the type of the reference.

        Returns
        -------
        pathlib.Path
            The file.

        Raises
        ------
        ComparisonError
            ``path`` names no file, or ``title`` is not a string.
        RecordingError
            The file can't be written; no partial page is left.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder, compare
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = compare(rnet, rnet, [torch.ones(3, 2)]).report(f"{folder}/page.html")
        ...     page.read_text(encoding="utf-8")[:15]
        '<!DOCTYPE html>'
        """
        check_page(path, title, ComparisonError)
        return write_page(path, difference_page(self, title))

    def __repr__(self) -> str:
        return f"<{sentence(self)}>"

    def _listing(self) -> Listing:
        return listing(self)

    def _outline(self) -> Outline:
        return tree(self)
