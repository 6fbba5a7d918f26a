"""One process of sharded nets, which `test_sharded.py` runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import scio_recorder
from scio_recorder import (
    CollectError,
    LabellingError,
    RecomputeError,
    Recorder,
    UnsupportedNetError,
    layer,
    open_recording,
)
from scio_recorder.errors import ShardWarning
from scio_recorder.stores import Disk

CPU = torch.device("cpu")
NAMES = ("0", "1", "2", "3", "4")
SIZE = (4, 6, 4)
# Torch 2.8 adds the gradients of gloo's processes up, where it should take their mean.
FSDP2_ADDS_UP = TorchVersion(torch.__version__) < (2, 10)


class Scaled(nn.Linear):
    """Notes each pass in a buffer, in a container and in an attribute."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("passes", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.seen.append(len(x))
        self.latest = len(self.seen)
        return super().forward(x)


class Listed(nn.Module):
    """A net with a container that is not called itself."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = first, nn.ModuleList([second])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner[0](self.first(x))
        return hidden


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Scaled(6, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def fsdp2(net: nn.Sequential) -> nn.Module:
    for module in (net[0], net[2], net):
        fully_shard(module)
    return net


def fsdp2_without_root(net: nn.Sequential) -> nn.Module:
    for module in (net[0], net[2]):
        fully_shard(module)
    return net


def fsdp1(net: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=CPU)


def fsdp1_with_original_parameters(net: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        net, auto_wrap_policy=policy, device_id=CPU, use_orig_params=True
    )


def fsdp1_as_a_whole(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=CPU, use_orig_params=True)


def tensor_parallel(net: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    styles = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "3": SequenceParallel(),
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh or init_device_mesh("cpu", (2,)), styles)


def grid(net: nn.Sequential) -> nn.Module:
    """Shard a net by two processes in one way, and by two of such pairs in the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(net, mesh["tensor"])
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh["data"])
    return net


KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp2": fsdp2,
    "fsdp2_without_root": fsdp2_without_root,
    "fsdp1": fsdp1,
    "fsdp1_with_original_parameters": fsdp1_with_original_parameters,
    "ddp": DistributedDataParallel,
    "tensor_parallel": tensor_parallel,
    "grid": grid,
}
SIZES = {"tensor_parallel": (2,), "grid": (4,)}
WRAPPERS = ("fsdp1", "fsdp1_with_original_parameters", "ddp")


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_names(net: nn.Module) -> dict[str, str]:
    """Return the names of the layers in a net by those that they had before it was sharded."""
    wrappers = ("_fsdp_wrapped_module", "module", "_net")
    names = {}
    for name, module in net.named_modules():
        if not isinstance(module, (FullyShardedDataParallel, DistributedDataParallel)):
            names[".".join(part for part in name.split(".") if part not in wrappers)] = name
    return {name: names[name] for name in NAMES}


