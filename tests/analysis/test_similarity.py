"""Linear CKA of recordings: beside the formula in float64, in any order, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scio_recorder import (
    ComparisonError,
    LayerNotFoundError,
    Recorder,
    Recording,
    Tokens,
    open_recording,
    similarity,
)
from scio_recorder.analysis import similarity as room
from scio_recorder.analysis.similarity import Similarity
from scio_recorder.reductions import Mean
from tests.zoo.base import Net

SAMPLES = torch.Generator().manual_seed(0)
IMAGES = torch.randn(90, 3, 6, 6, generator=SAMPLES) + 1


def first_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 7), nn.Sigmoid()
    )


def second_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3, stride=3), nn.Softplus(), nn.Flatten())


def recorded(net: nn.Module, samples: Tensor = IMAGES, ids: Tensor | None = None) -> Recording:
    rnet = Recorder(net.eval(), input_size=tuple(samples[:1].shape))
    rnet.record("*")
    ids = torch.arange(len(samples)) if ids is None else ids
    batches = zip(samples.split(40), ids.split(40), strict=True)
    return rnet.collect(batches, sample_ids=lambda batch: batch[1].tolist())


@pytest.fixture(scope="module")
def first() -> Recording:
    torch.manual_seed(1)
    return recorded(first_net())


@pytest.fixture(scope="module")
def second() -> Recording:
    torch.manual_seed(2)
    return recorded(second_net())


def by_formula(first: Tensor, second: Tensor) -> float:
    """CKA by its definition, with whole matrices of inner products of rows."""
    grams = []
    for values in (first, second):
        rows = values.numpy().astype(np.float64).reshape(len(values), -1)
        rows = rows - rows.mean(0)
        grams.append(rows @ rows.T)
    one, other = grams
    return float((one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum()))


def expected(first: Mapping[Any, Tensor], second: Mapping[Any, Tensor]) -> Tensor:
    found = [[by_formula(x[:], y[:]) for y in second.values()] for x in first.values()]
    return torch.tensor(found, dtype=torch.float64)


def assert_exact(found: Similarity, wanted: Tensor) -> None:
    assert found.values.dtype == torch.float64
    torch.testing.assert_close(found.values, wanted, rtol=1e-10, atol=1e-10)


FORMS = {"rows": True, "features": False}


@pytest.fixture(params=[(form, size) for form in FORMS for size in ("whole", "parts")], ids=str)
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the norm, in one block and in many of uneven sizes."""
    form, size = request.param
    monkeypatch.setattr(room, "_is_cheaper_by_rows", lambda *sides: FORMS[form])
    if size == "parts":
        monkeypatch.setattr(room, "_SUMS", 17**2 * 9)
        monkeypatch.setattr(room, "_FACTORS", 500)
        monkeypatch.setattr(room, "_READ_BYTES", 1300)


@pytest.mark.usefixtures("every_way")
def test_it_is_the_formula(first: Recording, second: Recording) -> None:
    assert_exact(similarity(first, second), expected(first, second))


@pytest.mark.usefixtures("every_way")
def test_one_recording_twice_is_symmetric(first: Recording) -> None:
    found = similarity(first, first)
    assert_exact(found, expected(first, first))
    assert found.values.equal(found.values.T)
    assert (found.values <= 1).all()


@pytest.mark.parametrize(
    "every_way",
    [
        pytest.param((form, size), marks=[pytest.mark.campaign] * (size == "whole"))
        for form in FORMS
        for size in ("whole", "parts")
    ],
    indirect=True,
    ids=str,
)
@pytest.mark.usefixtures("every_way")
def test_samples_are_paired_by_id_on_disk_too(second: Recording, tmp_path: Path) -> None:
    torch.manual_seed(1)
    order = torch.randperm(len(IMAGES))
    ids = torch.arange(len(IMAGES)) * 3
    own = recorded(first_net(), ids=ids)
    shuffled = recorded(second_net(), IMAGES[order], ids[order])
    wanted = expected(own, {key: shuffled[key][order.argsort()] for key in shuffled})
    shuffled.save(tmp_path / "run")
    assert_exact(similarity(own, shuffled), wanted)
    assert_exact(similarity(own, open_recording(tmp_path / "run")), wanted)
    assert_exact(similarity(open_recording(tmp_path / "run"), own), wanted.T)


def test_a_layer_may_have_a_large_mean_beside_its_spread() -> None:
    samples = torch.randn(200, 5, dtype=torch.float64, generator=SAMPLES)
    # Exact shifts: whole multiples of a power of two, beside values of few digits.
    samples = (samples * 2**12).round() / 2**12
    shifted = samples + 2.0**24
    nets = [recorded(nn.Identity(), one) for one in (samples, shifted, samples.abs())]
    near, far = similarity(nets[0], nets[2]), similarity(nets[1], nets[2])
    torch.testing.assert_close(near.values, far.values, rtol=1e-10, atol=0)
    assert similarity(nets[0], nets[1]).values.item() == pytest.approx(1.0, abs=1e-12)


