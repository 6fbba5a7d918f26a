"""Torch's own modules, and outputs of every dtype and layout."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.zoo.base import Inputs, Net, Table, generator, images, linear, sequences, vectors
from tests.zoo.base import random_tensors as tensors

CASES = Table()


def _recurrent(cell: nn.Module) -> nn.Module:
    def pack(_: Any, x: Tensor) -> PackedSequence:
        return pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)

    def unpack(_: Any, packed: PackedSequence) -> Tensor:
        return pad_packed_sequence(packed, batch_first=True)[0]

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(net.unpack(net.cell(net.pack(x))[0]))

    return Net(forward, pack=Net(pack), cell=cell, unpack=Net(unpack), last=nn.Linear(6, 3))


@CASES.add(sequences)
def lstm_packed() -> nn.Module:
    return _recurrent(nn.LSTM(8, 6, num_layers=2, batch_first=True))


@CASES.add(sequences)
def gru_packed() -> nn.Module:
    return _recurrent(nn.GRU(8, 3, bidirectional=True, batch_first=True))


@CASES.add(images)
def batch_norm() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.SiLU(inplace=True), nn.BatchNorm2d(4))


@CASES.add(images)
def batch_norm_cumulative() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.InstanceNorm2d(3))


@CASES.add(vectors)
def dropout() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.3, inplace=True))


@CASES.add(vectors)
def random_noise() -> nn.Module:
    return Net(lambda net, x: net.last(x + torch.randn_like(x)), last=linear())


@CASES.add(vectors)
def weight_norm_parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(linear()), nn.ReLU(inplace=True))


@CASES.add(vectors)
def spectral_norm_parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(linear()), linear())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@CASES.add(vectors)
def own_parametrization() -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, layer)


@CASES.add(vectors)
def spectral_norm_hook() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(linear()), nn.ReLU())


class OldWeightNorm(nn.Module):
    """What `torch.nn.utils.weight_norm` does: a non-leaf weight that a pre-hook computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        weight = self.inner.weight
        del self.inner._parameters["weight"]
        self.inner.register_parameter("weight_v", nn.Parameter(weight.data))
        self.inner.register_parameter("weight_g", nn.Parameter(weight.data.norm(dim=1)[:, None]))
        self.inner.register_forward_pre_hook(type(self)._compute)
        self._compute(self.inner, ())

    @staticmethod
    def _compute(inner: Any, _: Any) -> None:
        inner.weight = inner.weight_v * (inner.weight_g / inner.weight_v.norm(dim=1)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@CASES.add(vectors)
def weight_norm_hook() -> nn.Module:
    return nn.Sequential(OldWeightNorm(), nn.ReLU(inplace=True))


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


@CASES.add(sequences, hooks_change_kernel=True)
def transformer_encoder() -> nn.Module:
    return nn.TransformerEncoder(_encoder_layer(), 2)


@CASES.add(sequences)
def transformer_decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return Net(lambda net, x: net.decoder(x, x + 1), decoder=nn.TransformerDecoder(layer, 1))


@CASES.add(sequences)
def multihead_attention() -> nn.Module:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Net(lambda net, x: net.attention(x, x, x)[0], attention=attention)


@CASES.add(sequences)
def multihead_attention_without_weights() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.attention(x, x, x, need_weights=False)[0]

    return Net(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True))


def _token_ids(seed: int) -> Inputs:
    return (torch.randint(0, 10, (2, 5), generator=generator(seed)),), {}


@CASES.add(_token_ids)
def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.LayerNorm(4), linear())


@CASES.add(_token_ids)
def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(10, 4), linear())


@CASES.add(vectors, autocast=False)
def integer_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        best = net.best(hidden)
        best.add_(1).clamp_(max=3)
        return net.last(hidden)[torch.arange(3), best]

    return Net(forward, first=linear(), best=Net(lambda _, x: x.argmax(-1)), last=linear())


@CASES.add(vectors)
def boolean_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        mask = net.mask(x)
        result = net.last(x) * mask.float()
        mask.logical_not_()
        return result

    return Net(forward, mask=Net(lambda _, x: x > 0), last=linear())


@CASES.add(tensors((3, 4), dtype=torch.complex64), autocast=False)
def complex_numbers() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.scale(x)
        return net.conjugate(hidden).mul(hidden).real

    weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    scale = Net(lambda net, x: x * net.weight, weight=weight)
    return Net(forward, scale=scale, conjugate=Net(lambda _, x: x.conj()))


@CASES.add(tensors((3, 4), dtype=torch.float64), autocast=False)
def double_precision() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear()).double()


@CASES.add(tensors((3, 4), dtype=torch.bfloat16))
def bfloat16() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear()).bfloat16()


@CASES.add(tensors((0, 4)))
def empty_batch() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear())


@CASES.add(tensors(()), autocast=False)
def scalars() -> nn.Module:
    weight = nn.Parameter(torch.tensor(2.0))
    scale = Net(lambda net, x: x * net.weight, weight=weight)
    return nn.Sequential(scale, nn.ReLU(inplace=True), nn.Tanh())


@CASES.add(vectors)
def not_a_number() -> nn.Module:
    return nn.Sequential(linear(), Net(lambda _, x: x.sub(1).log()), nn.ReLU(inplace=True))


@CASES.add(vectors, autocast=False)
def sparse_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.sparse.mm(net.sparse(net.first(x)), net.weight)

    sparse = Net(lambda _, x: x.relu().to_sparse())
    return Net(forward, first=linear(), sparse=sparse, weight=nn.Parameter(torch.randn(4, 2)))


@CASES.add(vectors, autocast=False)
def sparse_rows_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.sparse(net.first(x)).to_dense() + net.last(x)

    with warnings.catch_warnings():
        # torch says once in a process that this layout is young.
        warnings.simplefilter("ignore")
        torch.eye(2).to_sparse_csr()
    sparse = Net(lambda _, x: x.detach().relu().to_sparse_csr())
    return Net(forward, first=linear(), sparse=sparse, last=linear())


class Tagged(Tensor):
    """A tensor of another class, as libraries return."""


@CASES.add(vectors)
def tensor_subclass_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        tagged = net.tag(net.first(x))
        tagged.mul_(2)
        return net.last(tagged.as_subclass(Tensor))

    tag = Net(lambda _, x: (x * 1).as_subclass(Tagged))
    return Net(forward, first=linear(), tag=tag, last=linear())


@CASES.add(images)
def channels_last() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3)
    return nn.Sequential(conv, nn.ReLU(inplace=True)).to(memory_format=torch.channels_last)


@CASES.add(images)
def many_kinds_of_layers() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Hardswish(inplace=True))
    pool = nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.PixelShuffle(2))
    return nn.Sequential(first, pool, nn.AvgPool2d(2), nn.LeakyReLU(inplace=True), nn.Flatten())
