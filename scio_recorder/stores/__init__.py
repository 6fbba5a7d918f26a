"""Stores for collected activations: on the device, in host memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Callable

from scio_recorder.errors import CollectError
from scio_recorder.nets.architecture import nearest
from scio_recorder.stores.disk import Disk
from scio_recorder.stores.disk_format.description import is_url
from scio_recorder.stores.disk_format.reader import SampleIds, to_ids
from scio_recorder.stores.files import DiskTensor
from scio_recorder.stores.kept_inputs import Calls, KeptCall, KeptCalls
from scio_recorder.stores.memory import Auto, Device, Host, HostBuffer, Plan
from scio_recorder.stores.store import (
    Column,
    DeviceBuffer,
    Held,
    Job,
    State,
    Store,
    StoreWriter,
    wait_for,
)

__all__ = [
    "Auto",
    "Calls",
    "Column",
    "Device",
    "DeviceBuffer",
    "Disk",
    "DiskTensor",
    "Held",
    "Host",
    "HostBuffer",
    "Job",
    "KeptCall",
    "KeptCalls",
    "Plan",
    "SampleIds",
    "State",
    "Store",
    "StoreWriter",
    "as_store",
    "to_ids",
    "wait_for",
]

# A place follows "disk:", and a URL is a place itself.
_WORDS: dict[str, Callable[[], Store]] = {"device": Device, "host": Host, "auto": Auto}


def as_store(given: str | Store | None) -> Store:
    """Return the store that a name stands for.

    Parameters
    ----------
    given : str, Store or None
        "auto", "device", "host", "disk:PATH", or the URL of a place in a bucket such as
        "s3://bucket/run" (also "gs://", "az://"); a store is returned unchanged.

    Returns
    -------
    Store
        A new one, in host memory for None.

    Raises
    ------
    CollectError
        The argument names no store.

    Examples
    --------
    >>> as_store("disk:runs/cifar10").path
    'runs/cifar10'
    """
    if isinstance(given, Store):
        return given
    name, _, place = given.partition(":") if isinstance(given, str) else ("", "", "")
    if given is None or (name in _WORDS and given == name):
        return _WORDS[name or "host"]()
    if name == "disk" and place:
        return Disk(place)
    if isinstance(given, str) and is_url(given):
        return Disk(given)
    known = {"gpu": "device", "cuda": "device"} | dict.fromkeys(("cpu", "ram", "memory"), "host")
    hint = f": write store={given.__name__}(...)" if isinstance(given, type) else ""
    if isinstance(given, os.PathLike):
        hint = f': write store="disk:{os.fspath(given)}"'
    elif name in known:
        hint = f': write store="{known[name]}"'
    elif name != "disk" and (near := nearest(name, [*_WORDS, "disk"])):
        hint = near
    elif name not in ("", "disk") and not place:
        hint = f': write store="disk:{name}" for a folder'
    words = "".join(f'"{word}", ' for word in _WORDS)
    raise CollectError(
        f'store={given!r} names no store{hint}. A store is {words}"disk:PATH", '
        'None, "s3://BUCKET/RUN", or an object from scio_recorder.stores'
    )