def test_rounding_makes_nothing_of_a_feature_that_is_constant(second: Recording) -> None:
    samples = torch.randn(90, 5, dtype=torch.float64, generator=SAMPLES) * 1e-9
    wanted = expected({"0-1": samples[:, 1:]}, second)
    samples[:, 0] = 1e8 / 3
    assert_exact(similarity(recorded(nn.Identity(), samples), second), wanted)


@pytest.mark.parametrize("factor", [2.0**-1030, 1e-120, 1e120], ids=str)
def test_the_scale_of_a_layer_does_not_count(factor: float) -> None:
    samples = torch.randn(30, 5, dtype=torch.float64, generator=SAMPLES)
    other = recorded(nn.Identity(), samples.abs())
    wanted = similarity(recorded(nn.Identity(), samples), other).values
    found = similarity(recorded(nn.Identity(), samples * factor), other).values
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_of_any_dtype(dtype: torch.dtype, second: Recording) -> None:
    samples = (torch.rand(90, 4, generator=SAMPLES) * 3).floor().to(dtype)
    own = recorded(nn.Identity(), samples)
    wanted = expected({"0-1": samples.double()}, second)
    assert_exact(similarity(own, second), wanted)


def test_parts_of_complex_numbers_are_features(second: Recording) -> None:
    samples = torch.randn(90, 4, dtype=torch.complex64, generator=SAMPLES)
    wanted = expected({"0-1": torch.cat([samples.real, samples.imag], 1)}, second)
    assert_exact(similarity(recorded(nn.Identity(), samples), second), wanted)


def tokens(order: list[int], lengths: Tensor, values: Tensor) -> Recording:
    """Collect texts in some order, padded on the left or right by turns."""
    # In double precision: a product may be rounded otherwise in a batch of another size.
    rnet = Recorder(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), input_size=(1, 6, 3))
    rnet.record("0", "1")
    batches = []
    for number, texts in enumerate(torch.tensor(order).split(2)):
        mask = torch.arange(6) < lengths[texts, None]
        batch = values[texts].clone()
        batch[~mask] = 1e9
        if number % 2:
            mask, batch = mask.flip(1), batch.flip(1)
            # Positions rise from left to right on this side too.
            for row, length in enumerate(lengths[texts].tolist()):
                batch[row, 6 - length :] = batch[row, 6 - length :].flip(0)
        batches.append({"input": batch, "attention_mask": mask, "id": texts})
    return rnet.collect(
        batches,
        rows=Tokens(),
        to_inputs=lambda batch: batch["input"],
        sample_ids=lambda batch: [f"text {one}" for one in batch["id"].tolist()],
    )


def test_tokens_are_paired_by_sample_and_position() -> None:
    lengths = torch.tensor([3, 6, 1, 4, 2])
    values = torch.randn(5, 6, 3, dtype=torch.float64, generator=SAMPLES)
    torch.manual_seed(3)
    own = tokens([0, 1, 2, 3, 4], lengths, values)
    torch.manual_seed(3)
    shuffled = tokens([4, 2, 0, 3, 1], lengths, values)
    found = similarity(own, shuffled)
    assert found.num_rows == int(lengths.sum())
    assert_exact(found, expected(own, own))

    lost = tokens([4, 2, 0, 3, 1], lengths - (lengths == 6).long(), values)
    with pytest.raises(
        ComparisonError, match=r"1 row of those that recording_a has.*\('text 1', 5\)"
    ):
        similarity(own, lost)
    with pytest.raises(ComparisonError, match=r"parts of samples.*are samples"):
        similarity(own, recorded(nn.Identity()))


