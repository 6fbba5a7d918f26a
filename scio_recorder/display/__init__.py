"""Tables, trees, plots and pages, as functions of plain data."""

from scio_recorder.display.outline import Outline, outline, visible
from scio_recorder.display.outlined import Outlined

__all__ = ["Outline", "Outlined", "outline", "visible"]