def trained(call: nn.Module, forward: Callable[[Tensor], Tensor], data: Tensor) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(call.parameters(), lr=0.1)
    for _ in range(3):
        loss = whole(forward(data)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def truth_of(data: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    net, outputs, gradients = make_net(), {}, {}
    hidden = data
    for name, module in zip(NAMES, net, strict=True):
        hidden = outputs[name] = module(hidden)
        hidden.register_hook(lambda gradient, name=name: gradients.update({name: gradient}))
    hidden.sum().backward()
    net = make_net()
    return outputs, gradients, list(trained(net, net, data))


def check(kind: str, data: Tensor) -> None:
    """Compare a net that is labelled first, and one that is sharded first, with one process."""
    outputs, gradients, losses = truth_of(data)
    if FSDP2_ADDS_UP and kind.startswith(("fsdp2", "grid")):
        bare = KINDS[kind](make_net())
        losses = list(trained(bare, bare, data))
    before = torch.get_rng_state()
    for is_sharded_first in (False, True):
        net = make_net()
        torch.set_rng_state(before)
        if is_sharded_first:
            call = net = KINDS[kind](net)
            rnet = labelled_without_trace(net)
            call = rnet
        else:
            rnet = Recorder(net, input_size=SIZE)
            call = KINDS[kind](rnet) if kind in WRAPPERS else rnet
            if call is rnet:
                KINDS[kind](net)
        assert torch.equal(torch.get_rng_state(), before)
        names = plain_names(rnet.net) if is_sharded_first else dict(zip(NAMES, NAMES, strict=True))
        types = [rnet.architecture[name].type_name for name in names.values()]
        assert types == ["Linear", "ReLU", "Scaled", "LayerNorm", "Linear"]
        compare(kind, rnet, call, names, data, outputs, gradients)
        rnet.remove()
        for loss, wanted in zip(trained(call, call, data), losses, strict=True):
            torch.testing.assert_close(loss, wanted)


def labelled_without_trace(net: nn.Module) -> Recorder:
    ran: list[object] = []
    handle = net.register_forward_hook(lambda *call: ran.append(call))
    scaled = next(module for module in net.modules() if isinstance(module, Scaled))
    rnet = Recorder(net, input_size=SIZE)
    with pytest.raises(LabellingError):
        Recorder(net, input_size=(4, 6, 5))
    assert (scaled.passes, scaled.seen, ran) == (0, [], [])
    assert not hasattr(scaled, "latest")
    assert rnet.training
    assert all(module.training for module in net.modules())
    handle.remove()
    return rnet


def compare(
    kind: str,
    rnet: Recorder,
    call: nn.Module,
    names: dict[str, str],
    data: Tensor,
    outputs: dict[str, Tensor],
    gradients: dict[str, Tensor],
) -> None:
    # Sums over processes are taken in another order.
    same = torch.equal if kind not in SIZES else partial(torch.allclose, rtol=1e-4, atol=1e-5)
    rank = dist.get_rank() % 2

    def part_of(tensor: Tensor, name: str) -> Tensor:
        is_local = kind in SIZES and name in ("0", "1")
        return tensor.chunk(2, -1)[rank] if is_local else tensor

    rnet.record(*names.values(), gradients=True)
    for _ in range(3):
        # What follows a forward pass without a backward pass is another state of the shards.
        call(data)
        whole(call(data)).sum().backward()
        for name, here in names.items():
            assert same(whole(rnet.activations[here]), part_of(outputs[name], name)), (kind, name)
            assert same(whole(rnet.gradients[here]), part_of(gradients[name], name)), (kind, name)
        again = Recorder(rnet.net, input_size=SIZE) if call is rnet else rnet
        assert again.architecture == rnet.architecture or kind in (
            "fsdp2",
            "fsdp2_without_root",
            "grid",
        )
    rnet.zero_grad()


def stop_nowhere(data: Tensor) -> None:
    """FSDP is not left in the middle of a pass: training goes on with the new weights."""
    for shard in (fsdp2, fsdp1, DistributedDataParallel):
        if shard is fsdp2 and FSDP2_ADDS_UP:
            continue
        net = shard(make_net())
        rnet = Recorder(net, input_size=SIZE)
        first = plain_names(net)["0"]
        rnet.record(first)
        alone = make_net()
        pairs = zip(trained(rnet, rnet, data), trained(alone, alone, data), strict=True)
        for loss, wanted in pairs:
            torch.testing.assert_close(loss, wanted)
            # After a backward pass, FSDP2 has put the shards back.
            assert scio_recorder.compare(rnet, rnet, [data, data]).first is None
            expected = alone[0](data).detach()
            torch.testing.assert_close(rnet.extract(data)[first].detach(), expected)
            collected = rnet.collect([data], stop_early=True)
            torch.testing.assert_close(collected[first], expected)


def count_whole_parameters() -> None:
    """All processes know a net by the same figures, also where their shards have other sizes."""

    def make_odd() -> nn.Module:
        return Listed(nn.Linear(3, 4), nn.Linear(4, 5))

    plain = Recorder(make_odd(), input_size=(2, 3)).architecture
    wanted = {name: plain[name].num_params for name in ("", "first", "inner", "inner.0")}
    assert wanted == {"": 41, "first": 16, "inner": 25, "inner.0": 25}
    for shard in (fully_shard, fsdp1, fsdp1_with_original_parameters, fsdp1_as_a_whole):
        net = shard(make_odd())
        architecture = Recorder(net, input_size=(2, 3)).architecture
        for name in dict(net.named_modules()):
            short = name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
            assert architecture[name].num_params == wanted[short], (shard, name)
        fingerprints: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(fingerprints, architecture.fingerprint)
        assert len(set(fingerprints)) == 1


def refuse_a_recorder_that_is_sharded(data: Tensor) -> None:
    """Its network can't run without what shards the recorder."""
    for shard in (fully_shard, fsdp1, fsdp1_with_original_parameters):
        rnet = Recorder(make_net(), input_size=SIZE)
        rnet.record("0")
        call = shard(rnet)
        call(data).sum().backward()
        with pytest.raises(UnsupportedNetError, match="sharded by FSDP"):
            rnet.collect([data])
        with pytest.raises(UnsupportedNetError, match="sharded by FSDP"):
            rnet.extract(data)
        with rnet.collecting() as collection:
            call(data)
        assert torch.equal(collection.recording["0"], make_net()[0](data))


def refuse_before_anything_runs(data: Tensor) -> None:
    """What FSDP leaves of a net between passes is not run by itself, nor put back."""
    for shard in (fsdp2, fsdp1):
        net = shard(make_net())
        rnet = Recorder(net, input_size=SIZE)
        rnet.record("*", inputs=True)
        rnet(data)
        ran: list[object] = []
        net.register_forward_pre_hook(lambda *call, ran=ran: ran.append(call))
        inner = next(module for module in net.modules() if type(module) is nn.ReLU)
        with pytest.raises(UnsupportedNetError, match="part of a network that FSDP has sharded"):
            Recorder(inner, input_size=SIZE)
        with pytest.raises(UnsupportedNetError, match="in one process"):
            rnet.sweep(data, data + 1, torch.sum, estimate=True)
        rnet.record("", inputs=True)
        rnet(data)
        ran.clear()
        with pytest.raises(RecomputeError, match="FSDP provides parameters"):
            rnet.recompute("*")
        assert not ran


def record_stages(data: Tensor) -> None:
    """Each process records its stage of a pipeline, a pass for each microbatch."""
    wanted = [truth_of(microbatch) for microbatch in data.chunk(2)]
    rank, net = dist.get_rank(), make_net()
    names = (NAMES[:2], NAMES[2:])[rank]
    part = net[:2] if rank == 0 else net[2:]
    rnet = Recorder(part, input_size=(2, 6, (4, 6)[rank]))
    rnet.record(*names, gradients=True)
    gradients_seen: list[dict[Any, Tensor]] = []
    rnet.on_gradients(gradients_seen.append)
    stage = PipelineStage(part, rank, 2, CPU)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.sum())
    keywords = {"target": torch.zeros(len(data))} if rank else {}
    with rnet.watch() as passes:
        schedule.step(*([] if rank else [data]), **keywords)
    # The first pass tells shapes, and is differentiated in the last stage.
    assert len(passes) == 3
    for name in names:
        label = rnet.architecture[name].label
        for recorded, gradients_there, truth in zip(
            passes[1:], gradients_seen[-2:], wanted, strict=True
        ):
            outputs, gradients, _ = truth
            assert torch.equal(recorded[name], outputs[name])
            assert torch.equal(gradients_there[label], gradients[name])


def shard_the_rest_after(data: Tensor) -> None:
    """A part that was labelled is not the root of what is sharded around it."""
    net = make_net()
    fully_shard(net[0])
    Recorder(net[0], input_size=SIZE)
    fully_shard(net)
    rnet = Recorder(net, input_size=SIZE)
    rnet.record("0")
    rnet(data).sum().backward()
    assert torch.equal(rnet.activations["0"], make_net()[0](data))
    assert len(net.state_dict()) == 9


def tell_shards() -> None:
    """What a layer returns of a tensor-parallel net is marked, and warned of, once."""
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(1)),
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    }
    rank = dist.get_rank()
    dims = {"0": 2, "1": 2, "2": 1, "3": 1, "4": 2}
    for is_sharded_first in (False, True):
        for has_gradients in (True, False):
            net = nn.Sequential(*make_net(), nn.Flatten())
            if is_sharded_first:
                parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
            rnet = Recorder(net, input_size=SIZE)
            if not is_sharded_first:
                assert all(row.shard is None for row in rnet.architecture.values())
                parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
            rnet.record(*dims, "5")
            with torch.set_grad_enabled(has_gradients):
                with pytest.warns(ShardWarning, match=f"0.*shard {rank} of 2 along dimension 2"):
                    rnet(torch.ones(SIZE))
                with warnings.catch_warnings():
                    warnings.simplefilter("error", ShardWarning)
                    rnet(torch.ones(SIZE))
            for name, dim in dims.items():
                assert rnet.architecture[name].shard == layer.Shard(dim, rank, 2), name
            assert rnet.architecture["5"].shard == layer.Shard(None, None, 0)
            assert "shard" in str(rnet.architecture)
    whole_net = parallelize_module(make_net(), init_device_mesh("cpu", (2,)), KEPT_WHOLE)
    rnet = Recorder(whole_net, input_size=SIZE)
    rnet.record("0", "2", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardWarning)
        rnet(torch.ones(SIZE))


