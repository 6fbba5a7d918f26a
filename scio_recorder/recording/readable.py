"""What tables and files need to know of a recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from scio_recorder.stores.calls import Calls
from scio_recorder.stores.disk_format.ids import SampleIds

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture


class Readable(Protocol):
    """A recording, without the class that is built upon those who use this."""

    complete: bool
    sample_ids: SampleIds
    settings: dict[str, Any]

    @property
    def architecture(self) -> Architecture:
        """The labelled net."""

    @property
    def calls(self) -> Calls:
        """The calls that can be run again."""

    @property
    def relative_errors(self) -> Mapping[DepthIdx, float]:
        """What rounding cost."""

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    @property
    def stored(self) -> tuple[DepthIdx, ...]:
        """The layers of which there are samples."""

    @property
    def reductions(self) -> Mapping[DepthIdx, Any]:
        """The reductions of the others."""

    def parts(self, key: DepthIdx | str) -> Iterator[Tensor]:
        """Iterate over samples in parts."""

    def __getitem__(self, key: DepthIdx | str) -> Any: ...

    def __iter__(self) -> Iterator[DepthIdx]: ...
