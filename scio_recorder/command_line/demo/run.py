"""The demonstration from start to end, printed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from scio_recorder.command_line.demo.detection import (
    FEATURE_LAYERS,
    RECTIFIED_LAYER,
    Result,
    detect,
    record_features,
)
from scio_recorder.command_line.demo.digits import Digits, load_digits
from scio_recorder.command_line.demo.network import DigitNet, accuracy, train
from scio_recorder.recorder.recorder import Recorder
from scio_recorder.tensors.threads import one_thread

KNOWN = 7


@one_thread()
def run_demo(console: Console, *, seed: int = 0, epochs: int = 15) -> list[Result]:
    """Train a net on the digits 0 to 6 and see which scores notice the digits 7 to 9.

    Parameters
    ----------
    console : rich.console.Console
        Printed to; a progress bar is shown only on a terminal.
    seed : int, default 0
        Decides the split, the weights and the order of training.
    epochs : int, default 15
        Passes over the training images, at least 1.

    Returns
    -------
    list of Result
        The rows of the printed table.

    Raises
    ------
    ModuleNotFoundError
        scikit-learn is not installed.
    """
    # The caller's own random numbers go on as if nothing had been drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        digits = load_digits(KNOWN)
        net = DigitNet(KNOWN)
        reached = _train(console, net, digits, epochs)
    console.print(
        f"Trained on {len(digits.train.labels)} images of the digits 0 to {KNOWN - 1}. "
        f"Accuracy: {reached:.1%} of the validation images, "
        f"{accuracy(net, digits.test):.1%} of the test images.\n"
    )

    # Two columns of torchinfo's fit a terminal of 80 characters.
    columns = ("output_size", "num_params")
    rnet = Recorder(net, input_size=(1, 1, 8, 8), col_names=columns, col_width=18)
    rnet.record(*FEATURE_LAYERS, RECTIFIED_LAYER)
    console.print(str(rnet), markup=False, highlight=False, soft_wrap=True)
    _say_what_is_recorded(console, rnet, digits)
    results = list(detect(rnet, digits))
    console.print(_table(results, len(digits.test.labels), len(digits.unknown.labels)))
    return results


def _train(console: Console, net: DigitNet, digits: Digits, epochs: int) -> float:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("validation accuracy {task.fields[reached]:.1%}"),
    )
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=silent) as progress:
        task = progress.add_task("training", total=epochs, reached=0.0)
        return train(
            net, digits, epochs, lambda reached: progress.update(task, advance=1, reached=reached)
        )


def _say_what_is_recorded(console: Console, rnet: Recorder, digits: Digits) -> None:
    labels = ", ".join(
        f"{rnet.architecture[key].name} ({key[0]}-{key[1]})" for key in rnet.recording
    )
    record = record_features(rnet, digits.test.images).features["embed"]
    negative = (record < 0).double().mean().item()
    console.print(
        f"\nRecorded: {labels}. An in-place ReLU overwrites what embed returns; "
        f"{negative:.0%} of the recorded values are negative, as embed returned them.\n"
    )


def _table(results: Sequence[Result], known: int, unknown: int) -> Table:
    table = Table(
        title=f"{known} known test images against {unknown} of unknown digits",
        title_justify="left",
    )
    table.add_column("score")
    table.add_column("looks at")
    table.add_column("AUROC", justify="right")
    table.add_column("FPR at 95 % TPR", justify="right")
    for row in results:
        table.add_row(row.score, row.layer, f"{row.auroc:.3f}", f"{row.fpr_at_95_tpr:.3f}")
    return table
