"""What commands print and exit with: messages in the words of the command line, and statuses."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from scio_recorder.display.outline import Listing, full_name
from scio_recorder.errors import is_own
from scio_recorder.recorder.recorder import Recorder
from scio_recorder.recording.made_with import in_words

FAILED = 1
# The status with which diff and cmp report a difference.
DIFFERENT = 1
# The status with which argparse itself exits.
WRONG_USE = 2
# The statuses that shells report for a process that Ctrl-C or SIGTERM ended.
INTERRUPTED, TERMINATED = 130, 143

# The least columns of characters that tables are given, and those of figures.
WIDTH, WIDTH_OF_FIGURES = 100, 120
_FAULTS = ("nan", "inf")
_FIGURES = ("bytes", "mean", "std", "min", "max", "zeros", *_FAULTS)

# Keywords of the library, and the options of the command that stand for them.
_OPTIONS = {"dtype": "--keep-dtype", "dtypes": "--dtype"}
_SAME = "every", "atol", "input_data", "input_size", "match", "max_batches", "rtol", "rows"
_OPTIONS |= {name: f"--{name.replace('_', '-')}" for name in _SAME}
# What is written otherwise on the command line, after keywords became options.
_WORDS = (
    (r'store="disk:PATH"', "--out PATH"),
    (r"resume=True", "--resume"),
    (r"force_static_flow=False", "--allow-dynamic-flow"),
    (r"call net\.eval\(\) before collect\(\.\.\.\)", "leave out --train"),
    (r"the same call goes on", "the same command goes on"),
    (r"open_recording\((['\"].+?['\"])\)", r"scio-recorder inspect \1"),
    (r"with open_recording", "with scio-recorder inspect"),
    (r"^(make_)?batches is\b", "--data is"),
    (r"\bnum_parts\b", "--parts"),
    (r"(?<![\w-])batches=(?=\S)", ""),
    (r"\binput_(size|data)\b", r"--input-\1"),
    (r"=\[torch\.long\]", " int64"),
    (r"=Tokens\(\)", " tokens"),
    (r"=Nodes\(\)", " nodes"),
    (r"[ =]\{['\"]([^'\"]+)['\"]: ['\"]([^'\"]+)['\"]\}", r" '\1=\2'"),
    (r"\brecord\(\*rnet\.net\.([\w.]+)\)", r"--layers '\1.?'"),
    (r"\brecord\('([^']+)'\)", r"--layers '\1'"),
    (r"\b[Ww]rite (?=to_inputs=)", "let --data give what the net takes, or write "),
)
# A shape, which is written without brackets and spaces.
_SHAPE = re.compile(r"--input-size=\(([\d, ]+?),?\)")


def command_message(text: str) -> str:
    """Return a message that names options in place of keywords, and says what has no option.

    Examples
    --------
    >>> command_message("the folder holds a recording: resume it with resume=True, or give rows=")
    'the folder holds a recording: resume it with --resume, or give --rows'
    >>> command_message("the shapes differ: pad them by transform=")
    'the shapes differ: ... In Python, write Recorder(net, ...).collect(batches, transform=...)'
    >>> command_message("record what it holds, by record(*rnet.net.layers)")
    "record what it holds, by --layers 'layers.?'"
    >>> command_message("input_size=(3,) failed: write input_size=(1, 3), or give input_data=")
    '--input-size 3 failed: write --input-size 1,3, or give --input-data'
    """
    # A value follows an equals sign.
    keyword = re.compile(rf"(?<![\w-])({'|'.join(_OPTIONS)})=(?=(.?))")
    text = keyword.sub(lambda f: _OPTIONS[f[1]] + ("" if f[2] in " ,;:.)" else "="), text)
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    text = _SHAPE.sub(lambda found: f"--input-size {found[1].replace(' ', '')}", text)
    keywords = inspect.signature(Recorder.collect).parameters
    named = [name for name in keywords if re.search(rf"(?<![\w-]){name}=(?!=)", text)]
    if named:
        given = ", ".join(f"{name}=..." for name in named)
        call = f"Recorder(net, ...).collect(batches, {given})"
        text = f"{text.removesuffix('.')}. In Python, write {call}"
    return text


def in_one_line(text: str) -> str:
    r"""Return a text without ends of lines, and without the signatures that torch lists.

    Examples
    --------
    >>> in_one_line("linear() got (int), but expected one of:\n * (Tensor input)\nWrite x")
    'linear() got (int), but expected one of: Write x'
    """
    text = re.sub(r"\n +(\* \(|didn't match).*", "", text)
    return re.sub(r"(?<![.:;,])\s*\n\s*", ". ", text).replace("\n", " ")


@contextmanager
def command_warnings() -> Iterator[None]:
    """Print this library's warnings in one line each inside the block, and others as ever."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if is_own(message):
                text = in_one_line(command_message(str(message)))
                print(f"scio-recorder: warning: {text}", file=sys.stderr)
            else:
                usual(message, category, *where, **options)

        warnings.showwarning = show
        yield


def layer_table(recording: Any, title: str) -> Listing:
    """Return the table of a recording's layers, in the order of execution."""
    rows = recording.layer_rows()
    figures = [
        name for name in _FIGURES if name not in _FAULTS or any(row.get(name) for row in rows)
    ]
    lines = []
    for row in rows:
        name = full_name(recording.architecture[row["label"]])
        # Reduced layers have no samples to describe.
        shape = str(list(row["shape"])) if "shape" in row else "reduced"
        texts = [row["label"], name, row["type"], shape, row.get("dtype", "")]
        lines.append([*texts, *(_figure(one, row.get(one)) for one in figures)])
    made = in_words(recording.made_with)
    notes = [f"Made with {made}."] * bool(made)
    names = ("label", "name", "type", "shape", "dtype")
    return Listing(title, names, figures, lines, notes=notes)


def print_line(console: Console, text: str) -> None:
    """Print a text as it is, in one line of any length."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return decimal(int(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
