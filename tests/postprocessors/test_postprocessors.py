"""Post-processors against torch written out by hand, and errors for what can't work."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors import (
    Ablate,
    Add,
    At,
    Clip,
    GaussianNoise,
    Heads,
    OnInput,
    Replace,
    Scale,
)
from tests.harness import recorder

SHAPE = (2, 3, 4)


class Output(NamedTuple):
    hidden: Tensor
    positions: Tensor
    rest: dict[str, Any]


def activation(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seeded_noise(std: float) -> GaussianNoise:
    return GaussianNoise(std, torch.Generator().manual_seed(7))


def ablated(x: Tensor) -> Tensor:
    keep = torch.tensor([0.0, 1.0, 0.0], dtype=x.dtype).reshape(1, 3, 1)
    return x * keep + (1 - keep) * 2.0


def noisy(x: Tensor) -> Tensor:
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7), dtype=x.dtype)
    return x + 0.25 * noise


def nested(*lengths: int, features: int = 3) -> Tensor:
    parts = [torch.randn(length, features) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


DIRECTION = torch.tensor([1.0, -2.0, 0.5, 4.0])
# Factors that are powers of two: the expected values are exact in every dtype.
CASES = {
    "clip": (lambda: Clip(0.5), lambda x: torch.where(x > 0.5, torch.full_like(x, 0.5), x)),
    "clip both": (
        lambda: Clip(0.5, min=-0.25),
        lambda x: torch.minimum(torch.maximum(x, torch.tensor(-0.25)), torch.tensor(0.5)).to(x),
    ),
    "clip below": (lambda: Clip(None, min=0), lambda x: torch.relu(x)),
    "scale": (lambda: Scale(-2), lambda x: -(x + x)),
    "ablate": (lambda: Ablate([0, -1], value=2), ablated),
    "add": (lambda: Add(DIRECTION, 0.5), lambda x: x + (DIRECTION / 2).to(x)),
    "replace": (lambda: Replace(activation(seed=3)), lambda x: activation(seed=3).to(x)),
    "noise": (lambda: seeded_noise(0.25), noisy),
}


def cases(*, without: str = "") -> pytest.MarkDecorator:
    chosen = {name: case for name, case in CASES.items() if name not in without.split()}
    return pytest.mark.parametrize(("make", "by_hand"), chosen.values(), ids=chosen)


@cases()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_result_and_dtype(make: Any, by_hand: Any, dtype: torch.dtype) -> None:
    x = activation(dtype)
    before = x.clone()
    result = make()(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result, by_hand(x), rtol=0, atol=0)
    assert torch.equal(x, before), "worked in place"
    assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@cases(without="replace")
def test_gradient_flows(make: Any, by_hand: Any) -> None:
    x = activation(torch.float64).requires_grad_()
    reference = activation(torch.float64).requires_grad_()
    weights = activation(torch.float64, seed=5)
    (make()(x) * weights).sum().backward()
    (by_hand(reference) * weights).sum().backward()
    assert torch.equal(x.grad, reference.grad)


def test_gradient_reaches_what_is_added_and_what_replaces() -> None:
    direction = DIRECTION.clone().requires_grad_()
    Add(direction, 2.0)(activation()).sum().backward()
    assert torch.equal(direction.grad, torch.full((4,), 2.0 * 2 * 3))
    other = activation(seed=1).requires_grad_()
    Replace(other)(activation()).sum().backward()
    assert torch.equal(other.grad, torch.ones(SHAPE))


def test_replacement_survives_what_the_net_does_in_place() -> None:
    kept = activation(seed=1)
    before = kept.clone()
    nn.ReLU(inplace=True)(Replace(kept)(activation()))
    assert torch.equal(kept, before)


@cases(without="replace")  # which takes whole structures, and has a test of its own
def test_structure_is_mapped_and_the_rest_kept(make: Any, by_hand: Any) -> None:
    x, positions = activation(), torch.arange(3)
    result = make()(Output(x, positions, {"name": "row", "none": None}))
    assert isinstance(result, Output)
    torch.testing.assert_close(result.hidden, by_hand(x), rtol=0, atol=0)
    assert result.positions is positions
    assert result.rest == {"name": "row", "none": None}


def test_a_parameter_replaces_a_tensor() -> None:
    learned = nn.Parameter(activation(seed=1))
    assert torch.equal(Replace(learned)(activation()), learned)


def test_replace_takes_a_structure() -> None:
    new = Output(activation(seed=1), torch.tensor([2, 1, 0]), {"deep": torch.zeros(1)})
    old = Output(activation(), torch.arange(3), {"deep": torch.ones(1)})
    result = Replace(new)(old)
    assert isinstance(result, Output)
    assert torch.equal(result.hidden, new.hidden)
    assert torch.equal(result.positions, new.positions)
    assert torch.equal(result.rest["deep"], torch.zeros(1))


@cases()
def test_pickle_and_copy(make: Any, by_hand: Any) -> None:
    for clone in (pickle.loads(pickle.dumps(make())), copy.deepcopy(make())):
        torch.testing.assert_close(clone(activation()), by_hand(activation()), rtol=0, atol=0)


@pytest.mark.campaign
def test_structures_compile_too() -> None:
    compiled = torch.compile(Clip(0.5).__call__, fullgraph=True, backend="aot_eager")
    x = activation()
    result, rest = compiled((x, {"deep": x + 1, "count": torch.arange(2)}))
    assert torch.equal(result, x.clamp(max=0.5))
    assert torch.equal(rest["deep"], (x + 1).clamp(max=0.5))
    assert torch.equal(rest["count"], torch.arange(2))


@pytest.mark.campaign
def test_global_noise_compiles_and_follows_the_seed() -> None:
    noise = GaussianNoise(0.5)
    compiled = torch.compile(noise.__call__, fullgraph=True, backend="aot_eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = compiled(torch.zeros(SHAPE))
        torch.manual_seed(0)
        assert torch.equal(result, 0.5 * torch.randn(SHAPE))


def test_noise_has_the_spread_asked_for() -> None:
    noise = seeded_noise(3.0)
    drawn = noise(torch.full((100_000,), 10.0)) - 10
    # Five standard errors of the mean and of the deviation.
    assert abs(drawn.mean()) < 5 * 3 / 100_000**0.5
    assert abs(drawn.std() - 3) < 5 * 3 / 200_000**0.5
    assert not torch.equal(noise(torch.zeros(4)), noise(torch.zeros(4)))


def test_own_generator_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    seeded_noise(1.0)(torch.zeros(8))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "channels", [1, np.int64(1), [1], (1,), range(1, 2), torch.tensor([1]), torch.tensor(1)]
)
def test_channels_in_any_form(channels: Any) -> None:
    assert torch.equal(Ablate(channels)(torch.ones(1, 3)), torch.tensor([[1.0, 0.0, 1.0]]))
    assert torch.equal(Ablate(channels, dim=0)(torch.ones(2, 1)), torch.tensor([[1.0], [0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ablate_without_channels_is_everything(dtype: torch.dtype) -> None:
    x = activation(dtype).requires_grad_()
    result = Ablate(value=2)(x)
    assert torch.equal(result, torch.full(SHAPE, 2.0, dtype=dtype))
    result.sum().backward()
    assert torch.equal(x.grad, torch.zeros(SHAPE, dtype=dtype))
    assert torch.equal(Ablate()(torch.tensor(5.0)), torch.tensor(0.0))


def test_what_treats_every_number_alike_takes_jagged_tensors() -> None:
    for part in Ablate(value=1)(nested(2, 4)).unbind():
        assert torch.equal(part, torch.ones_like(part))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Clip(None), ["Clip(max)"]),
        (lambda: Clip("high"), ["max", "'high'"]),
        (lambda: Clip(float("nan")), ["max", "nan"]),
        (lambda: Clip(0, min=1), ["min=1.0", "max=0.0", "Clip(1.0, min=0.0)"]),
        (lambda: Clip(torch.ones(3)), ["one number", "(3,)"]),
        (lambda: Scale(float("inf")), ["factor", "finite"]),
        (lambda: Scale(1j), ["factor", "1j"]),
        (lambda: Ablate([]), ["no channels"]),
        (lambda: Ablate([0.5]), ["channels", "0.5"]),
        (lambda: Ablate(torch.tensor([True, False])), ["mask", "nonzero"]),
        (lambda: Ablate(0, dim="features"), ["dim", "'features'"]),
        (lambda: Ablate(0, value=None), ["value", "None"]),
        (lambda: Add(1.0), ["direction", "torch.tensor"]),
        (lambda: Add(torch.arange(3)), ["direction", "int64"]),
        (lambda: Add(torch.ones(3), None), ["coefficient", "None"]),
        (lambda: Replace(None), ["Replace", "None"]),
        (lambda: GaussianNoise(-1), ["std=-1.0", "negative"]),
        (lambda: GaussianNoise("some"), ["std", "'some'"]),
        (lambda: GaussianNoise(1, 0), ["Generator", "manual_seed"]),
        (lambda: At(0, 1.0), ["At", "1.0", "Tensor -> Tensor"]),
        (lambda: At(0.5, abs), ["index", "0.5"]),
        (lambda: At("all", abs), ["index", "'all'"]),
        (lambda: At([0.5], abs), ["list", "integers, booleans or slices"]),
        (lambda: At([0, slice(2)], abs), ["tuple"]),
        (lambda: At(torch.ones(2), abs), ["float32"]),
        (lambda: At(torch.ones(2, dtype=torch.uint8), abs), ["uint8"]),
        (lambda: Heads(3, 1, None), ["Heads", "None"]),
        (lambda: Heads(3, 3, abs), ["[3]", "num_heads=3"]),
        (lambda: Heads(3, [0, -3], abs), ["[0, -3]", "once"]),
        (lambda: Heads(0, [0], abs), ["num_heads=0"]),
        (lambda: Heads(3, [], abs), ["no heads"]),
        (lambda: Heads(3, [True, False, False], abs), ["mask", "nonzero"]),
        (lambda: Heads("12", 0, abs), ["num_heads", "'12'"]),
    ],
)
def test_arguments_that_cannot_work(make: Any, words: list[str]) -> None:
    with pytest.raises(PostprocessorError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("postprocessor", "received", "words"),
    [
        (Clip(1), torch.arange(3), ["Clip(max=1.0", "int64", "activation_postproc={"]),
        (Scale(1), (None, "text"), ["tuple"]),
        (Ablate(3), torch.ones(SHAPE), ["(2, 3, 4)", "[3]", "3 channels"]),
        (Ablate(-4), torch.ones(SHAPE), ["[-4]"]),
        (Ablate(0), torch.ones(3), ["no dimension 1", "dim=..."]),
        (Add(torch.ones(3)), torch.ones(SHAPE), ["(3,)", "(2, 3, 4)", "direction[:, None, None]"]),
        (Add(torch.ones(5, 2, 3, 4)), torch.ones(SHAPE), ["(5, 2, 3, 4)"]),
        (Add(torch.ones(2)), torch.ones(1), ["(2,)", "(1,)"]),
        (Replace(torch.ones(2)), torch.ones(3), ["(2,)", "(3,)", "expand"]),
        (Replace(torch.ones(2)), torch.ones(2, dtype=torch.int64), ["int64"]),
        (Replace(torch.ones(2)), (torch.ones(2),), ["tuple", "whole structure"]),
        (Replace((torch.ones(2), torch.ones(1))), (torch.ones(2),), ["whole structure"]),
        (At(2, abs), torch.ones(2), ["(2,)", "no such part", "out of"]),
        (At((0, 0, 0), abs), torch.ones(2, 2), ["(2, 2)", "no such part"]),
        (At([0, 0], abs), torch.ones(2), ["twice"]),
        (At([0, -2], abs), torch.ones(2), ["twice"]),
        (At(0, lambda part: part.sum()), torch.ones(2, 3), ["(3,)", "()", "same shape"]),
        (At(0, lambda part: part.double()), torch.ones(2, 3), ["float32", "float64", "dtype"]),
        (At(0, lambda part: "text"), torch.ones(2, 3), ["'text'"]),
        (At(0, Clip(1)), torch.arange(3), ["Clip", "int64"]),
        (At(0, Scale(1)), (None, "text"), ["At", "tuple"]),
        (At(0, Replace(torch.ones(2))), torch.ones(2, 3), ["Replace", "(2,)", "(3,)"]),
        (At(0, Scale(1)), nested(1, 2), ["At", "nested"]),
        (Heads(4, 0, abs), torch.ones(2, 6), ["(2, 6)", "4 heads"]),
        (Heads(1, 0, abs), torch.tensor(1.0), ["()", "1 heads"]),
        (Heads(3, 0, abs), nested(1, 2), ["Heads", "nested", "unbind"]),
        (Ablate(0, dim=-1), nested(1, 2), ["Ablate", "nested", "unbind"]),
    ],
)
def test_activations_that_do_not_fit(postprocessor: Any, received: Any, words: list[str]) -> None:
    with pytest.raises(PostprocessorError) as caught:
        postprocessor(received)
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Structured(nn.Module):
    """Returns a structure from its first module, and goes on with the tensor in it."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(x * 2, torch.arange(2), {})

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x).hidden) + 1


