"""The arguments of all commands. PyTorch is not imported here, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from inspect import getdoc
from typing import NoReturn


def parsed_from(arguments: Sequence[str] | None) -> Namespace:
    """Return the parsed arguments, or exit the program if they can't be parsed."""
    # Without a word, the commands are listed.
    words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    parser = _Parser(
        prog="scio-recorder",
        description="Record and change what happens inside a PyTorch network.",
    )
    with suppress(PackageNotFoundError):
        parser.add_argument("--version", action="version", version=version("scio-recorder"))
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )
    for add in (summary, collect, status, inspect, verify, report, compare, demo):
        # Python's option -OO removes docstrings.
        text = getdoc(add) or add.__name__
        short = text.partition("\n")[0].rstrip(".")
        about = f"{short[0].lower()}{short[1:]}"
        command = commands.add_parser(add.__name__, help=about, description=text)
        command.add_argument("--traceback", action="store_true", help="show an error's origin")
        add(command)
    parsed, unknown = parser.parse_known_args(_with_whole_shapes(words))
    if unknown:
        commands.choices[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


class _Parser(ArgumentParser):
    """Explains in one line what is wrong, as commands do."""

    def error(self, message: str) -> NoReturn:
        is_greedy = self.prog.endswith(("collect", "compare"))
        if is_greedy and "required: " in message and "required: -" not in message:
            message += " (write it before --layers and --match, which take all words that follow)"
        self.exit(2, f"scio-recorder: error: {message}; {self.prog} --help lists what there is\n")


def _with_whole_shapes(words: Iterable[str]) -> list[str]:
    """Return words, of which ``--input-size 1 3 32 32`` has one for the shape."""
    whole: list[str] = []
    for word in words:
        if word.isdecimal() and whole[-2:-1] == ["--input-size"]:
            whole[-1] += f",{word}"
        else:
            whole.append(word)
    return whole


def summary(command: ArgumentParser) -> None:
    """Print the labelled architecture of a net, or the operations inside its layers.

    MODULE is imported, from the current folder if it is there; NAME is a net, or a class or
    function that makes one when called without arguments.
    """
    _add_net(command)
    what = "print what the code of these layers calls, with its line; by default of all layers"
    command.add_argument("--operations", nargs="*", action="extend", metavar="LAYER", help=what)


def _add_net(command: ArgumentParser) -> None:
    command.add_argument("net", metavar="MODULE:NAME", help="the net, such as mynets:build")
    inputs = command.add_mutually_exclusive_group(required=True)
    what = "shape of an input, batch first, such as 1,3,32,32; once for each input"
    inputs.add_argument("--input-size", type=size, action="append", metavar="N,C,...", help=what)
    what = "the input itself: a tensor, a tuple, a dict of keywords, or a function that makes it"
    inputs.add_argument("--input-data", metavar="MODULE:NAME", help=what)
    what = "dtype of the inputs of --input-size, such as int64; once for all or once for each"
    command.add_argument("--dtype", action="append", default=[], help=what)
    _add_flow(command)


def collect(command: ArgumentParser) -> None:
    """Record layers of a net over a dataset, and write them to a folder.

    --resume continues an interrupted recording. With --parts any number of these commands, on any
    machines that see the folder, share the work, and continue what others have left.
    """
    _add_net(command)
    _add_run(command)
    add = command.add_argument
    what = "the batches: an iterable such as a DataLoader, or a function that makes one"
    add("--data", metavar="MODULE:NAME", required=True, help=what)
    what = "fill the folder together with others that run this command; --data is then a function "
    add("--parts", type=int, metavar="N", help=f"{what}of the part, from 0 to N - 1")
    what = "labels such as 1-3, names, globs such as 'layer4.*', or operations such as 'h.*/add'"
    add("--layers", nargs="+", action="extend", required=True, metavar="LAYER", help=what)
    what = "the folder to write, or a place in a bucket such as s3://bucket/run"
    add("--out", "--store", dest="out", required=True, metavar="PATH", help=what)
    add("--every", type=int, metavar="N", default=1, help="take every n-th batch (1)")
    add("--keep-dtype", metavar="DTYPE", help="kept dtype, such as bfloat16")
    add("--resume", action="store_true", help="continue an interrupted recording")


def status(command: ArgumentParser) -> None:
    """Show the progress of a recording that processes fill in parts."""
    inspect(command)


def inspect(command: ArgumentParser) -> None:
    """Show what a recording on disk holds."""
    what = "the recording: a folder, or a URL such as s3://bucket/run"
    command.add_argument("path", metavar="PATH", help=what)


def verify(command: ArgumentParser) -> None:
    """Read a whole recording, compare its checksums, and look for ids that are there twice."""
    inspect(command)


def report(command: ArgumentParser) -> None:
    """Write an HTML page that shows a recording.

    The page is one file: statistics, histograms, dead and saturated units, the architecture.
    """
    inspect(command)
    command.add_argument("--output", metavar="FILE", help="the page to write (PATH.html)")
    command.add_argument("--title", help="its heading; by default the type of the net")


def compare(command: ArgumentParser) -> None:
    """Find the layers in which two runs differ, and the one that makes the difference.

    Runs are recordings, or nets that run over --data. The exit status is 0 if nothing differs, 1
    if something does, or with --local if a layer has a fault, and 2 for any error.
    """
    add, what = command.add_argument, "the folder of a recording, or MODULE:NAME of a net"
    add("reference", metavar="REFERENCE", help=what)
    add("candidate", metavar="CANDIDATE", help=what)
    what = "the batches, if nets run: an iterable, or a function that makes one"
    add("--data", metavar="MODULE:NAME", help=what)
    what = "the layers to compare, if REFERENCE is a net, as for collect; by default all"
    add("--layers", nargs="+", action="extend", metavar="LAYER", help=what)
    what = "names or globs of the reference and their names in the candidate"
    add("--match", nargs="+", action="extend", default=[], metavar="NAME=NAME", help=what)
    add("--rtol", type=float, default=0.0, help="relative tolerance (0: bit for bit)")
    add("--atol", type=float, default=0.0, help="absolute tolerance (0: bit for bit)")
    text = "find the operation that makes the difference, with its line of code"
    add("--operations", action="store_true", help=text)
    text = "find layers of a net that make an error of their own, beyond what rounding explains"
    add("--local", action="store_true", help=text)
    add("--report", metavar="FILE", help="write a page that shows the differences")
    _add_run(command)
    _add_flow(command)


def _add_run(command: ArgumentParser) -> None:
    add = command.add_argument
    add("--max-batches", type=int, metavar="N", help="stop after so many taken batches")
    add("--rows", metavar="ROWS", help="a row, if not a sample: tokens, nodes, or MODULE:NAME")
    add("--train", action="store_true", help="leave nets in their mode; by default it is eval")


def _add_flow(command: ArgumentParser) -> None:
    text = "label nets although their control flow depends on the data"
    command.add_argument("--allow-dynamic-flow", action="store_true", help=text)


def demo(command: ArgumentParser) -> None:
    """Train a small net on handwritten digits and detect unknown ones.

    The net is trained on the digits 0 to 6. Scores that look inside it should notice the digits 7
    to 9. The demo needs scikit-learn, but no internet connection.
    """
    add = command.add_argument
    add("--seed", type=int, default=0, help="decides everything random (0)")
    add("--epochs", type=int, default=15, help="length of the training (15)")
    add("--out", metavar="PATH", help="folder for a recording and its page (a temporary one)")


def size(text: str) -> tuple[int, ...]:
    """Read a shape."""
    try:
        shape = tuple(int(part) for part in text.strip("()[]").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ArgumentTypeError(f"{text!r} is not a shape; write it like 1,3,32,32")
    return shape
