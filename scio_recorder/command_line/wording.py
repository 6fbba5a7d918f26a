"""Messages of the library in the words of the command line, where keywords are options."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scio_recorder.errors import CollectWarning

_OPTIONS = (
    (r"resume=True", "--resume"),
    (r"the same call goes on", "the same command goes on"),
    (r"[Rr]ead it with open_recording", "look at it with scio-recorder inspect"),
    (r"\bopen_recording\((['\"].+?['\"])\)", r"scio-recorder inspect \1"),
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
    (r"\bdtype=", "--keep-dtype="),
    (r"\b(rows|match|floor|every)=(?=[\s,;:.]|$)", r"--\1"),
    (r"\b(rows|match|floor|every)=(?=\S)", r"--\1="),
    (r"\bmax_batches=", "--max-batches="),
    (r"\b(make_)?batches is\b(?! empty)", "--data is"),
    (r"\bbatches is empty: it gave", "--data gave"),
    (r"\bmake_batches\(", "the function of --data, called with ("),
    (r"\bwrite batches=", "give "),
    (r"\bbatches=(?=\S)", ""),
    (r"\bwrite dtypes=\[torch\.long\]", "give --dtype int64"),
    (r"\bas input_data=x", "as x"),
    (r"\binput_(size|data)\b", r"--input-\1"),
)
# Keywords of these methods are options above, or are said to be Python.
_CALLS = {"collect": "collect(batches, {})", "record": "record(..., {})"}
_WITH_OPTION = (
    "self",
    "selectors",
    "batches",
    "store",
    "every",
    "max_batches",
    "resume",
    "dtype",
    "rows",
)
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
    keywords = _of_python() if "=" in text else {}
    of_python = rf"\b({'|'.join(keywords)})=(?!=)" if keywords else "(?!)"
    named = list(dict.fromkeys(re.findall(of_python, text)))
    text = re.sub(rf"\b(?:write|give) (?={of_python})", "in Python, write ", text)
    text = re.sub(rf"\b(?:Write|Give) (?={of_python})", "In Python, write ", text)
    hints = [_INPUTS] if "to_inputs" in named else []
    hints += [_ROWS] if re.search(r"\b(Tokens|Nodes)\(\w", text) else []
    for method, call in _CALLS.items():
        others = [word for word in named if word != "to_inputs" and keywords[word] == method]
        if others:
            given = ", ".join(f"{word}=..." for word in others)
            verb = "is no option" if len(others) == 1 else "are no options"
            written = f"Recorder(net, ...).{call.format(given)}"
            hints.append(f"{' and '.join(others)} {verb} of the command: write {written} in Python")
    return ". ".join([text.removesuffix(".") if hints else text, *hints])


def _of_python() -> dict[str, str]:
    """Return the keywords without an option, with the method that takes them."""
    # Imported here so that --help and wrong use answer at once.
    from scio_recorder.recorder.recorder import Recorder

    return {
        name: method
        for method in _CALLS
        for name in inspect.signature(getattr(Recorder, method)).parameters
        if name not in _WITH_OPTION
    }


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