@pytest.fixture(params=["eager", pytest.param("compiled", marks=pytest.mark.campaign)])
def runs(request: pytest.FixtureRequest) -> tuple[Recorder, Any]:
    """A recorder, and what runs it."""
    rnet = recorder(Structured(), "inner", input_size=SHAPE)
    if request.param == "eager":
        return rnet, rnet
    # Hooks have one code, whose compiled forms are counted and limited.
    torch.compiler.reset()
    return rnet, torch.compile(rnet, fullgraph=True, backend="aot_eager")


@cases(without="replace noise")
def test_in_a_recorder(runs: tuple[Recorder, Any], make: Any, by_hand: Any) -> None:
    rnet, run = runs
    x = activation()
    result = run(x, activation_postproc=make())
    torch.testing.assert_close(result, by_hand(x * 2).relu() + 1, rtol=0, atol=0)
    assert torch.equal(rnet.activations["inner"].hidden, x * 2)


def test_patching_in_a_recorder(runs: tuple[Recorder, Any]) -> None:
    rnet, run = runs
    clean = rnet(activation(seed=1))
    kept = rnet.activations["inner"]
    for _ in range(2):  # the kept record must survive the in-place ReLU of the first pass
        assert torch.equal(run(activation(), activation_postproc=Replace(kept)), clean)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@cases()
def test_device_is_kept(make: Any, by_hand: Any) -> None:
    result = make()(activation().cuda())
    assert result.device.type == "cuda"
    torch.testing.assert_close(result.cpu(), by_hand(activation()), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("form", ["tensor", "tuple", "input", "in place"])
def test_dimension_0_keeps_its_length(form: str, rows: int) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x, x[:, :1]) if form == "tuple" else x.clone()

    def other(value: Any) -> Any:
        if form == "in place":
            value.resize_(rows, 2)
            return None
        index = torch.arange(rows) % 3
        return (value[0], value[1][index]) if form == "tuple" else value[index]

    rnet = recorder(nn.Sequential(Pair()), "0", input_size=(1, 2))
    with pytest.raises(PostprocessorError, match=rf"layer 1-1 0.*shape \({rows}, .*returns \(3, "):
        rnet(torch.ones(3, 2), activation_postproc=OnInput(other) if form == "input" else other)
    assert len(rnet.activations) == 0


def to_float64(tensor: Tensor) -> Tensor:
    return tensor.double()


def to_one_column(tensor: Tensor) -> Tensor:
    return tensor[:, :1]


@pytest.mark.parametrize(
    ("change", "words"),
    [(to_float64, "torch.float32 to torch.float64"), (to_one_column, "the shape (3, 2) to (3, 1)")],
)
def test_what_the_network_can_not_take_is_named(change: Any, words: str) -> None:
    rnet = recorder(nn.Sequential(nn.Identity(), nn.Linear(2, 2)), "0", input_size=(1, 2))
    with pytest.raises(RuntimeError) as caught:
        rnet(torch.ones(3, 2), activation_postproc=change)
    (note,) = (note for note in caught.value.__notes__ if "had changed" in note)
    assert f"{change.__name__} of layer 1-1 0 (Identity)" in note
    assert words in note


def test_other_dimensions_may_change() -> None:
    rnet = recorder(nn.Sequential(nn.Identity(), nn.Flatten()), "0", input_size=(1, 2, 2))
    out = rnet(torch.ones(3, 2, 2), activation_postproc=lambda tensor: tensor[:, :1])
    assert out.shape == (3, 2)