class Local(nn.Linear):
    """Computes with its own part of its parameters, as layers of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        parts: list[Any] = list(self.parameters())
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
        return nn.functional.linear(x, *parts)


def tell_shards_that_local_weights_make(data: Tensor) -> None:
    """The product with columns of a weight is a shard; a sum over shards is none, nor known."""
    torch.manual_seed(0)
    net = nn.Sequential(Local(4, 6), nn.SiLU(), Local(6, 4, bias=False), Local(4, 6, bias=False))
    wanted = net[:2](data)
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for layer_of_net, dim in ((net[0], 0), (net[2], 1), (net[3], 0)):
        for name, parameter in layer_of_net.named_parameters():
            spread = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)]))
            setattr(layer_of_net, name, spread)
    rnet = Recorder(net, input_size=SIZE)
    unknown = layer.Shard(None, None, 0)
    of_columns = layer.Shard(2, rank, 2)
    shards = [rnet.architecture[str(at)].shard for at in range(4)]
    assert shards == [of_columns, of_columns, unknown, unknown]
    rnet.record("1")
    with pytest.warns(ShardWarning):
        rnet(data)
    torch.testing.assert_close(rnet.activations["1"], wanted.chunk(2, -1)[rank])


def compare_with_one_process(data: Tensor) -> None:
    """Shards are left out where they are beside whole outputs, and whole outputs are compared."""
    alone = Recorder(make_net(), input_size=SIZE)
    shared = Recorder(tensor_parallel(make_net()), input_size=SIZE)
    with pytest.warns(ShardWarning, match="'0', '1' can't be compared.*shard"):
        difference = scio_recorder.compare(alone, shared, [data], atol=1e-5)
    assert difference.first is None
    assert difference.unmatched.reference == ("0", "1")
    alone.net[2].bias.data += 1
    with pytest.warns(ShardWarning):
        first = scio_recorder.compare(shared, alone, [data], atol=1e-5).first
    assert first is not None
    assert first.layer.name == "2"
    assert scio_recorder.compare(shared, shared, [data]).first is None


class Rooted(nn.Module):
    """A layer whose own code has a number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).square() + self.number).sqrt()


