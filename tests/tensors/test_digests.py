"""Digests of tensors of any kind, which leave the tensors as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scio_recorder import RecomputeError, Recorder, RecordingError, open_recording
from scio_recorder.tensors.digests import WeightDigests, digest_of, weights_digest
from tests.harness import one_process, recorder


def by_hand(*tensors: torch.Tensor) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        # Torch takes microseconds for each byte of a storage.
        digest.update(tensor.clone().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(6, 4)[::2].t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj().resolve_conj(),
        torch.randn(3, dtype=torch.complex64).imag,
        # More than one piece, and rows that do not divide one.
        torch.arange(300_000, dtype=torch.int64).view(1000, 300),
        torch.arange(300_000, dtype=torch.int64).view(300, 1000).t(),
    ],
    ids=["plain", "view", "scalar", "empty", "bool", "complex", "part", "large", "large view"],
)
def test_a_digest_is_that_of_the_bytes(tensor: torch.Tensor) -> None:
    assert digest_of(tensor) == by_hand(tensor)
    assert digest_of([tensor, {"a": tensor.clone() + 1}]) == by_hand(tensor, tensor + 1)


def test_what_was_digested_can_be_resized() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    x = torch.ones(2, 3)
    rnet = recorder(net, "0", input_size=(2, 3), inputs=True)
    rnet.collect([x])
    weights_digest(net)
    WeightDigests().digest(net)
    for tensor in [*net.parameters(), *net.buffers(), x]:
        # Sharded networks do this to give memory back.
        size = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)


class Pair(torch.Tensor):
    """Integers and a scale, as quantised weights are."""

    @staticmethod
    def __new__(cls, ints: torch.Tensor, scale: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, ints.shape, dtype=scale.dtype)
        made.ints, made.scale = ints, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["ints", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [a.ints * a.scale if isinstance(a, Pair) else a for a in args]
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def test_a_tensor_that_holds_others_is_digested_by_them() -> None:
    ints, scale = torch.arange(6).view(2, 3), torch.tensor(0.5)
    digests = {
        digest_of(Pair(ints, scale)),
        digest_of(Pair(ints + 1, scale)),
        digest_of(Pair(ints, scale * 2)),
    }
    assert len(digests) == 3


class Hiding(Pair):
    """The same, without a word of what it holds."""

    __tensor_flatten__ = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].ints, args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_tensor_that_hides_what_it_holds_is_digested_by_its_values() -> None:
    ints, scale = torch.arange(6).view(2, 3), torch.tensor(0.5)
    assert digest_of(Hiding(ints, scale)) == by_hand(ints * scale)


def test_what_holds_nothing_is_digested_by_its_kind() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert digest_of(freed) == digest_of(torch.empty(3, device="meta"))
    assert digest_of(freed) != digest_of(torch.empty(4, device="meta"))
    assert digest_of(torch.eye(3).to_sparse()) == by_hand(torch.eye(3))


@pytest.fixture
def mesh() -> Any:
    with one_process():
        yield init_device_mesh("cpu", (1,))


def test_sharded_weights(mesh: Any, tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU())
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, [Shard(0)]))
    assert isinstance(net[0].weight, DTensor)
    before, weights = weights_digest(net), WeightDigests()
    first = weights.digest(net)
    assert before.startswith("local-")
    with torch.no_grad():
        net[0].weight.to_local().add_(1)
    assert weights_digest(net) != before
    assert weights.digest(net) != first


@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_read_again_after_a_step(fused: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    rnet = recorder(net, "1", input_size=(1, 4), inputs=True)
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    with rnet.collecting(store="host") as collection:
        for _ in range(2):
            net(torch.randn(5, 4)).sum().backward()
            optimizer.step()
    net.load_state_dict(before)
    batches = collection.recording.recompute_batches(rnet, "1")
    assert torch.equal(next(batches)["1"], collection.recording["1"][:5])
    with pytest.raises(RecomputeError, match="weights have changed since the collection"):
        next(batches)
    weights = WeightDigests()
    first = weights.digest(net)
    assert weights.digest(net) == first
    optimizer.step()
    assert weights.digest(net) == digest_of(list(net.parameters())) != first


def test_a_sharded_net_is_collected_and_goes_on_training(mesh: Any, tmp_path: Any) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), torch.randn(3, 4)
    wanted = net(x).detach()
    rnet = recorder(net, "0", "2", input_size=(1, 4), inputs=True)
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh)
    store = f"disk:{tmp_path}/run"
    rnet.collect([x], store=store)
    assert rnet.collect([x], store=store, resume=True).complete
    assert torch.equal(open_recording(tmp_path / "run")["2"][:], wanted)
    output = net(x)
    output.sum().backward()
    assert torch.equal(output, wanted)
    with torch.no_grad():
        net[2].weight.to_local().add_(1)
    with pytest.raises(RecordingError, match="weights"):
        rnet.collect([x], store=store, resume=True)


def test_weights_without_memory_do_not_forbid_to_collect(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Flatten(), nn.ReLU())
    rnet = Recorder(net, input_size=(2, 3))
    # As where weights lie on disk and are fetched by hooks.
    net.register_parameter("elsewhere", nn.Parameter(torch.empty(4, device="meta")))
    rnet.record("1")
    x = torch.randn(2, 3)
    rnet.collect([x], store=f"disk:{tmp_path}/run")
    rnet.collect([x], store=f"disk:{tmp_path}/run", resume=True)
    assert torch.equal(open_recording(tmp_path / "run")["1"][:], x.relu())
