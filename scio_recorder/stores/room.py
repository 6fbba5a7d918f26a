"""The bytes that a collection takes, and the stores that have room for them."""

from __future__ import annotations

import importlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.filesize import decimal

from scio_recorder.layer import DepthIdx, TensorSpec, map_leaves
from scio_recorder.nets.architecture import Architecture
from scio_recorder.tensors.arguments import whole

# The net and other programs need memory too.
_USABLE = {"device": 0.5, "host": 0.9, "disk": 0.95}


@dataclass(frozen=True)
class Plan:
    """Bytes by layer, and free bytes by store.

    Parameters
    ----------
    num_samples : int
        The expected number of samples.
    num_bytes : mapping of (int, int) to int
        The bytes of all samples of each layer.
    free_bytes : mapping of str to int
        The free bytes on the "device" (if it is a GPU), in "host" memory and on the "disk".
    names : mapping of (int, int) to str
        The names under which layers are shown.
    unit : str, default "samples"
        The word for the counted rows.

    Examples
    --------
    >>> plan = Plan(10, {(1, 1): 4000}, {"host": 5000, "disk": 0}, {(1, 1): "1-1 fc (Linear)"})
    >>> plan.total_bytes, plan.stores
    (4000, ('host',))
    >>> print(plan)
    10 samples take 4.0 kB
      1-1 fc (Linear): 4.0 kB
    host: 5.0 kB free, enough
    disk: 0 bytes free, not enough
    """

    num_samples: int
    num_bytes: Mapping[DepthIdx, int]
    free_bytes: Mapping[str, int]
    names: Mapping[DepthIdx, str]
    unit: str = "samples"

    @property
    def total_bytes(self) -> int:
        """The bytes of all layers together."""
        return sum(self.num_bytes.values())

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores with enough room, the fastest first."""
        return tuple(
            store
            for store, free in self.free_bytes.items()
            if self.total_bytes <= _USABLE[store] * free
        )

    def __str__(self) -> str:
        lines = [f"{self.num_samples} {self.unit} take {decimal(self.total_bytes)}"]
        lines += [f"  {self.names[k]}: {decimal(n)}" for k, n in self.num_bytes.items()]
        for store, free in self.free_bytes.items():
            verdict = "enough" if store in self.stores else "not enough"
            lines.append(f"{store}: {decimal(free)} free, {verdict}")
        return "\n".join(lines)


def make_plan(
    architecture: Architecture,
    labels: Sequence[DepthIdx],
    num_samples: int,
    device: torch.device,
    row_dims: int | None = None,
) -> Plan:
    """Return the plan for layers, from the shapes at labelling.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    labels : sequence of (int, int)
        The requested layers.
    num_samples : int
        The expected number of samples.
    device : torch.device
        The net's device, whose free memory counts.
    row_dims : int, optional
        If rows are not samples: the number of leading dimensions that count rows.

    Returns
    -------
    Plan
        Bytes by layer, and free bytes by store.

    Raises
    ------
    CollectError
        ``num_samples`` is not a whole number from 0 on.
    """
    whole("num_samples", num_samples, 0)
    free: dict[str, int] = {}
    if device.type == "cuda":
        free["device"] = torch.cuda.mem_get_info(device)[0]
    free["host"] = _free_host_bytes()
    # The working directory has a disk also if it has been deleted and has no path.
    free["disk"] = shutil.disk_usage(os.curdir).free
    num_bytes = dict.fromkeys(labels, 0)

    def add(label: DepthIdx, spec: TensorSpec | None) -> None:
        if spec is not None:
            rows = math.prod(spec.shape[: 1 if row_dims is None else row_dims])
            num_bytes[label] += spec.nbytes // max(1, rows) * num_samples

    for label in labels:
        map_leaves(partial(add, label), architecture[label].output_spec)
    names = {label: str(architecture[label]) for label in labels}
    unit = "samples" if row_dims is None else "rows"
    return Plan(num_samples, num_bytes, free, names, unit)


def _free_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping, also inside a container."""
    lines = [line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    if lines:
        free = int(lines[0].split()[1]) * 1024
    else:
        # Systems without such a file are those where it is installed.
        free = importlib.import_module("psutil").virtual_memory().available
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdecimal():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []
