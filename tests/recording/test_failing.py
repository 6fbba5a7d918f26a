"""An error in a collection says which batch it was and where, and is caught as what was raised."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Nodes, Recorder, Tokens, compare
from scio_recorder.errors import CollectError, LabellingError, PostprocessorError, caught_as
from scio_recorder.reductions import Fold, Mean
from tests.oracle import same_bits
from tests.recording.nets import recorder_of

GOOD, BAD = torch.ones(3, 4), torch.ones(3, 5)


class OwnError(Exception):
    """Wants two arguments, as errors of other libraries do."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if (mask is not None) and mask.ndim == 3:
            raise OwnError(7, "three dimensions")
        out: Tensor = self.twice(self.twice(self.stem(x)))
        return out


@pytest.fixture(scope="module")
def rnet() -> Recorder:
    return recorder_of(Named(), "stem", input_size=(1, 4))


def divide(*given: Any) -> Any:
    return len(given) / 0


def raising(*good: Tensor, error: Exception) -> Iterator[Tensor]:
    yield from good
    raise error


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"batches": [GOOD, BAD]}, RuntimeError, ["batch 1", "layer 1-1 stem (Linear)", "[3, 5]"]),
        ({"batches": [GOOD.double()]}, RuntimeError, ["batch 0", "float64", "to_inputs=lambda"]),
        ({"batches": [{"x": GOOD, "y": 1}]}, TypeError, ["batch 0", "no 'y'", "to_inputs=lambda"]),
        ({"batches": [{"mask": GOOD}]}, TypeError, ["batch 0", "'x'", "to_inputs=lambda"]),
        (
            {"batches": [{"x": GOOD, "mask": GOOD[None]}]},
            OwnError,
            ["batch 0", "layer 0-1", "mask="],
        ),
        ({"batches": raising(GOOD, error=OwnError(7, "gone"))}, OwnError, ["loader", "batch 1"]),
        (
            {"batches": raising(error=FileNotFoundError(2, "No such file", "a.png"))},
            FileNotFoundError,
            ["loader", "batch 0", "a.png"],
        ),
        ({"batches": [[GOOD]], "to_inputs": lambda b: b[1]}, IndexError, ["to_inputs", "batch 0"]),
        ({"batches": [GOOD], "sample_ids": lambda b: 1 / 0}, ZeroDivisionError, ["sample_ids"]),
        ({"batches": [GOOD], "transform": lambda a, b: 1 / 0}, ZeroDivisionError, ["1-1 stem"]),
        ({"rows": Tokens(mask=divide)}, ZeroDivisionError, ["batch 0: mask of rows= raised"]),
        ({"rows": Tokens(fields={"word": divide})}, ZeroDivisionError, ["0: the field 'word' of"]),
        ({"rows": Tokens(where=divide)}, ZeroDivisionError, ["batch 0: where of rows= raised"]),
        ({"rows": Nodes(sample=divide)}, ZeroDivisionError, ["batch 0: sample of rows= raised"]),
        ({"reduce": Mean(by=divide)}, ZeroDivisionError, ["by= raised"]),
        ({"reduce": Fold(divide)}, ZeroDivisionError, ["Fold(", "of layer 1-1 stem", "raised"]),
        ({"batches": [GOOD, "text"]}, CollectError, ["batch 1 is a str", "to_inputs="]),
    ],
)
def test_it_names_the_batch_and_the_place(
    rnet: Recorder, options: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        rnet.collect(**{"batches": [GOOD], **options})
    error = caught.value
    assert isinstance(error, CollectError)
    for word in words:
        assert word in str(error)
    if kind is not CollectError:
        assert type(error.__cause__) is kind
        assert kind is TypeError or str(error.__cause__) in str(error)
        where = f"{error} {getattr(error, '__notes__', '')}"
        assert "batch 0" in where or "batch 1" in where
    if kind is OwnError:
        assert error.code == 7  # type: ignore[attr-defined]  # of the class made for this error


def test_a_module_that_runs_several_times_is_named_without_its_call(rnet: Recorder) -> None:
    rnet.net.twice.forward = lambda x: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError, match=r"batch 0: layer twice \(Linear\) raised"):
            rnet.collect([GOOD])
    finally:
        del rnet.net.twice.forward


