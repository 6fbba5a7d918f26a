"""The tally of one pair of layers, while block after block is compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from scio_recorder.analysis.comparing.findings import FirstDifference, LayerDifference, Worst
from scio_recorder.analysis.comparing.matching import Pair
from scio_recorder.analysis.comparing.measures import Figures


@dataclass
class Tally:
    """The tally of one pair of layers so far."""

    pair: Pair
    error: str | None = None
    figures: Figures = field(default_factory=Figures)
    noise: Figures | None = None
    differs: bool = False
    # The first place of a difference, and the first one although the inputs are equal.
    first: FirstDifference | None = None
    maker: FirstDifference | None = None
    worst: Worst | None = None
    # Whether its inputs were equal in all blocks so far.
    received_same: bool | None = True

    @property
    def inputs_equal(self) -> bool | None:
        """Whether its inputs are equal, in the sense of `LayerDifference`."""
        if self.maker is not None or not self.differs:
            return self.received_same if self.maker is None else True
        return None if self.first is None else self.first.inputs_equal

    def result(self) -> LayerDifference:
        """Return the findings about the layer."""
        pair, figures = self.pair, self.figures
        return LayerDifference(
            label=pair.reference.label,
            name=pair.reference.name,
            candidate_label=pair.partner.label,
            candidate_name=pair.partner.name,
            max_abs=figures.max_abs,
            max_rel=figures.max_rel,
            relative_error=figures.relative_error,
            cosine=figures.cosine,
            num_different=figures.num_different,
            num_elements=figures.num_elements,
            first_sample_id=None if self.first is None else self.first.sample_id,
            inputs_equal=self.inputs_equal,
            differs=self.differs,
            error=self.error,
            worst=self.worst,
            noise=None if self.noise is None else self.noise.relative_error,
        )
