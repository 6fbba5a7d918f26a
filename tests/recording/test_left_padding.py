"""Padding on the left, which many networks count as positions: said once, where it may be so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Tokens
from scio_recorder.errors import CollectWarning
from tests.capture.test_watch_libraries import gpt2

LEFT = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}
PLACES = (LEFT["attention_mask"].cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("rows", [None, Tokens()])
def test_padding_on_the_left_that_is_counted_is_said_once(rows: Tokens | None) -> None:
    rnet = Recorder(gpt2().eval(), input_data=LEFT)
    rnet.record("transformer.h.0")
    padded_right = {name: value.flip(1) for name, value in LEFT.items()}
    with pytest.warns(CollectWarning, match="padded on the left") as caught:
        rnet.collect([padded_right, LEFT, LEFT], rows=rows)
    assert len(caught) == 1
    for quiet in ([padded_right], [{**LEFT, "position_ids": PLACES}], [LEFT["input_ids"]]):
        rnet.collect(quiet, rows=rows)
    # A first column that nobody has, as of a text without tokens, is no padding before a text.
    nothing = {**LEFT, "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}
    rnet.collect([nothing], rows=None)


def test_what_the_warning_says_makes_left_padding_as_if_it_were_not_there() -> None:
    rnet = Recorder(gpt2().eval(), input_data=LEFT)
    rnet.record("transformer.h.0")
    alone = {name: value[1:, 2:] for name, value in LEFT.items()}
    rnet(**alone)
    expected = rnet.activations["transformer.h.0"][0].detach()
    with pytest.warns(CollectWarning, match=r"\(attention_mask.cumsum\(-1\) - 1\).clamp\(min=0\)"):
        counted = rnet.collect([LEFT], rows=Tokens()).by_sample("transformer.h.0")[1]
    given = rnet.collect([{**LEFT, "position_ids": PLACES}], rows=Tokens())
    torch.testing.assert_close(given.by_sample("transformer.h.0")[1], expected)
    assert not torch.allclose(counted, expected, atol=1e-3)


def test_a_wrapper_that_hands_positions_on_is_warned_of() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2().eval()

        def forward(self, **kwargs: Any) -> Any:
            return self.model(**kwargs)

    rnet = Recorder(Wrapper(), input_data=LEFT)
    rnet.record("model.transformer.h.0")
    with pytest.warns(CollectWarning, match="padded on the left"):
        rnet.collect([LEFT], rows=Tokens())


def test_a_network_that_takes_no_positions_is_let_be() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.embed(input_ids)

    rnet = Recorder(Net(), input_data=LEFT)
    rnet.record("embed")
    rnet.collect([LEFT], rows=Tokens())
