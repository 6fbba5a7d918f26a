"""Rows that are nodes of graphs, beside what plain hooks saw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import CollectError, Nodes, Recorder
from scio_recorder.reductions import Mean
from tests.recording.nets import recorder_of
from tests.recording.tables import seen


class Messages(nn.Module):
    """Each node takes in what its neighbours say; edges and graphs have layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.say = nn.Linear(3, 5)
        self.edge = nn.Identity()
        self.take = nn.Linear(5, 4)
        self.pool = nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        said = self.edge(self.say(x)[edge_index[0]])
        x = self.take(torch.zeros(len(x), 5).index_add(0, edge_index[1], said))
        of = torch.zeros(len(x), dtype=torch.long) if batch is None else batch
        out: Tensor = self.pool(torch.zeros(int(of.max()) + 1, 4).index_add(0, of, x))
        return out


def recorder(*selectors: str) -> Recorder:
    torch.manual_seed(0)
    return recorder_of(Messages().eval(), *(selectors or ("say", "take")), input_data=graph([2, 3]))


def graph(sizes: list[int], seed: int = 0, *, sort: bool = True) -> dict[str, Tensor]:
    """Return graphs of these sizes as one, with random edges inside each."""
    generator = torch.Generator().manual_seed(seed)
    of = torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)])
    edges = torch.stack(
        [torch.randperm(len(of), generator=generator), torch.arange(len(of))]
    ).repeat(1, 2)[:, : 2 * len(of) - 1]
    if not sort:
        of = of[torch.randperm(len(of), generator=generator)]
    return {"x": torch.randn(len(of), 3, generator=generator), "edge_index": edges, "batch": of}


DATA = [graph([3, 1, 4]), graph([2, 2], seed=1), graph([5], seed=2)]
NAMES = ["say", "take"]


@pytest.mark.parametrize("form", ["dict", "attributes", "argument"])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_each_node_is_a_row(form, store, tmp_path):
    rnet, data, to_inputs = recorder(), DATA, None
    if form == "attributes":
        data, to_inputs = [SimpleNamespace(**batch) for batch in DATA], vars
    elif form == "argument":
        data, to_inputs = [tuple(batch.values()) for batch in DATA], tuple
    where = f"disk:{tmp_path}/run" if store == "disk" else store
    recording = rnet.collect(data, rows=Nodes(), to_inputs=to_inputs, store=where)
    found = seen(rnet.net, NAMES, lambda: [rnet.net(**batch) for batch in DATA])
    for name in NAMES:
        assert torch.equal(recording[name][:], torch.cat(found[name]))
    sizes = [3, 1, 4, 2, 2, 5]
    assert [len(one) for one in recording.by_sample("take")] == sizes
    assert recording.rows["sample"][:].tolist() == [
        number for number, size in enumerate(sizes) for _ in range(size)
    ]
    assert recording.rows["position"][:].tolist() == [i for size in sizes for i in range(size)]
    assert (recording.num_samples, recording.num_rows) == (6, 17)


def test_nodes_in_any_order_are_put_in_that_of_their_graphs():
    rnet, data = recorder(), [graph([3, 4, 2], seed, sort=False) for seed in (3, 4)]
    assert any((batch["batch"].diff() < 0).any() for batch in data)
    data[0]["number"] = data[1]["number"] = torch.arange(9, dtype=torch.int16)
    recording = rnet.collect(
        data,
        rows=Nodes(fields=["number"]),
        to_inputs=lambda batch: {name: batch[name] for name in ("x", "edge_index", "batch")},
    )
    found = seen(rnet.net, ["take"], lambda: [rnet.net(*list(one.values())[:3]) for one in data])
    wanted, numbers = [], []
    for value, batch in zip(found["take"], data, strict=True):
        for number in range(3):
            held = [place for place, of in enumerate(batch["batch"].tolist()) if of == number]
            wanted += [value[place] for place in held]
            numbers += held
    assert torch.equal(recording["take"], torch.stack(wanted))
    assert recording.rows["number"].tolist() == numbers
    assert (
        recording.rows["sample"].tolist()
        == [0] * 3 + [1] * 4 + [2] * 2 + [3] * 3 + [4] * 4 + [5] * 2
    )


@pytest.mark.parametrize("given", ["batch", None])
def test_a_batch_without_graphs_is_one(given):
    rnet = recorder("take")
    data = [{name: batch[name] for name in ("x", "edge_index")} for batch in DATA]
    recording = rnet.collect(data, rows=Nodes(sample=given))
    assert recording.rows["sample"].tolist() == [0] * 8 + [1] * 4 + [2] * 5
    assert recording.num_samples == 3


