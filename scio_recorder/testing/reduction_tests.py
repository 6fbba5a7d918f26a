"""What every reduction must do."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import CollectError, RecorderError
from scio_recorder.reductions import Reduction
from scio_recorder.tensors import map_tensors, tensors
from scio_recorder.testing.undisturbed import assert_same

_COUNT = 24
_GONE = object()


class ReductionTests:
    """Derive a test class from this, and say what is tested and what its result must be.

    A reduction is split and merged in any order, over all data and class by class, stored and
    restored, damaged, reset, and used in ``collect``. What it gives is compared with `expected`.

    Attributes
    ----------
    dtypes : tuple of torch.dtype
        The dtypes of activations that the reduction takes.
    tolerance : float
        The largest error, relative and absolute, of results.
    takes_by : bool
        Whether `make` takes ``by=``, as all reductions of this library do.
    can_merge : bool
        Whether reductions of different data can be merged.
    is_ordered : bool
        Whether the result depends on the order of the data, so that only parts that follow each
        other may be merged.
    checks_states : bool
        Whether a state that no data gives is refused when it is loaded, as it should be; of
        tensors in it, their dtype and number of dimensions.

    Examples
    --------
    >>> from scio_recorder.reductions import Max
    >>> class TestMax(ReductionTests):
    ...     def make(self, **options): return Max(**options)
    ...     def expected(self, samples): return samples.amax(0)
    >>> TestMax().test_merging_in_any_order()
    """

    dtypes: tuple[torch.dtype, ...] = (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.uint8, torch.int16, torch.int64, torch.bool),
    )
    tolerance = 1e-6
    takes_by = True
    can_merge = True
    is_ordered = False
    checks_states = True

    def make(self, **options: Any) -> Reduction:
        """Return an empty reduction; ``by`` is the only option that tests give.

        Functions of a batch may read its "ids", whole numbers that are those of all samples.

        Parameters
        ----------
        **options : any
            Keywords of its constructor.
        """
        raise NotImplementedError

    def expected(self, samples: Tensor) -> Any:
        """Return the result for all samples, computed in another way.

        Parameters
        ----------
        samples : torch.Tensor
            All data, [samples, ...], in one of `dtypes`.

        Returns
        -------
        any
            What `compute` must return, in its dtype.
        """
        raise NotImplementedError

    def expected_by_class(self, samples: Tensor, labels: list[str]) -> Any:
        """Return the result with ``by``; by default a dict of what is expected for each label.

        Parameters
        ----------
        samples : torch.Tensor
            All data, [samples, ...].
        labels : list of str
            The label of each.
        """
        return {
            label: self.expected(samples[torch.tensor([each == label for each in labels])])
            for label in sorted(set(labels))
        }

    def others(self) -> list[Reduction]:
        """Return reductions of other constructions, which can't be merged with this one."""
        return [self.make(by=_labels)] if self.takes_by else []

    def samples(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return 24 samples, [24, ...], on which the tests run.

        Parameters
        ----------
        dtype : torch.dtype
            One of `dtypes`.
        """
        generator = torch.Generator().manual_seed(2)
        values = torch.randn(_COUNT, 3, 2, generator=generator) * 3 + 4
        if dtype == torch.bool:
            return values > 4
        return (values if dtype.is_signed else values.abs()).to(dtype)

    # The tests.

    def test_all_data_at_once_in_each_dtype(self) -> None:
        """The result has the right values and the right dtype."""
        for dtype in self.dtypes:
            samples, reduction = self.samples(dtype), self.make()
            reduction.update(samples, _batch())
            self._assert_result(reduction, samples, f"result for {dtype}")

    def test_merging_in_any_order(self) -> None:
        """Data that is split anywhere and merged in any order gives the result of all data."""
        for seed in range(20):
            samples = self.samples(self.dtypes[seed % len(self.dtypes)])
            reduction = self._in_parts(self.make, samples, seed)
            self._assert_result(reduction, samples, f"result in parts, {samples.dtype}")

    def test_merging_class_by_class(self) -> None:
        """So it does for each label that ``by`` gives, also if a part lacks a label."""
        if not self.takes_by:
            return
        samples, labels = self.samples(), _some_labels()
        expected = self.expected_by_class(samples, labels)
        for seed in range(20):
            reduction = self._in_parts(lambda: self.make(by=_labels), samples, seed)
            assert_same(reduction.compute(), expected, "result by class", self.tolerance)

    def test_batches_without_samples_change_nothing(self) -> None:
        """An empty batch, or a merge with a reduction without data, is no data."""
        for options in self._options():
            reduction, samples = self._reduced(**options), self.samples()
            before = copy.deepcopy(reduction.compute())
            reduction.update(samples[:0], _batch(0, 0))
            if self.can_merge:
                reduction.merge(self.make(**options))
            assert_same(reduction.compute(), before, "result after nothing")

    def test_nothing_given_is_kept_or_changed(self) -> None:
        """Neither is what the caller gave changed, nor the state through it or through a result."""
        for options, dtype in itertools.product(self._options(), self.dtypes):
            reduction, samples = self.make(**options), self.samples(dtype)
            activation = samples.clone()
            reduction.update(activation, _batch())
            assert_same(activation, samples, f"what was given, {dtype}")
            expected = copy.deepcopy(reduction.compute())
            activation.zero_()
            assert_same(reduction.compute(), expected, "result after the activation changed")
            _zero(reduction.compute())
            assert_same(reduction.compute(), expected, "result after an earlier one changed")

    def test_merging_changes_only_one_side(self) -> None:
        """The other reduction stays what it was, also if the first one goes on."""
        if not self.can_merge:
            return
        for options in self._options():
            for reduction in (self.make(**options), self._reduced(**options)):
                other = self._begun(**options)
                before = copy.deepcopy(other.compute())
                reduction.merge(other)
                reduction.update(self.samples(), _batch())
                assert_same(other.compute(), before, "result of the other side of a merge")

    def test_reset_and_fresh_begin_anew(self) -> None:
        """After `reset`, and in what `fresh` returns, there is no data."""
        for options in self._options():
            reduction = self._reduced(**options)
            first = copy.deepcopy(reduction.compute())
            fresh = reduction.fresh()
            self._update(fresh)
            assert_same(reduction.compute(), first, "result after a fresh one was used")
            assert_same(fresh.compute(), first, "result of a fresh one")
            reduction.reset()
            self._update(reduction)
            assert_same(reduction.compute(), first, "result after a reset")

    def test_states_are_stored_and_go_on(self) -> None:
        """A state of tensors and JSON comes back from a file, and replaces what was there."""
        for options in self._options():
            reduction, restored = self._reduced(**options), self._begun(**options)
            restored.load_state_dict(_through_a_file(reduction.state_dict()))
            assert_same(restored.compute(), reduction.compute(), "result of a restored state")
            for each in (reduction, restored):
                self._update(each)
            assert_same(restored.compute(), reduction.compute(), "result after it went on")

    def test_states_are_snapshots(self) -> None:
        """A state does not change with its reduction, nor a reduction with a state."""
        for options in self._options():
            reduction = self._reduced(**options)
            expected, state = copy.deepcopy(reduction.compute()), reduction.state_dict()
            self._update(reduction)
            restored = self.make(**options)
            restored.load_state_dict(state)
            assert_same(restored.compute(), expected, "result of a state after its source went on")
            _zero(state)
            assert_same(restored.compute(), expected, "result after a loaded state changed")
            _zero(restored.state_dict())
            assert_same(restored.compute(), expected, "result after its own state changed")

    def test_other_constructions_are_refused(self) -> None:
        """Neither their states are loaded, nor are they merged."""
        for other in self.others():
            reduction = self._reduced()
            if self.can_merge:
                _raised(CollectError, partial(reduction.merge, other))
            self._update(other)
            _raised(CollectError, partial(self.make().load_state_dict, other.state_dict()))

    def test_damaged_states_are_refused(self) -> None:
        """A state that was written by hand is refused, or as good as any other."""
        # By class, it holds a state of each; here are two classes.
        options = self._options()[-1]
        good = self.make(**options)
        good.update(self.samples()[:2], _batch(0, 2))
        state, num_refused = good.state_dict(), 0
        for path, value in _places(state):
            for other in _replacements(value):
                num_refused += self._is_refused(_forged(state, path, other), good, options)
            if self.checks_states and isinstance(value, Tensor):
                for other in (value[..., None], value.to(torch.complex64), value.tolist()):
                    refused = self._is_refused(_forged(state, path, other), good, options)
                    assert refused, f"a state with {other!r} at {path} was loaded"
        assert num_refused > 5, "damaged states were loaded"

    def test_modes_of_the_caller(self) -> None:
        """Inference mode and gradients of the caller neither change a result nor enter it."""
        expected, reduction, samples = self._reduced().compute(), self.make(), self.samples()
        half = _COUNT // 2
        with torch.inference_mode():
            reduction.update(samples[:half] + 0, _batch(0, half))
        reduction.update(samples[half:].clone().requires_grad_() + 0, _batch(half))
        with torch.inference_mode():
            result = reduction.compute()
            reduction.state_dict()
        assert_same(result, expected, "result in other modes")
        assert not any(tensor.is_inference() for tensor in tensors(result)), "made in inference"

    def test_collected_and_resumed(self, tmp_path: Path) -> None:
        """``collect`` gives the result, also if it goes on from a state on disk."""
        samples, labels = self.samples(), _some_labels()
        loader = [
            {"input": samples[start : start + 5], **_batch(start, start + 5)}
            for start in range(0, _COUNT, 5)
        ]
        rnet = Recorder(nn.Identity(), input_data=samples[:2], verbose=0)
        rnet.record("0-1")
        for options in self._options():
            collect = partial(
                rnet.collect,
                reduce=self.make(**options),
                store=f"disk:{tmp_path}/{len(options)}",
                to_inputs=lambda batch: batch["input"],
                progress=False,
            )
            _raised(KeyboardInterrupt, partial(collect, _interrupted(loader[:2])))
            result = collect(loader, resume=True)["0-1"]
            wanted = self.expected_by_class(samples, labels) if options else self.expected(samples)
            assert_same(result, wanted, "resumed result", self.tolerance)

    # What they have in common.

    def _options(self) -> list[dict[str, Any]]:
        return [{}, {"by": _labels}] if self.takes_by else [{}]

    def _assert_result(self, reduction: Reduction, samples: Tensor, where: str) -> None:
        assert_same(reduction.compute(), self.expected(samples), where, self.tolerance)

    def _update(self, reduction: Reduction) -> None:
        samples, half = self.samples(), _COUNT // 2
        reduction.update(samples[:half], _batch(0, half))
        reduction.update(samples[half:], _batch(half))

    def _reduced(self, **options: Any) -> Reduction:
        reduction = self.make(**options)
        self._update(reduction)
        return reduction

    def _begun(self, **options: Any) -> Reduction:
        """Return a reduction of the first samples only."""
        reduction = self.make(**options)
        reduction.update(self.samples()[:5], _batch(0, 5))
        return reduction

    def _in_parts(self, make: Callable[[], Reduction], samples: Tensor, seed: int) -> Reduction:
        """Reduce samples in up to nine batches by up to four reductions, and merge these."""
        chance = random.Random(seed)
        edges = [0, *sorted(chance.randint(0, _COUNT) for _ in range(8)), _COUNT]
        reductions = [make() for _ in range(chance.randint(1, 4) if self.can_merge else 1)]
        owners = [chance.randrange(len(reductions)) for _ in edges[1:]]
        owners = sorted(owners) if self.is_ordered else owners
        for start, end, owner in zip(edges, edges[1:], owners, strict=False):
            reductions[owner].update(samples[start:end], _batch(start, end))
        while len(reductions) > 1:
            first = 0 if self.is_ordered else chance.randrange(len(reductions) - 1)
            second = 1 if self.is_ordered else chance.randrange(first + 1, len(reductions))
            reductions[first].merge(reductions.pop(second))
        return reductions[0]

    def _is_refused(self, state: dict[str, Any], good: Reduction, options: dict[str, Any]) -> bool:
        reduction = self.make(**options)
        try:
            reduction.load_state_dict(state)
        except RecorderError:
            return True
        with suppress(RecorderError):
            reduction.compute()
            reduction.state_dict()
            if self.checks_states:
                self._update(reduction)
                reduction.compute()
                if self.can_merge:
                    reduction.merge(good)
        return False


def _labels(batch: Any) -> Any:
    return batch["labels"]


def _some_labels() -> list[str]:
    return [("cat", "dog", "eel")[index * index % 7 % 3] for index in range(_COUNT)]


def _batch(start: int = 0, end: int | None = None) -> dict[str, Any]:
    return {"labels": _some_labels()[start:end], "ids": list(range(_COUNT))[start:end]}


def _zero(value: Any) -> None:
    for tensor in tensors(value):
        tensor.zero_()


def _interrupted(batches: list[Any]) -> Iterator[Any]:
    yield from batches
    raise KeyboardInterrupt


def _raised(kind: type[BaseException], function: Callable[[], Any]) -> None:
    try:
        function()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def _through_a_file(state: dict[str, Any]) -> Any:
    """Store a state and read it, as a program without pickle would: as tensors and JSON."""
    saved: dict[str, Tensor] = {}

    def replaced(tensor: Tensor) -> dict[str, str]:
        saved[str(len(saved))] = tensor
        return {"tensor": str(len(saved) - 1)}

    text, data = json.dumps(map_tensors(replaced, state)), save(saved)
    stored = load(data)

    def restored(value: dict[str, Any]) -> Any:
        return stored[value["tensor"]] if list(value) == ["tensor"] else value

    back = json.loads(text, object_hook=restored)
    assert_same(back, state, "stored state")
    return back


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every place in a nested state, with what is there."""
    if path:
        yield path, value
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def _replacements(value: Any) -> Iterator[Any]:
    """Yield values of another kind, shape or dtype, and counts that can't be."""
    yield from (_GONE, None, "text", [], {}, [None], {"a": 1}, -1, 2**70, 0.5, math.nan, math.inf)
    yield from (True, torch.zeros(()), torch.zeros(2, 7))
    if isinstance(value, Tensor):
        yield from (value.to(torch.int8), value.to(torch.complex64), value.to(torch.float16))
        yield from (value[..., None], torch.cat([value.reshape(-1), value.reshape(-1)]))
        yield from (-value - 1 if value.dtype != torch.bool else ~value, value.tolist(), [value])
    if isinstance(value, list) and value:
        yield from (value[:-1], [*value, value[0]], value[::-1], tuple(value))


def _forged(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(state)
    parent = made
    for key in path[:-1]:
        parent = parent[key]
    if value is _GONE:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return made