def test_a_comparison_names_the_batch(rnet: Recorder) -> None:
    with pytest.raises(RuntimeError, match=r"batch 1: layer 1-1 stem"):
        compare(rnet, Recorder(Named(), input_size=(1, 4)), [GOOD, BAD])


def test_what_our_own_errors_say_stands_with_the_batch_as_a_note(rnet: Recorder) -> None:
    with pytest.raises(PostprocessorError) as caught:
        rnet.collect([GOOD], activation_postproc=lambda tensor: tensor[:1])
    assert caught.value.__notes__ == ["This happened in batch 0."]


class OddError(Exception):
    def __new__(cls, *given: object) -> OddError:
        raise RuntimeError("no second one")


@pytest.mark.parametrize("make", [lambda: KeyError("image"), lambda: OSError(5, "Input/output")])
def test_both_kinds_go_to_another_process(make: Callable[[], Exception]) -> None:
    error = caught_as(CollectError, make(), "batch 3 has no image")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, CollectError)
    assert isinstance(again, type(make()))
    assert str(again) == "batch 3 has no image"


def test_an_error_that_can_be_nothing_else_gets_a_note() -> None:
    error = Exception.__new__(OddError)
    assert caught_as(CollectError, error, "batch 3") is error
    assert error.__notes__ == ["batch 3"]


def no_room(*given: object) -> Any:
    raise MemoryError("no room")


def loader_without_room() -> Iterator[Any]:
    yield GOOD
    no_room()


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        (loader_without_room(), {}),
        ([GOOD], {"to_inputs": no_room}),
        ([GOOD], {"sample_ids": no_room}),
        ([GOOD], {"transform": no_room}),
        ([GOOD], {"rows": Tokens(where=no_room)}),
        ([GOOD], {"reduce": Mean(by=no_room)}),
        ([GOOD], {"activation_postproc": no_room}),
    ],
)
def test_no_error_is_its_own_cause(rnet: Recorder, batches: Any, options: Any) -> None:
    """A class that can't be joined with ours is raised as it is."""
    with pytest.raises(MemoryError, match="no room") as caught:
        rnet.collect(batches, **options)
    error: BaseException | None = caught.value
    for _ in range(10):
        error = error and (error.__cause__ or error.__context__)
    assert error is None


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(3, 3, 1), nn.Embedding(4, 4)])
@pytest.mark.parametrize(
    ("own", "given"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.int64),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.uint8),
        (torch.float64, torch.float32),
    ],
)
def test_the_advice_for_another_dtype_works(
    layer: nn.Module, own: torch.dtype, given: torch.dtype
) -> None:
    taken = own
    if isinstance(layer, nn.Embedding):
        taken, given = torch.int64, torch.float32
    net, x = nn.Sequential(copy.deepcopy(layer).to(own)), torch.ones(3, 4, dtype=given)
    rnet = recorder_of(net, "0", input_data=x.to(taken))
    for batch in (x, [x, "labels"], {"input": x}):
        with pytest.raises(CollectError) as refused:
            rnet.collect([batch])
        written = str(refused.value).partition("write to_inputs=")[2]
        recording = rnet.collect([batch], to_inputs=eval(written))
        assert same_bits(recording["0"], net[0].forward(x.to(taken)).detach())
    for run in (rnet, rnet.extract):
        with pytest.raises(RuntimeError) as raised:
            run(x)
        (note,) = raised.value.__notes__
        run(eval(note.partition("as ")[2].partition(" does")[0], {"x": x, "torch": torch}))
    with pytest.raises(LabellingError) as raised:
        Recorder(net, input_data=x)
    written = str(raised.value).rpartition("input_data=")[2].partition(" does")[0]
    Recorder(net, input_data=eval(written, {"x": x, "torch": torch}))


def test_errors_of_other_causes_advise_no_dtype(rnet: Recorder) -> None:
    # Integers are what this net takes, and it fails later.
    net = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).half())
    with pytest.raises(LabellingError, match="same dtype") as caught:
        Recorder(net, input_data=torch.ones(3, 4, dtype=torch.int64))
    assert "convert" not in str(caught.value)

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.stem(x.float())
            return out

    casting = recorder_of(Casting(), "stem", input_size=(1, 4))
    for one in (rnet, casting):
        with pytest.raises(RuntimeError, match="shapes") as raised:
            one(BAD if one is rnet else BAD.double())
        assert "convert" not in "".join(raised.value.__notes__)
