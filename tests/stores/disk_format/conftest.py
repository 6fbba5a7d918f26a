from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from scio_recorder.stores.disk_format import folder as system


@pytest.fixture(scope="package", autouse=True)
def unsynced() -> Iterator[None]:
    """Leave out the wait for the disk, which takes minutes in all where others use it too.

    No test can pull the plug: those of power loss keep track of what was synced themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield
