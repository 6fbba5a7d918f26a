"""Going on after an interruption, or once it is complete: every sample once, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from scio_recorder import CollectError, Recorder, RecordingError, Tokens, open_recording
from scio_recorder.reductions import Covariance, Fold, Histogram, Mean, Moments
from scio_recorder.stores import Disk
from scio_recorder.stores.files import RunReader
from tests.recording.nets import (
    assert_same,
    batches,
    expected,
    failing_after,
    interrupt,
    recorder,
    recorder_of,
)


def interrupted(rnet, data, path, after, **options):
    interrupt(rnet, data, Disk(path, chunk_bytes=100), after, **options)


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_resumed_from_every_state(after, tmp_path):
    rnet, data = recorder(), batches(4, 4, 3, 4)
    path = tmp_path / "run"
    interrupted(rnet, data, path, after)
    store, passes, wanted = Disk(path, chunk_bytes=100), [], expected(rnet, data)
    rnet.net.register_forward_hook(lambda *call: passes.append(1))
    for attempt in range(2):
        seen = []
        loader = (seen.append(x) or x for x in data)
        recording = rnet.collect(loader, store=store, resume=True)
        assert_same(recording, wanted)
        assert recording.sample_ids == list(range(15))
        assert recording.complete
        # What is durable does not run again; once it is complete, nothing is looked at.
        assert len(passes) == 4 - after
        assert bool(seen) is (attempt == 0)


def test_opened_while_a_writer_goes_on_to_the_end_and_replaces_states(tmp_path):
    rnet, data = recorder("0"), batches(4, 4, 3, 4)
    path, seen = tmp_path / "run", []
    read_state = RunReader.read_state

    def late(self, rank=0):
        # What this reader has found is replaced, and removed at the end.
        seen.append(self)
        if len(seen) == 1:
            rnet.collect(data, store=Disk(path, 100), reduce=Covariance(), resume=True)
        return read_state(self, rank)

    interrupted(rnet, data, path, 1, reduce=Covariance())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunReader, "read_state", late)
        found = open_recording(path)
    assert found.num_samples == 15
    (values,) = expected(rnet, data).values()
    torch.testing.assert_close(found["0"].covariance, values.double().T.cov().float())
    # One that is missing is damage.
    for state in path.glob("state-*"):
        state.unlink()
    with pytest.raises(RecordingError, match="No such file"):
        open_recording(path)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2, 2, 3), (15,), (7, 8)])
def test_resumed_with_another_batch_size(sizes, tmp_path):
    # A net that gives the same bits for a sample whatever it is batched with.
    rnet = recorder("0", "1", net=nn.Sequential(nn.ReLU(), nn.Flatten()))
    data = batches(4, 4, 3, 4)
    reduce = {"1": Fold(lambda a, x: (a or 0) + len(x), merge=lambda a, b: a + b)}
    interrupted(rnet, data, tmp_path / "run", 2, reduce=reduce)
    other = torch.cat(data).split(sizes)
    recording = rnet.collect(other, store=f"disk:{tmp_path}/run", resume=True, reduce=reduce)
    assert torch.equal(recording["0"][:], torch.cat(data).relu())
    assert recording.sample_ids == list(range(15))
    assert recording["1"] == 15


def test_labels_of_a_batch_in_part_durable_are_those_of_the_rest(tmp_path):
    rnet, data = recorder("0", "3"), [(x, (x[:, 0] > 0).long()) for x in batches(4, 4, 4)]
    reduce = {"0": Mean(by=lambda batch: batch[1])}
    interrupted(rnet, data, tmp_path / "run", 1, reduce=reduce)
    together = [tuple(torch.cat(column) for column in zip(*data, strict=True))]
    resumed = rnet.collect(together, store=f"disk:{tmp_path}/run", resume=True, reduce=reduce)
    x, labels = together[0]
    rnet(x)
    for label in (0, 1):
        own = rnet.activations["0"].detach()[labels == label].double()
        torch.testing.assert_close(resumed["0"][label].double(), own.mean(0), rtol=1e-6, atol=1e-7)


def test_reductions_go_on_bit_for_bit(tmp_path):
    rnet, data = recorder(), batches(40, 4, 31, 4)
    reduce = {"0": [Moments(), Covariance()], "1": Mean()}
    options = {"reduce": reduce, "dtype": torch.float16}
    interrupted(rnet, data, tmp_path / "run", 3, **options)
    resumed = rnet.collect(data, store=f"disk:{tmp_path}/run", resume=True, **options)
    clean = rnet.collect(data, **options)
    assert torch.equal(resumed["0"][0].variance, clean["0"][0].variance)
    # A commit joins the rows seen so far, so that sums are taken in another order.
    torch.testing.assert_close(resumed["0"][1], clean["0"][1])
    assert torch.equal(resumed["1"], clean["1"])
    assert resumed.relative_errors == clean.relative_errors
    again = rnet.collect(data, store=f"disk:{tmp_path}/run", resume=True, **options)
    assert again.relative_errors == clean.relative_errors
    assert torch.equal(again["1"], clean["1"])


def other_weights(rnet):
    with torch.no_grad():
        rnet.net[0].bias[0] += 1


def training(rnet):
    rnet.net.train()


def partly_training(rnet):
    rnet.net[2].act.train()


def doubled(activation, batch):
    return activation * 2


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (training, {}, 'mode is "eval mode" there and "train mode"'),
        (partly_training, {}, "eval mode, but for '2.act'"),
        (
            lambda rnet: None,
            {"transform": {"3": doubled}},
            r'transforms is \[\] there and \["1-4"\]',
        ),
        (lambda rnet: None, {"to_inputs": lambda batch: batch}, "to_inputs"),
        (lambda rnet: None, {"sample_ids": lambda batch: range(len(batch))}, "sample_ids"),
        (lambda rnet: rnet.record("0", "3", inputs=True), {}, "inputs"),
        (lambda rnet: rnet.record("0", "2"), {}, "layers"),
        (lambda rnet: rnet.record("0"), {}, "layers"),
        (lambda rnet: None, {"dtype": torch.float16}, "dtype"),
        (lambda rnet: None, {"reduce": {"0": Mean()}}, "reductions"),
        (lambda rnet: None, {"every": 2}, "every"),
        (other_weights, {}, "with other settings: the weights are others. Give the same network"),
        (other_weights, {"every": 2}, "with other settings: the weights are others; every"),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_what_differs_is_refused(change, options, match, complete, tmp_path):
    rnet, data = recorder("0", "3"), batches(4, 4, 3)
    if complete:
        rnet.collect(data, store=f"disk:{tmp_path}/run")
    else:
        interrupted(rnet, data, tmp_path / "run", 1)
    before = [torch.clone(open_recording(tmp_path / "run")[k]) for k in ("0", "3")]
    change(rnet)
    with pytest.raises(RecordingError, match=match):
        rnet.collect(data, store=f"disk:{tmp_path}/run", resume=True, **options)
    after = open_recording(tmp_path / "run")
    assert all(torch.equal(one, after[k][:]) for one, k in zip(before, ("0", "3"), strict=True))


def test_what_was_saved_from_memory_is_refused_for_its_unknown_weights(tmp_path):
    rnet, data = recorder("0"), batches(4, 3)
    rnet.collect(data).save(tmp_path / "run")
    with pytest.raises(RecordingError, match=r"settings: save\(\) wrote it, and knew no weights"):
        rnet.collect(data, store=f"disk:{tmp_path}/run", resume=True)


def test_other_layers_with_a_transform_and_another_autocast_are_refused(tmp_path):
    rnet, data = recorder("0", "3"), batches(4, 4, 3)
    options = {"store": f"disk:{tmp_path}/run", "resume": True}
    with torch.autocast("cpu", torch.bfloat16):
        interrupted(rnet, data, tmp_path / "run", 1, transform={"0": doubled})
        with pytest.raises(RecordingError, match=r'transforms is ."1-1". there and ."1-4"'):
            rnet.collect(data, transform={"3": doubled}, **options)
    with pytest.raises(RecordingError, match="cpu is stored and was not given"):
        rnet.collect(data, transform={"0": doubled}, **options)
    with torch.autocast("cpu", torch.bfloat16):
        resumed = rnet.collect(data, transform={"0": doubled}, **options)
        clean = rnet.collect(data, transform={"0": doubled})
    assert torch.equal(resumed["0"][:], clean["0"])


@pytest.mark.parametrize(("first", "second"), [((0, 1), (-4, 4)), ((0, 1), None), (None, (0, 1))])
def test_a_histogram_over_another_range_is_refused(first, second, tmp_path):
    rnet, data = recorder("0"), batches(4, 4, 3)
    options = {"store": f"disk:{tmp_path}/run", "resume": True}
    interrupted(rnet, data, tmp_path / "run", 1, reduce=Histogram(4, range=first))
    with pytest.raises(RecordingError, match=r"range"):
        rnet.collect(data, reduce=Histogram(4, range=second), **options)
    resumed = rnet.collect(data, reduce=Histogram(4, range=first), **options)["0"]
    clean = rnet.collect(data, reduce=Histogram(4, range=first))["0"]
    assert torch.equal(resumed.counts, clean.counts)
    assert torch.equal(resumed.edges, clean.edges)


@pytest.mark.filterwarnings("ignore:the net is in training mode")
def test_statistics_that_every_pass_changes_do_not_forbid_to_resume(tmp_path):
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()).train()
    rnet, data = Recorder(net, input_size=(2, 4), mode="train"), batches(4, 4, 3)
    rnet.record("*")
    wanted = expected(rnet, data)
    interrupted(rnet, data, tmp_path / "run", 2)
    resumed = rnet.collect(data, store=f"disk:{tmp_path}/run", resume=True)
    assert_same(resumed, wanted)
    net.eval()
    # Here they decide what is returned.
    interrupted(rnet, data, tmp_path / "other", 2)
    net[1].running_mean += 1
    with pytest.raises(RecordingError, match="weights"):
        rnet.collect(data, store=f"disk:{tmp_path}/other", resume=True)


def test_samples_of_another_shape_are_refused(tmp_path):
    rnet, data = recorder("0"), batches(4, 4)
    interrupted(rnet, data, tmp_path / "run", 1, transform=doubled)
    transform = lambda activation, batch: activation[:, :1]  # noqa: E731
    with pytest.raises(RecordingError, match="same data and transform"):
        rnet.collect(data, store=f"disk:{tmp_path}/run", resume=True, transform=transform)


def test_another_architecture_is_refused(tmp_path):
    interrupted(recorder("0"), batches(4, 4), tmp_path / "run", 1)
    other = recorder_of(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), "0", input_size=(1, 4))
    with pytest.raises(RecordingError, match=r"run was recorded from another network[^0-9]*$"):
        other.collect(batches(4, 4), store=f"disk:{tmp_path}/run", resume=True)


def test_another_input_size_at_labelling_is_the_same_architecture(tmp_path):
    rnet, data = recorder("0"), batches(4, 4)
    interrupted(rnet, data, tmp_path / "run", 1)
    again = recorder_of(rnet.net, "0", input_size=(7, 4))
    resumed = again.collect(data, store=f"disk:{tmp_path}/run", resume=True)
    assert_same(resumed, expected(rnet, data))


def test_another_order_or_a_shorter_loader_is_refused(tmp_path):
    rnet, data = (
        recorder("0"),
        [(x, [f"{i}-{j}" for j in range(4)]) for i, x in enumerate(batches(4, 4, 4))],
    )
    options = {"sample_ids": lambda batch: batch[1]}
    interrupted(rnet, data, tmp_path / "run", 2, **options)
    store = f"disk:{tmp_path}/run"
    with pytest.raises(CollectError, match="same order"):
        rnet.collect(data[::-1], store=store, resume=True, **options)
    with pytest.raises(CollectError, match="same loader"):
        rnet.collect(data[:1], store=store, resume=True, **options)
    resumed = rnet.collect(data, store=store, resume=True, **options)
    assert_same(resumed, expected(rnet, [x for x, _ in data]))


def test_thinned_runs_resume(tmp_path):
    rnet, data = recorder("0"), batches(4, 4, 3, 4, 2, 5)
    interrupted(rnet, data, tmp_path / "run", 3, every=2)
    resumed = rnet.collect(data, store=f"disk:{tmp_path}/run", resume=True, every=2)
    assert_same(resumed, expected(rnet, data[::2]))
    assert resumed.sample_ids == [0, 1, 2, 3, 8, 9, 10, 15, 16]


@pytest.mark.parametrize("way", ["collect", "collecting", "collect_parts"])
@pytest.mark.parametrize("after", [0, 2])
def test_ctrl_c_says_what_is_durable_and_how_to_go_on(way, after, tmp_path):
    rnet, data = recorder(), batches(4, 4, 3, 4)
    loader = lambda part=0: failing_after(data, after, KeyboardInterrupt)  # noqa: E731
    path = tmp_path / "run"

    def collecting(store):
        with rnet.collecting(store=store):
            for batch in loader():
                rnet.net(batch)

    run = {
        "collect": lambda store: rnet.collect(loader(), store=store),
        "collect_parts": lambda store: rnet.collect_parts(loader, 3, store=store),
        "collecting": collecting,
    }[way]
    with pytest.raises(KeyboardInterrupt) as caught:
        run(Disk(path, chunk_bytes=100))
    notes = getattr(caught.value, "__notes__", [])
    if way == "collect_parts":
        assert "0 of 3 parts" in notes[-1]
        assert "the same call goes on" in notes[-1]
    elif after:
        assert open_recording(path).num_samples == 8
        assert notes == ["8 samples are durable, resume=True goes on after them"]
        assert_same(rnet.collect(data, store=f"disk:{path}", resume=True), expected(rnet, data))
    else:
        assert notes == []


def test_ctrl_c_says_nothing_of_memory():
    rnet = recorder()
    with pytest.raises(KeyboardInterrupt) as caught:
        rnet.collect(failing_after(batches(4), 1, KeyboardInterrupt))
    assert not hasattr(caught.value, "__notes__")


X = batches(24)[0]


class Items(list[Any]):
    """A dataset, and no list of batches for a loader."""


def loader(number: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Items(X[:number]), batch_size, **options)


def listed(number: int) -> list[torch.Tensor]:
    return list(X[:number].split(3))


def unknown(number: int) -> Iterator[torch.Tensor]:
    return iter(listed(number))


def fingerprint(path: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


@pytest.mark.parametrize(
    ("given", "came"),
    [
        (loader(24), "24"),
        # As many batches, the last of another size.
        (loader(9), "9"),
        (loader(8, drop_last=True), "8"),
        (loader(10, sampler=SubsetRandomSampler(range(9))), "9"),
        (listed(24), "24"),
        ([X[:3]] * 5, "15"),
        # Nobody knows where it ends.
        (unknown(24), "12 or more"),
        (unknown(6), "6"),
    ],
)
def test_data_of_another_length_is_refused(tmp_path, given, came):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect(loader(10), store=f"disk:{path}")
    before = fingerprint(path)
    with pytest.raises(CollectError, match=rf"complete: it holds 10 samples .* {came} came now"):
        rnet.collect(given, store=f"disk:{path}", resume=True)
    with pytest.raises(CollectError, match="open_recording"):
        rnet.collect(loader(24), store=f"disk:{path}", resume=True)
    assert fingerprint(path) == before


@pytest.mark.parametrize(
    "given",
    [
        loader(10),
        loader(10, 5),
        loader(11, 5, drop_last=True),
        listed(10),
        unknown(10),
    ],
)
def test_data_of_the_same_length_is_not(tmp_path, given):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect(loader(10), store=f"disk:{path}")
    assert rnet.collect(given, store=f"disk:{path}", resume=True).num_samples == 10


def test_the_same_loader_is_not_read(tmp_path):
    class Read(Items):
        count = 0

        def __getitem__(self, at: Any) -> Any:
            Read.count += 1
            return super().__getitem__(at)

    rnet, given = recorder("0"), DataLoader(Read(X[:9]), 2, sampler=SubsetRandomSampler(range(9)))
    for _ in range(2):
        # Ids that are counted don't show another order, and those of a generator cost a pass.
        rnet.collect(given, store=f"disk:{tmp_path}/run", resume=True)
        assert Read.count == 9


def test_fewer_and_more_batches_by_max_batches(tmp_path):
    rnet, store = recorder("0"), f"disk:{tmp_path}/run"
    rnet.collect(unknown(24), store=store, max_batches=3)
    for given in (unknown(24), loader(24, 3), loader(9, 3)):
        assert rnet.collect(given, store=store, max_batches=3, resume=True).num_samples == 9
    with pytest.raises(CollectError, match="9 samples already, and 12 or more came"):
        rnet.collect(unknown(24), store=store, max_batches=4, resume=True)
    assert rnet.collect(loader(9), store=store, resume=True).num_samples == 9


def test_a_sampler_that_fails_to_give_its_length(tmp_path):
    class Endless(SubsetRandomSampler):
        def __len__(self) -> int:
            raise AttributeError("nobody knows")

    rnet, store = recorder("0"), f"disk:{tmp_path}/run"
    for _ in range(2):
        given = loader(10, sampler=Endless(range(9)))
        assert rnet.collect(given, store=store, resume=True).num_samples == 9


def test_other_samples_are_refused_where_the_length_differs(tmp_path):
    rnet, store, ids = recorder("0"), f"disk:{tmp_path}/run", {"sample_ids": lambda b: b[1]}
    data = [(X[at : at + 2], [f"{at}", f"{at + 1}"]) for at in range(0, 8, 2)]
    rnet.collect(iter(data), store=store, **ids)
    with pytest.raises(CollectError, match="sample 0 of the loader is '6', but was '0'"):
        rnet.collect(data[::-1], store=store, resume=True, **ids)


def test_rows(tmp_path):
    rnet, store = recorder("0"), f"disk:{tmp_path}/run"

    def texts(*lengths: int) -> list[dict[str, torch.Tensor]]:
        mask = torch.arange(4) < torch.tensor(lengths).unsqueeze(1)
        return [{"input": X[: len(lengths)].unsqueeze(1).repeat(1, 4, 1), "mask": mask}]

    options: dict[str, Any] = {
        "rows": Tokens(mask="mask"),
        "to_inputs": lambda batch: batch["input"],
        "store": store,
    }
    rnet.collect(iter(texts(2, 4)), **options)
    assert rnet.collect(texts(2, 4), resume=True, **options).num_rows == 6
    with pytest.raises(CollectError, match="2 samples in 6 rows already, and 2 in 5 rows came"):
        rnet.collect(texts(1, 4), resume=True, **options)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_share_of_a_rank(tmp_path, rank):
    store = f"disk:{tmp_path}/run"

    def share(size: int, of: int) -> DataLoader[Any]:
        data = Items(X[:size])
        return DataLoader(data, 2, sampler=DistributedSampler(data, 3, of, shuffle=False))

    rnet = recorder("0")
    for each in range(3):
        rnet.collect(share(10, each), store=store)
    assert rnet.collect(share(10, rank), store=store, resume=True).num_samples == 3 + (rank == 0)
    with pytest.raises(OSError, match="sampler"):
        rnet.collect(share(11, rank), store=store, resume=True)


def parts_of(size: int) -> Callable[[int], list[torch.Tensor]]:
    return lambda part: list(X[part * size : (part + 1) * size].split(2))


def test_parts_of_another_length_are_refused(tmp_path):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect_parts(parts_of(4), 3, store=f"disk:{path}")
    before = fingerprint(path)
    assert rnet.collect_parts(parts_of(4), 3, store=f"disk:{path}").num_samples == 12
    with pytest.raises(CollectError, match=r"part 0: .* 4 samples already, and 6 came now"):
        rnet.collect_parts(parts_of(6), 3, store=f"disk:{path}")

    def longer_at_the_end(part: int) -> list[torch.Tensor]:
        return parts_of(4)(part) + [X[:5]] * (part == 2)

    with pytest.raises(CollectError, match=r"part 2: .* 4 samples already, and 9 came now"):
        rnet.collect_parts(longer_at_the_end, 3, store=f"disk:{path}")

    def gone(part: int) -> Any:
        raise FileNotFoundError

    assert rnet.collect_parts(gone, 3, store=f"disk:{path}").num_samples == 12
    assert fingerprint(path) == before


def test_one_part_in_the_place_of_what_collect_wrote(tmp_path):
    path, rnet = f"{tmp_path}/run", recorder("0")
    rnet.collect(loader(10), store=f"disk:{path}")
    before = fingerprint(path)
    with pytest.raises(CollectError, match=r"10 samples already, and 24 came now"):
        rnet.collect_parts(lambda part: loader(24), 1, store=f"disk:{path}")
    assert fingerprint(path) == before
    assert rnet.collect_parts(lambda part: loader(10), 1, store=f"disk:{path}").complete
    assert open_recording(path).num_samples == 10
