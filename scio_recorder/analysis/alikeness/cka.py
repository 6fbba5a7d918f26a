"""Linear centred kernel alignment of many layers at once, exact and in bounded memory.

NOTE [Two forms of one number]

With the rows of two layers as matrices X [rows, p] and Y [rows, q] whose columns are centred,
linear CKA is |XᵀY|² / (|XᵀX| |YᵀY|), in Frobenius norms (Kornblith et al., "Similarity of neural
network representations revisited", ICML 2019). The same norms are inner products of the matrices of
inner products of rows: |XᵀY|² = <XXᵀ, YYᵀ>. The first form costs rows · p · q for each pair of
layers, the second rows² · p for each layer and rows² for each pair. Both are sums over blocks, of
features in the first form and of rows in the second, so no such matrix is ever built as a whole.

The cheaper form is chosen once for all layers. A choice for each pair could not save much: a
layer that has more features than there are rows needs the second form for its own norm, and once
that is paid for, pairs with other layers are cheaper in it too.

Columns are centred before anything is multiplied, although that takes a separate reading.
Subtracting products of means afterwards would lose as many digits as the mean exceeds the spread
by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import torch
from torch import Tensor

from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.stores.disk_tensor import DiskTensor, bytes_of_row

# The number of sums of products at a time, and of factors, in float64.
_SUMS = 1 << 25
_FACTORS = 1 << 22
# Bytes that are read at once if values must be copied to be contiguous.
_READ_BYTES = 1 << 26


class Features:
    """The rows of a layer, centred and scaled, [rows, features] in float64, read part by part.

    Parameters
    ----------
    samples : Tensor
        The values of all rows, which may lie on disk.
    order : Tensor or None
        The index in ``samples`` of each row; None if they are in order.
    device : torch.device
        Where to compute.

    Attributes
    ----------
    width : int
        The number of features; a complex number counts as two.
    trouble : str
        Why no similarity can be computed; empty if one can.
    """

    def __init__(self, samples: Tensor, order: Tensor | None, device: torch.device) -> None:
        self._samples = samples
        self._order = order
        self.device = device
        self.num_rows = len(samples)
        self.width = samples.shape[1:].numel() * (1 + samples.dtype.is_complex)
        is_view = order is None and not isinstance(samples, DiskTensor)
        most = _READ_BYTES // max(1, bytes_of_row(samples))
        # The number of rows that may be opened at once.
        self.at_once = self.num_rows if is_view else max(1, most)
        low, high, self._mean = self._survey()
        spread = float((high - low).amax()) if self.width else 0.0
        self.trouble = "" if spread else "is the same in all rows"
        if not math.isfinite(spread):
            held = bool(low.isfinite().all() and high.isfinite().all())
            self.trouble = "spreads beyond float64" if held else "has values that are not finite"
        # The scale cancels out. It keeps fourth powers of large values from overflowing. The
        # reciprocal of the smallest numbers would overflow itself.
        self._scale = 1.0 if self.trouble else spread

    def open(self, rows: range) -> Tensor:
        """Return the unscaled values of some rows, [rows, features]."""
        chosen: slice | Tensor = slice(rows.start, rows.stop)
        if self._order is not None:
            chosen = self._order[chosen].to(self._samples.device)
        found = self._samples[chosen].detach()
        if found.is_complex():
            found = torch.view_as_real(found.resolve_conj())
        return found.reshape(len(found), self.width)

    def centred(self, opened: Tensor, piece: slice) -> Tensor:
        """Return some features of opened rows, ready to be multiplied."""
        values = opened[:, piece].to(self.device, torch.float64)
        return (values - self._mean[piece]).div_(self._scale)

    def _survey(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the smallest and the largest value and the mean of each feature."""
        total = torch.zeros(self.width, dtype=torch.float64, device=self.device)
        low, high = total + math.inf, total - math.inf
        step = max(1, min(self.at_once, _FACTORS // max(1, self.width)))
        for rows in _parts(range(self.num_rows), step):
            values = self.open(rows).to(self.device, torch.float64)
            low, high = low.minimum(values.amin(0)), high.maximum(values.amax(0))
            total += values.sum(0)
        # Rounding must not give a constant feature a spread.
        return low, high, torch.where(low == high, low, total / self.num_rows)


def linear_cka(first: Sequence[Features], second: Sequence[Features] | None = None) -> Tensor:
    """Return linear CKA of each pair of layers, [layers, layers] in float64.

    Parameters
    ----------
    first : sequence of Features
        Layers without trouble.
    second : sequence of Features, optional
        Other layers, with the same rows; by default, the first ones again.
    """
    norms_of = _by_rows if _is_cheaper_by_rows(first, second or first) else _by_features
    cross, own, other = norms_of(first, second)
    # Rounding may exceed the range a little.
    found = (cross / (own.sqrt()[:, None] * other.sqrt())).clamp_(max=1.0)
    return found.triu() + found.triu(1).T if second is None else found


def _is_cheaper_by_rows(first: Sequence[Features], second: Sequence[Features]) -> bool:
    num_rows, widths = first[0].num_rows, [one.width for one in (*first, *second)]
    pairs = sum(one.width for one in first) * sum(one.width for one in second)
    return num_rows * (sum(widths) + len(widths) ** 2) < pairs + sum(one**2 for one in widths)


class _Norms(NamedTuple):
    """Squared norms of the products of layers with those of the other side, and with themselves."""

    cross: Tensor
    own: Tensor
    other: Tensor


def _by_rows(first: Sequence[Features], second: Sequence[Features] | None) -> _Norms:
    layers = [*first, *(second or ())]
    step = max(1, math.isqrt(_SUMS // len(layers)))
    pairs = list(combinations_with_replacement(_parts(range(first[0].num_rows), step), 2))
    norms = torch.zeros(len(layers), len(layers), dtype=torch.float64, device=first[0].device)
    with progress_bar("comparing layers", len(pairs) * len(layers)) as advance:
        for own, other in pairs:
            products = norms.new_zeros(len(layers), len(own), len(other))
            for sums, layer in zip(products, layers, strict=True):
                _add_products_of_rows(sums, layer, own, other)
                advance(0, 0)
            flat = products.flatten(1)
            norms.addmm_(flat, flat.T, alpha=1 if own == other else 2)
    count, squares = len(first), norms.diagonal()
    if second is None:
        return _Norms(norms, squares, squares)
    return _Norms(norms[:count, count:], squares[:count], squares[count:])


def _add_products_of_rows(sums: Tensor, layer: Features, own: range, other: range) -> None:
    width = max(1, _FACTORS // max(len(own), len(other)))
    for rows in _parts(own, layer.at_once):
        opened = layer.open(rows)
        for others in _parts(other, layer.at_once):
            opened_others = opened if others == rows else layer.open(others)
            place = sums[rows.start - own.start :, others.start - other.start :]
            for piece in _parts(range(layer.width), width):
                columns = slice(piece.start, piece.stop)
                left = layer.centred(opened, columns)
                right = left if others == rows else layer.centred(opened_others, columns)
                place[: len(rows), : len(others)].addmm_(left, right.T)


# Some features of a layer, and its place among the layers.
_Piece = tuple[int, Features, slice]
_Tile = list[_Piece]


def _by_features(first: Sequence[Features], second: Sequence[Features] | None) -> _Norms:
    jobs: list[tuple[Sequence[Features], Sequence[Features] | None]] = [(first, second)]
    jobs += [([one], None) for one in (*first, *(second or ())) if second is not None]
    pairs = [_pairs_of_tiles(*job) for job in jobs]
    with progress_bar("comparing layers", sum(map(len, pairs))) as advance:
        cross, *own = (
            _norms_of_features(*job, own, advance) for job, own in zip(jobs, pairs, strict=True)
        )
    if second is None:
        return _Norms(cross, cross.diagonal(), cross.diagonal())
    squares = torch.cat(own).flatten()
    return _Norms(cross, squares[: len(first)], squares[len(first) :])


def _pairs_of_tiles(
    first: Sequence[Features], second: Sequence[Features] | None
) -> list[tuple[_Tile, _Tile]]:
    tiles = list(_tiles(first))
    if second is None:
        return list(combinations_with_replacement(tiles, 2))
    return list(product(tiles, _tiles(second)))


def _norms_of_features(
    first: Sequence[Features],
    second: Sequence[Features] | None,
    pairs: Sequence[tuple[_Tile, _Tile]],
    advance: Advance,
) -> Tensor:
    shape = len(first), len(first if second is None else second)
    norms = torch.zeros(shape, dtype=torch.float64, device=first[0].device)
    for own, other in pairs:
        squares = _products_of_features(own, other).square_()
        rows = torch.split(squares, [_width(piece) for _, _, piece in own])
        for (place, _, _), row in zip(own, rows, strict=True):
            columns = torch.split(row, [_width(piece) for _, _, piece in other], 1)
            for (place_of_other, _, _), block in zip(other, columns, strict=True):
                norm = block.sum()
                norms[place, place_of_other] += norm
                # The same products stand on the other side of the diagonal.
                if second is None and own is not other:
                    norms[place_of_other, place] += norm
        advance(0, 0)
    return norms


def _products_of_features(own: Sequence[_Piece], other: Sequence[_Piece]) -> Tensor:
    num_rows = own[0][1].num_rows
    widths = [sum(_width(piece) for _, _, piece in tile) for tile in (own, other)]
    sums = torch.zeros(*widths, dtype=torch.float64, device=own[0][1].device)
    step = max(1, _FACTORS // max(widths))
    step = min(step, *(layer.at_once for _, layer, _ in (*own, *other)))
    for rows in _parts(range(num_rows), step):
        left = _factors(own, rows)
        sums.addmm_(left.T, left if other is own else _factors(other, rows))
    return sums


def _factors(tile: Sequence[_Piece], rows: range) -> Tensor:
    return torch.cat([layer.centred(layer.open(rows), piece) for _, layer, piece in tile], 1)


def _tiles(layers: Sequence[Features]) -> Iterator[_Tile]:
    """Divide the features of all layers into tiles, any two of which have a product that fits."""
    most = math.isqrt(_SUMS)
    tile: _Tile = []
    room = most
    for place, layer in enumerate(layers):
        start = 0
        while start < layer.width:
            if not room:
                yield tile
                tile, room = [], most
            piece = slice(start, min(layer.width, start + room))
            tile.append((place, layer, piece))
            room -= _width(piece)
            start = piece.stop
    if tile:
        yield tile


def _width(piece: slice) -> int:
    return int(piece.stop - piece.start)


def _parts(whole: range, step: int) -> Iterator[range]:
    return (whole[start : start + step] for start in range(0, len(whole), step))