class Largest(TorchDispatchMode):
    """Looks how many bytes the largest tensor has that is made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tensors(args)}
        for one in tensors(result):
            if one.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, one.nbytes)
        return result


def tensors(values: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, Tensor))


def test_no_matrix_is_there_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # The layers are too wide for their products with each other.
    monkeypatch.setattr(room, "_WIDEST", 200)
    monkeypatch.setattr(room, "_SUMS", 1 << 14)
    monkeypatch.setattr(room, "_FACTORS", 1 << 13)
    monkeypatch.setattr(room, "_READ_BYTES", 1 << 14)
    wide = recorded(nn.Identity(), torch.randn(450, 300, generator=SAMPLES))
    other = recorded(nn.Identity(), torch.randn(450, 250, generator=SAMPLES))
    wanted = expected(wide, other)
    with Largest() as largest:
        found = similarity(wide, other)
    assert_exact(found, wanted)
    assert largest.num_bytes <= 8 << 14


def test_the_cheaper_form_is_chosen(first: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for name in ("_by_rows", "_by_features"):
        form = getattr(room, name)
        monkeypatch.setattr(
            room, name, lambda *sides, form=form, name=name: chosen.append(name) or form(*sides)
        )
    similarity(first, first)  # 90 rows, and up to 64 features in each of six layers
    similarity(*[recorded(nn.Identity(), IMAGES[:5])] * 2)
    similarity(*[recorded(nn.Identity(), torch.randn(900, 4))] * 2)
    assert chosen == ["_by_rows", "_by_rows", "_by_features"]


def test_where_it_is_undefined_it_is_nan_and_says_why(second: Recording) -> None:
    samples = torch.randn(90, 4, generator=SAMPLES)
    spoilt = samples.clone()
    spoilt[7, 1] = torch.nan
    rnet = Recorder(nn.Sequential(*(nn.Identity() for _ in range(3))), input_size=(1, 4))
    rnet.record("0", "1", "2")
    # In float64 the mean of many tenths is none.
    own = rnet.collect(
        [samples],
        transform={"0": lambda x, _: torch.full_like(x, 0.1), "1": lambda x, _: spoilt},
    )
    found = similarity(own, second)
    assert found.values[:2].isnan().all()
    torch.testing.assert_close(
        found.values[2:], expected({"1-3": samples}, second), rtol=1e-10, atol=1e-10
    )
    assert found.notes == (
        "1-1 0 (Identity) of recording_a is the same in all rows",
        "1-2 1 (Identity) of recording_a has values that are not finite, or spread beyond float64",
    )
    assert all(note in str(found) for note in found.notes)
    found.plot().savefig("/dev/null", format="png")


def test_values_at_the_limit_of_float64_are_no_number() -> None:
    rnet = Recorder(nn.Sequential(nn.Identity()), input_size=(1, 1), verbose=0)
    rnet.record("0")
    recording = rnet.collect([torch.tensor([[-1.7e308], [1.7e308]], dtype=torch.float64)])
    found = similarity(recording, recording)
    assert found.values.isnan().all()
    assert "spread beyond float64" in str(found)


def test_what_can_not_be_compared(first: Recording, second: Recording) -> None:
    ids = torch.arange(90) + 1000
    with pytest.raises(ComparisonError, match=r"90 samples.*: 0, 1, 2, 3, 4 and"):
        similarity(first, recorded(second_net(), ids=ids))
    ids[:88] = torch.arange(88)
    with pytest.raises(ComparisonError, match=r"2 samples.* from recording_b: 88.*89\. "):
        similarity(first, recorded(second_net(), ids=ids))
    with pytest.raises(ValueError, match=r"30 samples of those that recording_b has"):
        similarity(recorded(second_net(), IMAGES[:60]), second)
    alone = similarity(*[recorded(second_net(), IMAGES[:1])] * 2)
    assert alone.values.isnan().all()
    assert "is the same in all rows" in str(alone)
    rnet = Recorder(second_net(), input_size=(1, 3, 6, 6))
    with pytest.raises(ComparisonError, match=r"recording_b is of type Recorder"):
        similarity(first, rnet)  # type: ignore[arg-type]  # that is the mistake
    rnet.record("*")
    with pytest.raises(ComparisonError, match=r"recording_b.*reduced"):
        similarity(first, rnet.collect([IMAGES], reduce=Mean()))


def test_layers_are_chosen_as_in_record(first: Recording, second: Recording) -> None:
    whole = similarity(first, second)
    chosen = similarity(first, second, layers=["0", (1, 2)])
    assert [layer.name for layer in chosen.layers_a] == ["0", "1"]
    assert [layer.name for layer in chosen.layers_b] == ["0", "1"]
    torch.testing.assert_close(chosen.values, whole.values[:2, :2], rtol=1e-12, atol=0)
    assert similarity(first, second, layers=(1, 2)).values.shape == (1, 1)
    assert similarity(first, second, layers=nn.Flatten).values.shape == (1, 1)
    with pytest.raises(LayerNotFoundError):
        similarity(first, second, layers="3")
    rnet = Recorder(first_net(), input_size=(1, 3, 6, 6))
    rnet.record("*")
    partly = rnet.collect([IMAGES], reduce={"0": Mean()})
    assert similarity(partly, first).values.shape == (5, 6)
    with pytest.raises(ComparisonError, match=r"recording_a.*no rows of 1-1 0"):
        similarity(partly, first, layers="0")


def test_frame_and_figure_have_names(first: Recording, second: Recording) -> None:
    found = similarity(first, second)
    frame = found.to_frame()
    # Containers return last.
    assert list(frame.index) == ["0", "1", "2", "3", "4", "(root)"]
    assert frame.loc["3", "2"] == found.values[3, 2]
    axis = found.plot().axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "1", "2", "(root)"]
    assert [label.get_text() for label in axis.get_yticklabels()] == [*"01234", "(root)"]
    drawn = axis.images[0].get_array()
    assert drawn[3, 1] == found.values[3, 1]
    assert str(found) == "Linear CKA of 6 x 4 layers over 90 rows"


def test_calls_of_one_module_have_names_of_their_own() -> None:
    def twice(net: Any, x: Tensor) -> Tensor:
        return net.act(net.act(x))

    found = similarity(*[recorded(Net(twice, act=nn.Tanh()), torch.randn(9, 3))] * 2)
    assert list(found.to_frame().columns) == ["act", "act (call 2)", "(root)"]


def test_names_are_drawn_as_they_are() -> None:
    net = nn.Sequential()
    net.add_module("<script>alert(1)</script>", nn.Identity())
    found = similarity(*[recorded(net, torch.randn(9, 3))] * 2)
    found.plot().savefig("/dev/null", format="png")