def compare_operations_in_step(data: Tensor) -> None:
    """All processes run the networks once more, or none does."""
    nets = [nn.Sequential(Rooted(number)) for number in (1.0, 2.0)]
    nets[1].load_state_dict(nets[0].state_dict())
    mesh = init_device_mesh("cpu", (2,))
    both = [Recorder(fully_shard(net, mesh=mesh), input_data=data) for net in nets]
    first = scio_recorder.compare(*both, [data], operations=True).first
    assert first is not None
    assert first.operation is not None
    assert first.operation.name == "0/add:0"
    # One sees no difference, and runs them with the other.
    tolerant = dist.get_rank() == 1
    first = scio_recorder.compare(*both, [data], atol=9.0 * tolerant, operations=True).first
    assert (first is None) == tolerant
    assert first is None or (first.operation and first.operation.name == "0/add:0")


KEPT_WHOLE = {
    "0": ColwiseParallel(output_layouts=Replicate()),
    "2": RowwiseParallel(input_layouts=Replicate()),
    "4": ColwiseParallel(use_local_output=False),
}


def collect_on_a_grid(store: str) -> None:
    """Two pairs of processes have other samples, and those of a pair the same ones."""
    pair, place = divmod(dist.get_rank(), 2)
    batches = list(torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(2))[pair])
    rnet = Recorder(grid(make_net()), input_size=SIZE)
    rnet.record("2", "4")
    path = f"{store}-{pair}"
    rnet.collect(batches, store="host" if place else Disk(path))
    dist.barrier()
    recording = open_recording(path, verify=True)
    assert recording.complete
    outputs = [truth_of(batch)[0] for batch in batches]
    for name in ("2", "4"):
        wanted = torch.cat([output[name].detach() for output in outputs])
        torch.testing.assert_close(recording[name][:], wanted, rtol=1e-4, atol=1e-5)
    rnet.record("0")
    with pytest.raises(CollectError, match="each process has only a shard"):
        rnet.collect(batches)


def main(rank: int, processes: int, store: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=processes, init_method=f"file://{store}")
    data = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    for kind in KINDS:
        if processes in SIZES.get(kind, (1, 2)):
            check(kind, data)
    if processes == 2:
        tell_shards()
        tell_shards_that_local_weights_make(data)
        compare_with_one_process(data)
        compare_operations_in_step(data)
        record_stages(data)
        refuse_before_anything_runs(data)
    if processes == 4:
        collect_on_a_grid(store)
    if processes <= 2:
        count_whole_parameters()
        stop_nowhere(data)
        refuse_a_recorder_that_is_sharded(data)
        shard_the_rest_after(data)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
