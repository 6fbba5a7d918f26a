"""A small convolutional net, full of in-place operations as real ones are, and its training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scio_recorder.command_line.demo.digits import Digits, Split

BATCH_SIZE = 64
LEARNING_RATE = 3e-3


class DigitNet(nn.Module):
    """Two stages of convolutions, an embedding of 64 numbers and a linear classifier.

    Parameters
    ----------
    classes : int
        How many classes it tells apart.

    Examples
    --------
    >>> import torch
    >>> DigitNet(7)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 7])
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = _stage(1, 16)
        self.body = _stage(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.embed = nn.Linear(32 * 2 * 2, 64)
        self.relu = nn.ReLU(inplace=True)
        self.classify = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[samples, 1, 8, 8]`` to logits ``[samples, classes]``."""
        features: Tensor = self.pool(self.body(self.pool(self.stem(images))))
        logits: Tensor = self.classify(self.relu(self.embed(features.flatten(1))))
        return logits


def _stage(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


def train(
    net: nn.Module, digits: Digits, epochs: int, after_epoch: Callable[[float], None]
) -> float:
    """Train with Adam and keep the weights of the epoch that did best on the validation images.

    Parameters
    ----------
    net : Module
        Trained in place and left in evaluation mode. Batches are drawn from torch's global
        generator.
    digits : Digits
        Only ``train`` and ``validation`` are looked at.
    epochs : int
        Passes over the training images.
    after_epoch : callable
        Called with the validation accuracy, between 0 and 1, after each epoch.

    Returns
    -------
    float
        The best validation accuracy.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    best, weights = -1.0, net.state_dict()
    for _ in range(epochs):
        _train_epoch(net, digits.train, optimizer)
        reached = accuracy(net, digits.validation)
        if reached > best:
            best, weights = reached, copy.deepcopy(net.state_dict())
        after_epoch(reached)
    net.load_state_dict(weights)
    return best


def accuracy(net: nn.Module, split: Split) -> float:
    """Return the share of images that the net, put into evaluation mode, names rightly.

    Parameters
    ----------
    net : Module
        Maps ``split.images`` to logits.
    split : Split
        Images and labels.

    Returns
    -------
    float
        Between 0 and 1.
    """
    net.eval()
    with torch.no_grad():
        right = net(split.images).argmax(dim=1) == split.labels
    return float(right.double().mean())


def _train_epoch(net: nn.Module, split: Split, optimizer: torch.optim.Optimizer) -> None:
    net.train()
    for batch in torch.split(torch.randperm(len(split.labels)), BATCH_SIZE):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(split.images[batch]), split.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        optimizer.step()
