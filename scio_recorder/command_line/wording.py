"""Messages of the library in the words of the command line, where keywords are options."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scio_recorder.errors import CollectWarning

_OPTIONS = (
    (r"resume=True", "--resume"),
    (r"[Rr]ead it with open_recording", "look at it with scio-recorder inspect"),
    (r"write force_static_flow=False", "give --allow-dynamic-flow"),
    (r"call net\.eval\(\) before collect\(\.\.\.\) unless", "leave out --train unless"),
    (r"write store=\"disk:PATH\"", "give --out PATH"),
    (r"write rows=Tokens\(\)", "give --rows tokens"),
    (r"rows=Tokens\(\)", "--rows tokens"),
    (r"rows=Nodes\(\)", "--rows nodes"),
    (r"such as match=\{['\"](.+?)['\"]: ['\"](.+?)['\"]\}", r"such as --match '\1=\2'"),
    (r"\{\"layers\.\*\": \"h\.\*\"\}", "'layers.*=h.*'"),
    (r"match has ['\"](.+?)['\"]", r"--match has '\1'"),
    (r"Write match=", "Give --match"),
    (r"\bdtype=(?=[\s,;:.)]|$)", "--keep-dtype"),
    (r"\b(rows|match|floor|every)=(?=[\s,;:.]|$)", r"--\1"),
    (r"\b(make_)?batches is\b(?! empty)", "--data is"),
    (r"\bbatches is empty: it gave", "--data gave"),
    (r"\bmake_batches\(", "the function of --data, called with ("),
    (r"write batches=\[x\] for one batch, or batches=", "give [x] for one batch, or "),
)
# Keywords without an option, and what is written in their place.
_OF_PYTHON = r"\b(transform|to_inputs|sample_ids|reduce)="
_INPUTS = "On the command line, let --data give what the net takes: a tensor, or a dict of keywords"
_ROWS = "On the command line, --rows MODULE:NAME names such an object"


def spoken(text: str) -> str:
    """Return a message that names options in place of keywords, and says what has no option.

    Examples
    --------
    >>> spoken("the folder holds a recording: resume it with resume=True")
    'the folder holds a recording: resume it with --resume'
    >>> spoken("batch 0 is a str: write to_inputs=lambda batch: ...")
    'batch 0 is a str: in Python, write to_inputs=lambda batch: .... On the command line, let ...'
    """
    for pattern, words in _OPTIONS:
        text = re.sub(pattern, words, text)
    keywords = list(dict.fromkeys(re.findall(_OF_PYTHON, text)))
    text = re.sub(rf"\b(?:write|give) (?={_OF_PYTHON})", "in Python, write ", text)
    text = re.sub(rf"\b(?:Write|Give) (?={_OF_PYTHON})", "In Python, write ", text)
    hints = [_INPUTS] if "to_inputs" in keywords else []
    hints += [_ROWS] if re.search(r"\b(Tokens|Nodes)\(\w", text) else []
    others = [word for word in keywords if word != "to_inputs"]
    if others:
        given = ", ".join(f"{word}=..." for word in others)
        verb = "is no option" if len(others) == 1 else "are no options"
        call = f"Recorder(net, ...).collect(batches, {given})"
        hints.append(f"{' and '.join(others)} {verb} of the command: write {call} in Python")
    return ". ".join([text.removesuffix(".") if hints else text, *hints])


@contextmanager
def warnings_spoken() -> Iterator[None]:
    """Print this library's warnings in one line each inside the block, and others as ever."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, CollectWarning):
                print(f"scio-recorder: warning: {spoken(str(message))}", file=sys.stderr)
            else:
                usual(message, category, *where, **options)

        warnings.showwarning = show
        yield
