"""Everything that scio-recorder raises.

The tree::

    RecorderError
    ├── MissingInputError   (ValueError)    no shape information to label the net with
    ├── UnsupportedNetError (TypeError)     a net that hooks can't observe
    ├── LabellingError      (RuntimeError)  the labelling pass itself failed
    ├── LayerNotFoundError  (ValueError, KeyError)  a selector or key that names no layer
    │   └── SelectorTypeError (TypeError)   an object of a type that can't be a selector
    ├── FlowError           (RuntimeError)  layers ran differently from the labelling
    ├── PostprocessorError  (ValueError)    post-processors that can't be applied
    ├── MutationError       (RuntimeError)  a record was overwritten in place
    ├── ArgumentError       (ValueError)    an argument with a value that can't work
    ├── CollectError        (ValueError)    a dataset that can't be collected
    ├── RecordingError      (OSError)       a recording on disk that can't be trusted
    ├── RecomputeError      (LookupError)   an activation that can't be recomputed
    ├── ComparisonError     (ValueError)    runs that can't be compared
    ├── CheckError          (AssertionError) recording changed something, or a record is wrong
    ├── NonFiniteError      (ArithmeticError) a NaN or an infinity was made
    ├── AttentionError      (ArithmeticError) weights of attention that can't be had
    ├── MissingPackageError (ModuleNotFoundError) a package of an extra is not installed
    └── UnsupportedTorchError (RuntimeError) torch or Python works differently in this version

Warnings::

    CollectWarning  (UserWarning)   a dataset is probably not collected as intended
    ShardWarning    (UserWarning)   a record is only this process's part of an activation

Each class also derives from the built-in exception that a caller would expect, so code written
without this package in mind catches it. All warnings go through `warn`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from scio_recorder.interpreter import level_outside

__all__ = [
    "ArgumentError",
    "AttentionError",
    "CheckError",
    "CollectError",
    "CollectWarning",
    "ComparisonError",
    "FlowError",
    "LabellingError",
    "LayerNotFoundError",
    "MissingInputError",
    "MissingPackageError",
    "MutationError",
    "NonFiniteError",
    "PostprocessorError",
    "RecomputeError",
    "RecorderError",
    "RecordingError",
    "SelectorTypeError",
    "ShardWarning",
    "UnsupportedNetError",
    "UnsupportedTorchError",
]

# Packages between the user's line and the warning: torch's modules, blocks, objects that are
# dropped, and this package.
_BETWEEN = ("contextlib", "scio_recorder", "torch", "weakref")


class RecorderError(Exception):
    """Base class of all exceptions that this package raises on purpose."""

    def __str__(self) -> str:
        # KeyError among the bases would show the message quoted and escaped.
        return Exception.__str__(self)


def caught_as(kind: type[RecorderError], error: Exception, text: str) -> Exception:
    """Return an error that can be caught as one of ours and as the one that was raised.

    If no class can be both, it is the raised error with a note.

    Parameters
    ----------
    kind : type
        A class of this tree.
    error : Exception
        The raised error, whose attributes it has.
    text : str
        The message.

    Examples
    --------
    >>> error = caught_as(CollectError, KeyError("image"), "batch 3 has no image")
    >>> isinstance(error, CollectError), isinstance(error, KeyError), str(error)
    (True, True, 'batch 3 has no image')
    """
    try:
        # A class made here can't be found by name when an error is sent to another process.
        reduce = {"__reduce__": lambda self: (caught_as, (kind, error, str(self)))}
        both: Any = type(kind.__name__, (kind, type(error)), reduce)
        # Bypasses the constructor, which may need any arguments.
        made: Exception = type(error).__new__(both, text)
    except Exception:
        error.add_note(text)
        return error
    made.args = (text,)
    made.__dict__.update(error.__dict__)
    return made


class MissingInputError(RecorderError, ValueError):
    """Neither ``input_size`` nor ``input_data`` was given."""


class UnsupportedNetError(RecorderError, TypeError):
    """The net is of a kind whose layers can't be observed by hooks."""


class LabellingError(RecorderError, RuntimeError):
    """The pass that labels the layers failed."""


