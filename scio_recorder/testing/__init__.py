"""Tests for stores and reductions that others write, and for what must leave a network alone.

Derive a test class from :class:`StoreTests` or :class:`ReductionTests`, and pytest runs the tests
that the stores and reductions of this library pass. pytest itself is never imported here. Who
writes neither stores nor reductions would not miss this room.
"""

from __future__ import annotations

from scio_recorder.testing.reduction_tests import ReductionTests
from scio_recorder.testing.store_tests import StoreTests
from scio_recorder.testing.undisturbed import assert_undisturbed

__all__ = ["ReductionTests", "StoreTests", "assert_undisturbed"]
