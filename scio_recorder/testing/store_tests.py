"""What every store must do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Tokens, open_recording
from scio_recorder.errors import CollectError
from scio_recorder.reductions import Mean
from scio_recorder.stores import Store, StoreWriter, as_store
from scio_recorder.testing.undisturbed import assert_same

DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


class StoreTests:
    """Derive a test class from this, and say how the store is made.

    Everything is compared, bit for bit, with what layers return in passes by themselves.

    Attributes
    ----------
    forms : dict
        Ways in which the numbers of a tensor [4, 3] can lie in memory, as functions of a plain one.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from scio_recorder.stores import Host
    >>> class TestHost(StoreTests):
    ...     def make_store(self, path): return Host()
    >>> with TemporaryDirectory() as folder:
    ...     TestHost().test_ids_of_samples(Path(folder))
    """

    forms: dict[str, Callable[[Tensor], Tensor]] = {  # noqa: RUF012 - see the docstring
        "plain": lambda x: x + 1,
        "differentiable": lambda x: (x + 1).requires_grad_(),
        "column by column": lambda x: (x + 1).t().contiguous().t(),
        "one row for all": lambda x: x[:1].expand(x.shape),
        "every other": lambda x: torch.cat([x, x], 1)[:, ::2],
        "lazily negated": lambda x: torch.complex(x, x).conj().imag,
        "inside": lambda x: torch.cat([x, x])[2 : 2 + len(x)],
    }

    def make_store(self, path: Path) -> str | Store:
        """Return a new store, or the word for one.

        Parameters
        ----------
        path : pathlib.Path
            An empty folder, below which the store keeps its data if it keeps files.
        """
        raise NotImplementedError

    # The tests.

    def test_batches_of_any_sizes(self, tmp_path: Path) -> None:
        """All rows are there, in order, whatever the loader promises."""
        kinds: list[tuple[tuple[int, ...], Callable[[list[Tensor]], Any]]] = [
            ((4, 4, 4), list),
            ((4, 4, 1), iter),
            ((2, 7, 1, 5), _WrongLength),
            ((3,), list),
            ((33,) * 40, iter),
        ]
        for number, (sizes, loader) in enumerate(kinds):
            rnet, data = _recorder("*"), _batches(*sizes)
            store = self._store(tmp_path, number)
            recording = rnet.collect(loader(data), store=store, progress=False)
            _assert_rows(recording, _expected(rnet, data))
            assert recording.num_samples == sum(sizes), f"{recording.num_samples} samples"
            assert recording.sample_ids == list(range(sum(sizes))), "ids of samples differ"
            assert recording.complete, "the recording is not complete"
            assert recording.architecture == rnet.architecture, "another architecture"

    def test_ids_of_samples(self, tmp_path: Path) -> None:
        """Samples keep the ids that the caller gives them."""
        rnet, data = _recorder("1-1"), _batches(3, 2)
        names = iter(["c", "a", "b", "e", "d"])
        recording = rnet.collect(
            data,
            store=self._store(tmp_path),
            sample_ids=lambda batch: [next(names) for _ in batch],
            progress=False,
        )
        assert recording.sample_ids == list("cabed"), f"ids {list(recording.sample_ids)}"

    def test_dtypes_layouts_and_empty_shapes(self, tmp_path: Path) -> None:
        """Rows keep their dtype and every bit, also without values."""
        for number, dtype in enumerate(DTYPES):
            # Transposed, so that what the layer returns is not contiguous.
            data = [torch.randn(5, n, 3).mul(3).to(dtype).transpose(0, 1) for n in (2, 4)]
            for width, batches in (("whole", data), ("empty", [x[:, :0] for x in data])):
                rnet = _recorder("0-1", net=nn.Identity(), inputs=data[0])
                store = self._store(tmp_path, f"{width}{number}")
                recording = rnet.collect(batches, store=store, progress=False)
                _assert_rows(recording, {"0-1": torch.cat(batches)})

    def test_every_form_of_a_tensor(self, tmp_path: Path) -> None:
        """A row is what its numbers are, however they lie in memory."""
        forms = [form for name in self.forms for form in ("plain", name, "plain", name)]
        for dtype in (None, torch.float16):
            inputs = torch.randn(len(forms), 4, 3)
            data = [{"x": x, "form": form} for x, form in zip(inputs, forms, strict=True)]
            rnet = _recorder("1-1", net=_Forms(self.forms), inputs=data[0])
            each = zip(inputs, forms, strict=True)
            rows = [self.forms[form](x).detach().clone() for x, form in each]
            store = self._store(tmp_path, str(dtype))
            recording = rnet.collect(data, store=store, dtype=dtype, progress=False)
            _assert_rows(recording, {"1-1": torch.cat(rows).to(dtype or torch.float32)})

    def test_rows_that_are_no_samples(self, tmp_path: Path) -> None:
        """Tokens are kept without padding, with the sample and the position of each."""
        net = nn.Sequential(nn.Embedding(9, 3))
        rnet = _recorder("0", net=net, inputs=torch.zeros(2, 5, dtype=torch.int64))
        words = [torch.randint(9, (n, 5)) for n in (2, 3)]
        masks = [torch.rand(len(sentences), 5) < 0.6 for sentences in words]
        recording = rnet.collect(
            [{"input": a, "attention_mask": b} for a, b in zip(words, masks, strict=True)],
            store=self._store(tmp_path),
            rows=Tokens(),
            to_inputs=lambda batch: batch["input"],
            progress=False,
        )
        each = zip(words, masks, strict=True)
        _assert_rows(recording, {"1-1": torch.cat([net(a)[b].detach() for a, b in each])})
        mask = torch.cat(masks)
        # Positions in the text, without padding.
        positions = (mask.cumsum(1) - 1)[mask]
        for name, facts in {"sample": mask.nonzero()[:, 0], "position": positions}.items():
            assert torch.equal(recording.rows[name][:], facts), f"rows[{name!r}] differs"

    def test_inputs_and_reductions(self, tmp_path: Path) -> None:
        """Inputs are kept beside rows, and a layer that is reduced is not stored."""
        rnet, data = _recorder("1-1", "1-4", keep_inputs=True), _batches(3, 2)
        recording = rnet.collect(
            data, store=self._store(tmp_path), reduce={"1-4": Mean()}, progress=False
        )
        expected = _expected(rnet, data)
        assert_same(recording["1-1"][:], expected["1-1"], "rows of 1-1")
        assert_same(recording["1-4"], expected["1-4"].mean(0), "mean of 1-4", 1e-6)
        inputs = [call.args[0] for call in recording.inputs["1-1"]]
        assert_same(inputs, data, "inputs of 1-1")

    def test_a_loader_that_fails(self, tmp_path: Path) -> None:
        """The failure is seen, and collecting into another such store goes well."""
        rnet, data = _recorder("1-1"), _batches(3, 2)
        failed = _raised(
            lambda: rnet.collect(
                _interrupted(data[:1]), store=self._store(tmp_path), progress=False
            )
        )
        assert isinstance(failed, CollectError | _FailedError), f"{failed!r} was raised"
        again = rnet.collect(data, store=self._store(tmp_path, "again"), progress=False)
        _assert_rows(again, _expected(rnet, data))

    def test_a_pass_that_fails_counts_nothing(self, tmp_path: Path) -> None:
        """What layers gave to the store in a pass that failed later is in no recording."""
        rnet, data = _recorder("*"), _batches(3, 4, 2, 3)

        def fail(*arguments: Any) -> None:
            raise _FailedError

        with rnet.collecting(store=self._store(tmp_path)) as collection:
            rnet(data[0])
            # Behind most layers, whose rows have been given away by then.
            handle = rnet.net[3].register_forward_pre_hook(fail)
            _raised(lambda: rnet(data[1]))
            handle.remove()
            rnet(data[2])
            handle = rnet.net[3].register_forward_pre_hook(fail)
            _raised(lambda: rnet(data[3]))
            handle.remove()
        _assert_rows(collection.recording, _expected(rnet, [data[0], data[2]]))

    def test_a_block_that_ends_early(self, tmp_path: Path) -> None:
        """What was committed before an exception is kept, and is not called complete."""
        rnet, data = _recorder("*"), _batches(3, 2)
        with suppress(_FailedError), rnet.collecting(store=self._store(tmp_path)) as collection:
            rnet(data[0])
            raise _FailedError
        assert not collection.recording.complete, "it is called complete"
        _assert_rows(collection.recording, _expected(rnet, data[:1]))

    def test_recordings_outlive_their_store(self, tmp_path: Path) -> None:
        """Rows stay what they were if the same store takes another recording, or refuses it."""
        rnet, store = _recorder("*"), as_store(self._store(tmp_path))
        first, second = _batches(3, 2), _batches(4, 5, seed=1)
        recording = rnet.collect(first, store=store, progress=False)
        if not store.can_resume:
            again = rnet.collect(second, store=store, progress=False)
            _assert_rows(again, _expected(rnet, second))
        else:
            refused = _raised(lambda: rnet.collect(second, store=store, progress=False))
            assert not isinstance(refused, _FailedError | None), "another recording was begun in it"
        _assert_rows(recording, _expected(rnet, first))

    def test_resuming(self, tmp_path: Path) -> None:
        """Where recordings go on, no sample comes twice, and none is missing."""
        rnet, data = _recorder("*"), _batches(4, 4, 4, 2)
        store = as_store(self._store(tmp_path))
        if not store.can_resume:
            return
        _raised(lambda: rnet.collect(_interrupted(data[:2]), store=store, progress=False))
        recording = rnet.collect(data, store=store, resume=True, progress=False)
        _assert_rows(recording, _expected(rnet, data))
        assert recording.sample_ids == list(range(14)), "ids of samples differ"
        assert recording.complete, "the recording is not complete"

    def test_saving(self, tmp_path: Path) -> None:
        """A recording can be saved and opened again without the network."""
        rnet, data = _recorder("*"), _batches(3, 2)
        recording = rnet.collect(data, store=self._store(tmp_path), progress=False)
        recording.save(str(tmp_path / "saved"))
        _assert_rows(open_recording(str(tmp_path / "saved")), _expected(rnet, data))

    def test_copies_from_a_device_are_waited_for(self, tmp_path: Path, monkeypatch: Any) -> None:
        """`column` notes the device of what it is given, and each commit waits for all of them."""
        seen: list[_Devices] = []
        commit = StoreWriter.commit

        def watched(writer: StoreWriter, *args: Any, **kwargs: Any) -> None:
            writer.devices = _Devices(writer.devices)
            seen.append(writer.devices)
            commit(writer, *args, **kwargs)

        monkeypatch.setattr(StoreWriter, "commit", watched)
        _recorder("*").collect(_batches(3), store=self._store(tmp_path), progress=False)
        assert seen[0].are_read, "no commit waited"
        assert seen[0] == {torch.device("cpu")}, f"devices are {set(seen[0])}"

    def _store(self, path: Path, name: Any = "store") -> str | Store:
        folder = path / str(name)
        folder.mkdir()
        return self.make_store(folder)


class _WrongLength(list[Any]):
    """A loader that promises less than it yields."""

    def __len__(self) -> int:
        return 1


class _FailedError(Exception):
    """What tests raise."""


class _Devices(set[torch.device]):
    """Devices that know whether anybody waits for them."""

    are_read = False

    def __iter__(self) -> Iterator[torch.device]:
        self.are_read = True
        return super().__iter__()


class _Forms(nn.Module):
    """Returns its input in one of several forms."""

    def __init__(self, forms: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self._forms = forms

    def forward(self, x: Tensor, form: str) -> Any:
        return self.inner(self._forms[form](x))


class _Residual(nn.Module):
    """Writes into what inner layers returned and into its own output, and calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        kept = self.first(x)
        out = self.second(self.act(kept))
        out += kept
        return self.act(out)


