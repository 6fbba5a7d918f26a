"""The tree as an output of a notebook: complete in itself, and alone in its styles."""

from __future__ import annotations

from scio_recorder.display.outline import Outline
from scio_recorder.display.tree import asset, tree_html


def notebook_html(shown: Outline) -> str:
    """Return a piece of HTML to be put into a page, any number of times.

    There are no ids that could clash, each rule of the style begins with the tree's own class, and
    colours are those of the page around it. It folds without scripts too.

    Parameters
    ----------
    shown : Outline
        The rows to show.

    Returns
    -------
    str
        An element with a style sheet in front and a script behind it.
    """
    tree = "".join(tree_html(shown))
    return f"<style>\n{asset('tree.css')}</style>{tree}<script>\n{asset('tree.js')}</script>"
