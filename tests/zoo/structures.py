"""Nets whose modules return, or take, something else than one tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.zoo.base import Net, Table, linear, random_tensors, vectors

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView

    from torch import Tensor, nn

CASES = Table()


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class Plain:
    value: Tensor
    extras: list[Tensor] = field(default_factory=list)
    note: str = "as it is"


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    inner: Plain


@dataclass(slots=True)
class Slotted:
    value: Tensor


class Holder:
    """An object that is no container, with tensors among its attributes."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.name = "holder"


class Columns(MutableMapping[str, Any]):
    """A mapping of tensors that yields its rows, as a TensorDict does, in place of its keys."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns

    def __repr__(self) -> str:
        return f"Columns({self._columns})"

    def __getitem__(self, key: str) -> Tensor:
        return self._columns[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._columns[key] = value

    def __delitem__(self, key: str) -> None:
        del self._columns[key]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __iter__(self) -> Iterator[Any]:
        # A row has no rows of its own: tensors without dimensions refuse to be iterated over.
        columns = self._columns.items()
        return (Columns({key: value[at] for key, value in columns}) for at in range(len(self)))

    def keys(self) -> KeysView[str]:
        return self._columns.keys()

    def values(self) -> Any:
        return self._columns.values()

    def items(self) -> Any:
        return self._columns.items()


def _returning(make: Any, take: Any) -> nn.Module:
    """Linear, a module that returns `make(x)`, and a last layer on `take` of that."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(take(net.inner(net.first(x))))

    inner = Net(lambda net, x: make(net.linear(x)), linear=linear())
    return Net(forward, first=linear(), inner=inner, last=linear())


@CASES.add(vectors)
def named_tuple_output() -> nn.Module:
    return _returning(lambda y: Pair(y * 2, None), lambda out: out.left)


@CASES.add(vectors)
def tuple_output() -> nn.Module:
    return _returning(lambda y: (y, (y + 1, None), 3), lambda out: out[1][0].add_(1))


@CASES.add(vectors)
def list_output() -> nn.Module:
    return _returning(lambda y: [y, y * 2], lambda out: out[0] + out[1])


@CASES.add(vectors)
def dict_output() -> nn.Module:
    return _returning(lambda y: {"a": y * 1, 7: [y * 2, None]}, lambda out: out["a"].mul_(2))


@CASES.add(vectors)
def ordered_dict_output() -> nn.Module:
    def make(y: Tensor) -> OrderedDict[str, Tensor]:
        return OrderedDict(z=y * 1, a=y * 2)

    return _returning(make, lambda out: out["z"].add_(out["a"]))


@CASES.add(vectors)
def dataclass_output() -> nn.Module:
    return _returning(lambda y: Plain(y * 1, [y * 2]), lambda out: out.value.add_(out.extras[0]))


@CASES.add(vectors)
def frozen_dataclass_output() -> nn.Module:
    def make(y: Tensor) -> Frozen:
        return Frozen(y * 1, Plain(y * 2, note="inside"))

    return _returning(make, lambda out: out.value.add_(out.inner.value))


@CASES.add(vectors)
def slotted_dataclass_output() -> nn.Module:
    return _returning(lambda y: Slotted(y * 1), lambda out: out.value.add_(1))


@CASES.add(vectors)
def object_output() -> nn.Module:
    return _returning(lambda y: Holder(y * 1), lambda out: out.value.add_(1))


@CASES.add(vectors)
def namespace_output() -> nn.Module:
    def take(out: SimpleNamespace) -> Tensor:
        out.value = out.value * 2
        return out.value

    return _returning(lambda y: SimpleNamespace(value=y * 1), take)


@CASES.add(vectors)
def nested_output() -> nn.Module:
    def make(y: Tensor) -> Any:
        return {"deep": [Pair(y * 1, y * 2), {"deeper": Plain(y * 3, [y * 4])}], "none": None}

    return _returning(make, lambda out: out["deep"][1]["deeper"].extras[0].add_(1))


@CASES.add(vectors)
def none_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.silent(x)
        return net.last(x)

    return Net(forward, silent=Net(lambda _net, _x: None), last=linear())


@CASES.add(vectors)
def same_tensor_twice() -> nn.Module:
    return _returning(lambda y: (y, y), lambda out: out[0].add_(out[1]))


@CASES.add(vectors)
def structured_net_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.first(x)
        return {"logits": net.last(hidden), "hidden": Pair(hidden, None)}

    return Net(forward, first=linear(), last=linear())


@CASES.add(vectors)
def assigns_into_returned_container() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.inner(x)
        out["value"] = net.last(out["value"])
        out["new"] = out["value"]
        rows = net.rows(x)
        rows.append(out["value"])
        rows[0] = out["value"]
        record = net.record(x)
        record.value = out["value"]
        return out["value"] + sum(row.sum() for row in rows)

    return Net(
        forward,
        inner=Net(lambda net, x: {"value": net.linear(x)}, linear=linear()),
        rows=Net(lambda net, x: [net.linear(x), x * 2], linear=linear()),
        record=Net(lambda net, x: Plain(net.linear(x)), linear=linear()),
        last=linear(),
    )


@CASES.add(lambda seed: ((), {"query": vectors(seed)[0][0], "key": vectors(seed + 1)[0][0]}))
def keyword_only_inputs() -> nn.Module:
    def forward(net: Any, *, query: Tensor, key: Tensor) -> Tensor:
        return net.last(left=query, right=key)

    def last(net: Any, *, left: Tensor, right: Tensor) -> Tensor:
        return net.linear(left) + right

    return Net(forward, last=Net(last, linear=linear()))


@CASES.add(lambda seed: (vectors(seed)[0], {"scale": vectors(seed + 1)[0][0]}))
def mixed_inputs() -> nn.Module:
    return Net(lambda net, x, scale=None: net.linear(x) * scale, linear=linear())


@CASES.add(lambda seed: (({"a": vectors(seed)[0][0], "b": [vectors(seed + 1)[0][0]]},), {}))
def dict_input() -> nn.Module:
    return Net(lambda net, x: net.linear(x["a"]) + x["b"][0], linear=linear())


@CASES.add(lambda seed: ((random_tensors((3, 4), (3, 4))(seed)[0],), {}))
def tuple_input() -> nn.Module:
    return Net(lambda net, pair: net.linear(pair[0]) + pair[1], linear=linear())


@CASES.add(lambda seed: ((Columns({"x": vectors(seed)[0][0], "y": vectors(seed + 1)[0][0]}),), {}))
def mapping_that_yields_rows() -> nn.Module:
    """Modules add columns to one mapping and hand it on."""

    def forward(net: Any, columns: Columns) -> Columns:
        columns["h"] = net.linear(columns["x"])
        columns["h"].relu_()
        return columns

    def last(net: Any, columns: Columns) -> Tensor:
        return net.linear(columns["h"]) + columns["y"]

    parts = {"first": Net(forward, linear=linear()), "last": Net(last, linear=linear())}
    return Net(lambda net, columns: net.last(net.first(columns)), **parts)