class LayerNotFoundError(RecorderError, ValueError, KeyError):
    """A selector matched no layer that can be recorded, or a key names no recorded layer."""


class SelectorTypeError(LayerNotFoundError, TypeError):
    """An argument is of a type that can't select layers."""


class FlowError(RecorderError, RuntimeError):
    """Layers ran more or less often than at labelling, or the flow depends on the data."""


class PostprocessorError(RecorderError, ValueError):
    """A post-processor is missing, failed, or returned something unusable."""


class MutationError(RecorderError, RuntimeError):
    """A recorded tensor was overwritten in place, so the record no longer holds."""


class ArgumentError(RecorderError, ValueError):
    """An argument has a value that can't work, and no other class describes it better."""


class CollectError(RecorderError, ValueError):
    """A dataset can't be collected as asked."""


class RecordingError(RecorderError, OSError):
    """A recording on disk is damaged, incomplete or belongs to something else."""


class RecomputeError(RecorderError, LookupError):
    """There are no recorded inputs from which an activation can be recomputed."""


class ComparisonError(RecorderError, ValueError):
    """Two runs can't be compared as asked."""


class CheckError(RecorderError, AssertionError):
    """A recorded network is not the bare one, or a record is wrong; ``layer`` says whose."""

    layer: Any = None


class NonFiniteError(RecorderError, ArithmeticError):
    """A network made a NaN or an infinity; ``origin`` says where."""

    origin: Any = None


class AttentionError(RecorderError, ArithmeticError):
    """Weights of attention can't be computed, or don't explain what the kernel returned."""


class MissingPackageError(RecorderError, ModuleNotFoundError):
    """A feature needs a package that is not installed; the message names the extra that has it."""


class UnsupportedTorchError(RecorderError, RuntimeError):
    """A feature needs a part of torch or Python that this version lacks or has changed."""


class CollectWarning(UserWarning):
    """A dataset is probably not collected as intended."""


class ShardWarning(UserWarning):
    """A layer returns a shard, so its record is only this process's part of the activation."""


def raise_as(kind: type[RecorderError], error: Exception, text: str) -> NoReturn:
    """Raise what `caught_as` returns, caused by the error that was caught.

    Parameters
    ----------
    kind : type
        A class of this tree.
    error : Exception
        The error that was caught.
    text : str
        The message.

    Examples
    --------
    >>> try:
    ...     raise_as(CollectError, KeyError("image"), "batch 3 has no image")
    ... except KeyError as error:
    ...     print(type(error).__name__, repr(error.__cause__))
    CollectError KeyError('image')
    """
    made = caught_as(kind, error, text)
    if made is error:
        # It must not become its own cause.
        raise error
    raise made from error


def raise_of_caller(
    what: str, error: Exception, kind: type[RecorderError] = CollectError
) -> NoReturn:
    """Raise an error that names the caller's function that raised; it can be caught as both.

    Parameters
    ----------
    what : str
        The function.
    error : Exception
        What it raised.
    kind : type, default CollectError
        A class of this tree.

    Examples
    --------
    >>> raise_of_caller("batch 3: to_inputs", TypeError("no image"))
    Traceback (most recent call last):
    ...
    scio_recorder.errors.CollectError: batch 3: to_inputs raised TypeError: no image
    """
    raise_as(kind, error, f"{what} raised {type(error).__name__}: {error}")


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """If an import in the block finds no package, say which extra has it.

    Parameters
    ----------
    extra : str
        The extra.
    what : str
        The feature that needs it.

    Examples
    --------
    >>> with needing("frame", "a table"):
    ...     import no_pandas
    Traceback (most recent call last):
    scio_recorder.errors.MissingPackageError: a table needs no_pandas, which is not installed: ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{what} needs {error.name}, which is not installed: write pip install -e "
            f"'.[{extra}]' in a clone of scio-recorder",
            name=error.name,
        ) from error


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of the user's code that led here, at any depth."""
    warning = category(message)
    # Whoever shows warnings tells this library's by it, of whatever class they are.
    vars(warning)["is_of_scio_recorder"] = True
    warnings.warn(warning, stacklevel=level_outside(_BETWEEN))
