"""A demonstration and its page: telling unknown digits from known ones by a net's activations.

Every score is higher for inputs that look like the training data than for others. Scores are
computed in float64.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from scio_recorder import Recorder, Recording
from scio_recorder.analysis.scores import mahalanobis
from scio_recorder.command_line.command_words import print_line
from scio_recorder.display.outline import Listing
from scio_recorder.display.page import rendered, write_page
from scio_recorder.lowlevel import needing
from scio_recorder.reductions import Covariance
from scio_recorder.tensors import one_thread

_BINS = 32
_SHOWN = 12


class Score(NamedTuple):
    """How well one score of a ``layer`` tells both apart, and its values, float64 ``[images]``."""

    name: str
    layer: str
    auroc: float
    fpr_at_95_tpr: float
    known: Tensor
    unknown: Tensor


def detection_page(scores: list[Score], known: Tensor, unknown: Tensor, num_trained: int) -> str:
    """Return the page, which stands by itself.

    Parameters
    ----------
    scores : list of Score
        In the order in which they are shown.
    known, unknown : Tensor
        The images that were scored ``[images, 1, height, width]``, between 0 and 1.
    num_trained : int
        How many images the net was trained on.
    """
    best = max(scores, key=lambda score: score.auroc)
    threshold = _threshold(best)
    # The least certain ones say more than the first ones.
    doubtful = best.unknown.argsort(descending=True)[:_SHOWN]
    doubtful = doubtful[best.unknown[doubtful] >= threshold]
    rows = [
        ("Known digits, which the net was not trained on", known, torch.arange(_SHOWN)),
        ("Unknown digits", unknown, torch.arange(_SHOWN)),
        ("Unknown digits that pass as known ones, the most certain first", unknown, doubtful),
    ]
    values = {id(known): best.known, id(unknown): best.unknown}
    return rendered(
        "demo.html",
        title="Known and unknown digits",
        facts=[
            ("Trained on", f"{num_trained:,} images of known digits"),
            ("Known", f"{len(known):,} test images"),
            ("Unknown", f"{len(unknown):,} images"),
            ("Best score", f"{best.name} of {best.layer}"),
            ("Its AUROC", f"{best.auroc:.3f}"),
        ],
        best=best,
        scores=[(score, *_histograms(score)) for score in scores],
        digits=[
            (title, [(_pixels(images[i, 0]), values[id(images)][i].item()) for i in chosen])
            for title, images, chosen in rows
            if len(chosen)
        ],
        size=tuple(known.shape[2:]),
    )


def _threshold(score: Score) -> float:
    """Return the value that 95 % of the known images reach."""
    return score.known.sort(descending=True).values[-(-len(score.known) * 95 // 100) - 1].item()


def _histograms(score: Score) -> tuple[list[tuple[str, float]], float, list[list[float]]]:
    """Return marks of the axis, the threshold, and the bins of both kinds, in hundredths.

    The axis begins at the lowest hundredth: some values lie far below, and count in the first bin.
    """
    values = torch.cat([score.known, score.unknown])
    low, high = values.quantile(0.01).item(), values.max().item()
    kinds = [
        torch.histc(kind.clamp(min=low), _BINS, low, high) / len(kind)
        for kind in (score.known, score.unknown)
    ]
    top = max(kind.max().item() for kind in kinds)
    power = 10 ** math.floor(math.log10((high - low) / 3))
    step = max(part * power for part in (1, 2, 5) if part * power <= (high - low) / 3)
    numbers = [step * place for place in range(math.ceil(low / step), int(high // step) + 1)]

    def along(value: float) -> float:
        return (value - low) / (high - low) * 100

    marks = [(f"{number:g}", along(number)) for number in numbers]
    return marks, along(_threshold(score)), [(kind / top * 100).tolist() for kind in kinds]


def _pixels(image: Tensor) -> list[tuple[int, int, float]]:
    """Return column, row and darkness of the pixels that are not white."""
    return [(int(column), int(row), image[row, column].item()) for row, column in image.nonzero()]


# -- the demonstration -----------------------------------------------------------------------------

# Digits below this one are known.
KNOWN = 7
BATCH_SIZE = 64
LEARNING_RATE = 3e-3

NEXT = """Next:
  scio-recorder inspect {path}
  scio-recorder verify {path}
  scio-recorder summary MODULE:FACTORY --input-size 1,3,224,224  # your network"""

FEATURE_LAYERS = ("body", "embed")
LOGITS_LAYER = "classify"


class Split(NamedTuple):
    """Images ``[samples, 1, 8, 8]``, float32 between 0 and 1, and labels ``[samples]``, int64."""

    images: Tensor
    labels: Tensor


class Digits(NamedTuple):
    """The known classes in two parts that share no image, and the unknown ones."""

    train: Split
    test: Split
    unknown: Split