def _net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), _Residual(), nn.Linear(6, 3), nn.Sigmoid()
    ).eval()


def _recorder(
    *selectors: str, net: nn.Module | None = None, inputs: Any = None, keep_inputs: bool = False
) -> Any:
    inputs = torch.zeros(2, 4) if inputs is None else inputs
    rnet = Recorder(_net() if net is None else net, input_data=inputs, verbose=0)
    rnet.record(*selectors, inputs=keep_inputs)
    return rnet


def _batches(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=generator) for size in sizes]


def _interrupted(batches: list[Tensor]) -> Iterator[Tensor]:
    yield from batches
    raise _FailedError


def _raised(function: Callable[[], Any]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _expected(rnet: Any, data: list[Tensor]) -> dict[str, Tensor]:
    """Return what recorded layers return, by label, copied by hooks of a copy of the network."""
    rows: dict[str, list[Tensor]] = {}
    net, calls = copy.deepcopy(rnet.net), dict[str, int]()

    def keep(name: str, output: Tensor) -> None:
        rows.setdefault(f"{name}:{calls.get(name, 0)}", []).append(output.clone())
        calls[name] = calls.get(name, 0) + 1

    for name, module in net.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
    with torch.no_grad():
        for batch in data:
            calls.clear()
            net(batch)
    layers = [rnet.architecture[label] for label in rnet.recording]
    labels = {f"{layer.name}:{layer.call}": str(layer.label) for layer in layers}
    # In the order in which calls return.
    return {labels[call]: torch.cat(parts) for call, parts in rows.items() if call in labels}


def _assert_rows(recording: Any, expected: dict[str, Tensor]) -> None:
    assert_same([str(label) for label in recording], list(expected), "layers")
    for label, rows in expected.items():
        assert_same(recording[label][:], rows, f"rows of {label}")
