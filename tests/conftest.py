"""What every test starts from: no network, one thread, known seeds."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator, Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import pytest
import torch
from hypothesis import settings

# No example counts as too slow on a busy machine, and they are the same each time.
is_campaign = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
settings.register_profile("tests", deadline=None, derandomize=not is_campaign)
settings.load_profile("tests")
# Bit-for-bit comparisons need sums in one order, and the tests run several processes at once.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in the docstrings of the package only: tests have none."""
    return [each for each in (yield) if type(each) is pytest.Module]


@pytest.fixture(autouse=True)
def _known_state() -> Iterator[None]:
    """Seeds are known before each test, and modes are those of a fresh process after it."""
    random.seed(0)
    np.random.seed(0)  # the global generator is the one that nets draw from
    # For a device that is not in use yet, `torch.manual_seed` would keep the stack of each call.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    yield
    left = not torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)
    assert left == (False, False)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> Iterator[None]:
    """Leave what was there before out of collections, which many tests ask for, and wait for."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def _unsynced() -> Iterator[None]:
    """Leave out the wait for the disk, which takes minutes in all where others use it too.

    No test can pull the plug: those of power loss keep track of what was synced themselves.
    """
    from scio_recorder.stores.disk_format import folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled, before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
