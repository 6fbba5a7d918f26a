"""What a recorder prints is torchinfo's table, and a line that says what is recorded."""

from __future__ import annotations

import torchinfo
from torch import nn

from scio_recorder import Recorder

COLUMNS = ("input_size", "output_size", "num_params", "params_percent")


def test_table_is_torchinfos_and_ends_with_a_line() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU())
    rnet = Recorder(net, input_size=(1, 5))
    table = torchinfo.summary(
        net, input_size=(1, 5), col_names=COLUMNS, row_settings=("var_names", "depth"), verbose=0
    )
    line = "=" * len(str(table).splitlines()[0])
    head = f"Recorder instance for the following network\n{table}\nCurrently recording: "
    assert repr(rnet) == f"{head}None\n{line}"
    rnet.record((0, 1), (1, 3))
    assert repr(rnet) == f"{head}0-1, 1-3\n{line}"