@one_thread()
def run_demo(
    console: Console, *, seed: int = 0, epochs: int = 15, folder: Path | None = None
) -> list[Score]:
    """Train a net on the digits 0 to 6 and see which scores notice the digits 7 to 9.

    Parameters
    ----------
    console : rich.console.Console
        Where the table is printed.
    seed : int, default 0
        Decides the split, the weights and the order of training.
    epochs : int, default 15
        Passes over the training images, at least 1.
    folder : Path, optional
        Where to write a page of the scores, and a recording of the unknown digits with its page.

    Returns
    -------
    list of Score
        The rows of the printed table.

    Raises
    ------
    ModuleNotFoundError
        scikit-learn is not installed.
    """
    # The caller's random numbers continue as if none had been drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        digits, net = load_digits(), digit_net(KNOWN)
        train(net, digits.train, epochs)
    rnet = Recorder(net, input_size=(1, 1, 8, 8))
    rnet.record(*FEATURE_LAYERS, LOGITS_LAYER)
    seen = recorded(rnet, digits.test)
    right = (seen[LOGITS_LAYER].argmax(dim=1) == digits.test.labels).double().mean().item()
    negative = (seen["embed"] < 0).double().mean().item()
    trained = f"Trained on {len(digits.train.labels)} images of the digits 0 to {KNOWN - 1}. "
    print_line(console, f"{trained}Accuracy: {right:.1%} of the test images.\n")
    console.print(rnet)
    kept = f"{negative:.0%} of the recorded values are negative, as embed returned them.\n"
    print_line(console, f"\nAn in-place ReLU overwrites what embed returns; {kept}")
    scores = detect(rnet, digits)
    console.print(_table(scores))
    if folder is not None:
        leave(rnet, digits, scores, folder, console)
    return scores


def leave(
    rnet: Recorder, digits: Digits, scores: list[Score], folder: Path, console: Console
) -> None:
    """Write a recording of whole activations, its page and one of the scores; say what is next."""
    path = folder / "digits"
    recording = rnet.collect([digits.unknown], store=f"disk:{path}", progress=False)
    recording.report(folder / "layers.html", title="What the layers return for unknown digits")
    images = digits.test.images, digits.unknown.images
    write_page(f"{path}.html", [detection_page(scores, *images, len(digits.train.labels))])
    print_line(console, f"\nA page on known and unknown digits: {path}.html")
    print_line(console, NEXT.format(path=path))


def load_digits() -> Digits:
    """Load scikit-learn's handwritten digits, and split the known ones at random."""
    with needing("demo", "the demonstration"):
        from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    known = (labels < KNOWN).nonzero().flatten()
    known = known[torch.randperm(len(known))]
    cut = len(known) * 8 // 10
    parts = known[:cut], known[cut:], labels >= KNOWN
    return Digits(*(Split(images[part], labels[part]) for part in parts))


def digit_net(classes: int) -> nn.Sequential:
    """Return a small convolutional net that, like real ones, is full of in-place operations.

    Examples
    --------
    >>> digit_net(7)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 7])
    """
    return nn.Sequential(
        OrderedDict(
            stem=_stage(1, 16),
            halve=nn.MaxPool2d(2),
            body=_stage(16, 32),
            quarter=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            embed=nn.Linear(32 * 2 * 2, 64),
            relu=nn.ReLU(inplace=True),
            classify=nn.Linear(64, classes),
        )
    )


def _stage(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


def train(net: nn.Module, split: Split, epochs: int) -> None:
    """Train with Adam, and leave the net in evaluation mode."""
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    net.train()
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(split.labels)), BATCH_SIZE):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(split.images[batch]), split.labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
            optimizer.step()
    net.eval()


def recorded(rnet: Recorder, split: Split, **options: Any) -> Recording:
    """Return features ``[samples, features]`` by layer; feature maps are averaged."""
    return rnet.collect([split], store="host", transform=_pooled, progress=False, **options)


def _pooled(activation: Tensor, batch: Split) -> Tensor:
    return activation.flatten(2).mean(dim=2) if activation.dim() > 2 else activation


def detect(rnet: Recorder, digits: Digits) -> list[Score]:
    """Score test images and unknown ones, by statistics of the training images alone."""
    # The mean of each class, and the covariance that all classes share.
    within = Covariance(by=lambda batch: batch.labels)
    statistics = recorded(rnet, digits.train, reduce=dict.fromkeys(FEATURE_LAYERS, within))

    def scores_of(split: Split) -> dict[tuple[str, str], Tensor]:
        seen = recorded(rnet, split)
        distances = {
            ("Mahalanobis", name): -mahalanobis(seen[name], statistics[name])
            for name in FEATURE_LAYERS
        }
        return {("energy", "logits"): energy(seen[LOGITS_LAYER]), **distances}

    known, unknown = scores_of(digits.test), scores_of(digits.unknown)
    return [
        Score(*key, *quality(known[key], unknown[key]), known[key], unknown[key]) for key in known
    ]


def energy(logits: Tensor) -> Tensor:
    """Return the negative free energy, ``log(sum(exp(logits)))`` (Liu et al., NeurIPS 2020)."""
    return torch.logsumexp(logits.double(), dim=1)


def quality(known: Tensor, unknown: Tensor) -> tuple[float, float]:
    """Return the AUROC, and the share of unknown inputs that pass where 95 % of known ones do.

    Examples
    --------
    >>> quality(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0.1, 0.3]))
    (0.833..., 0.5)
    """
    from sklearn import metrics

    labels = torch.cat([torch.ones(len(known)), torch.zeros(len(unknown))])
    scores = torch.cat([known, unknown])
    passed_unknown, passed_known, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    at = int((passed_known >= 0.95).argmax())
    return float(metrics.roc_auc_score(labels, scores)), float(passed_unknown[at])


def _table(scores: list[Score]) -> Listing:
    counts = len(scores[0].known), len(scores[0].unknown)
    title = "{} known test images against {} of unknown digits".format(*counts)
    rows = [[*row[:2], *(f"{figure:.3f}" for figure in row[2:4])] for row in scores]
    return Listing(title, ("score", "looks at"), ("AUROC", "FPR at 95 % TPR"), rows)