def test_nodes_are_counted_in_x_wherever_it_stands():
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.say = nn.Linear(3, 5)

        def forward(self, edge_attr: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.say(x) * edge_attr.sum()
            return out

    data = {"edge_attr": torch.randn(7, 2), "x": torch.randn(4, 3)}
    rnet = recorder_of(Weighted().eval(), "say", input_data=data)
    recording = rnet.collect([data], rows=Nodes())
    assert torch.equal(recording["say"][:], rnet.net.say(data["x"]))


def test_some_nodes_by_where_and_reductions_by_node_and_by_graph():
    rnet = recorder("say", "take")
    recording = rnet.collect(
        DATA,
        rows=Nodes(where=lambda batch: batch["x"][:, 0] > 0),
        reduce={
            "say": Mean(by=lambda batch: batch["x"][:, 1] > 0),
            "take": Mean(
                by=lambda batch: [f"graph {n}" for n in range(int(batch["batch"].max()) + 1)]
            ),
        },
    )
    found = seen(rnet.net, NAMES, lambda: [rnet.net(**batch) for batch in DATA])
    x, of = (torch.cat([batch[name] for batch in DATA]) for name in ("x", "batch"))
    say, take = (torch.cat(found[name]) for name in NAMES)
    for key, mean in recording["say"].items():
        torch.testing.assert_close(mean, say[(x[:, 0] > 0) & ((x[:, 1] > 0) == key)].mean(0))
    for number in set(of[x[:, 0] > 0].tolist()):
        wanted = take[(x[:, 0] > 0) & (of == number)].mean(0)
        torch.testing.assert_close(recording["take"][f"graph {number}"], wanted)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (torch.tensor([0, 0, 2, 2]), "sample 1 of batch 1 is empty"),
        (torch.tensor([1, 1, 1, 1]), "sample 0 of batch 1 is empty"),
        (torch.tensor([0, 0, -1, 1]), "negative in batch 1"),
        (torch.tensor([0.0, 0, 1, 1]), "float32 .*batch 1.*integers"),
        (torch.tensor([[0, 0, 1, 1]]), r"\(1, 4\) in batch 1.*\[nodes\] is \(4,\)"),
        (torch.tensor([0, 1]), r"\(4, 5\).*\[nodes, \.\.\.\], here \(2, \.\.\.\)"),
    ],
)
def test_graphs_that_are_refused(entry: Tensor, match: str) -> None:
    data: list[Any] = [DATA[0], {**DATA[1], "of": entry}]
    with pytest.raises(CollectError, match=match):
        recorder().collect(
            data,
            rows=Nodes(sample=lambda batch: batch.get("of", batch["batch"])),
            to_inputs=lambda batch: {name: batch[name] for name in ("x", "edge_index", "batch")},
        )


def test_a_last_graph_without_nodes_is_missed_where_graphs_are_counted():
    data = [{**DATA[0], "num_graphs": 3}, {**DATA[1], "num_graphs": 3}]
    with pytest.raises(CollectError, match="sample 2 of batch 1 is empty"):
        recorder().collect(
            data,
            rows=Nodes(),
            to_inputs=lambda batch: {name: batch[name] for name in ("x", "edge_index", "batch")},
        )


def test_a_graph_index_that_is_missing():
    with pytest.raises(CollectError, match="sample='graph', but batch 0 has no"):
        recorder().collect(DATA, rows=Nodes(sample="graph"))


@pytest.mark.parametrize("name", ["edge", "pool"])
def test_layers_of_edges_and_graphs_are_named(name):
    with pytest.raises(CollectError, match=rf"{name} \(.*\[nodes, \.\.\.\], here \(8, \.\.\.\)"):
        recorder(name).collect(DATA, rows=Nodes())


def test_as_many_edges_or_graphs_as_nodes_by_chance():
    rnet = recorder("edge")
    ring = graph([3, 4])
    ring["edge_index"] = ring["edge_index"][:, :7]
    for kinds in (["edge"], ["edge", "say"]):
        rnet.record(*kinds)
        with pytest.raises(CollectError, match=r"edge .*by chance"):
            rnet.collect([ring], rows=Nodes())
    rnet.record("pool")
    with pytest.raises(CollectError, match=r"pool .*by chance"):
        rnet.collect([graph([1, 1, 1])], rows=Nodes())
    rnet.record("say")
    assert rnet.collect([ring, graph([1, 1, 1])], rows=Nodes()).num_rows == 10


def test_graphs_of_torch_geometric():
    data = pytest.importorskip("torch_geometric.data")
    loading = pytest.importorskip("torch_geometric.loader")
    conv = pytest.importorskip("torch_geometric.nn").GCNConv(3, 4).eval()
    graphs = [data.Data(x=one["x"], edge_index=one["edge_index"]) for one in DATA]
    rnet = recorder_of(conv, "0-1", input_data=[DATA[0]["x"], DATA[0]["edge_index"]])
    recording = rnet.collect(
        loading.DataLoader(graphs, batch_size=2),
        rows=Nodes(),
        to_inputs=lambda batch: (batch.x, batch.edge_index),
    )
    assert recording.rows["sample"].tolist() == [0] * 8 + [1] * 4 + [2] * 5
    with torch.no_grad():
        alone = [conv(one["x"], one["edge_index"]) for one in DATA]
    torch.testing.assert_close(recording["0-1"], torch.cat(alone))


def test_graphs_are_counted_in_their_batch():
    data = {**graph([2, 3]), "batch": torch.tensor([0, 0, 1, 1, 2**40])}
    with pytest.raises(CollectError, match=r"the graph 1099511627776 in batch 0 of 5 nodes"):
        recorder().collect([data], rows=Nodes(), to_inputs=lambda batch: graph([2, 3]))
