"""Rows that are tokens or nodes, beside tables that plain hooks and loops by hand give."""

from __future__ import annotations

import pytest
import torch

from scio_recorder import Tokens, open_recording
from scio_recorder.stores import Disk
from tests.recording.collect.tables import (
    assert_rows,
    batches,
    columns,
    padded,
    reader,
    run_all,
    seen,
    tokens,
)

LENGTHS = ((3, 8, 1), (4, 4), (2, 5, 5, 1))


@pytest.mark.parametrize("store", ["host", "device", "auto", "disk"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_each_real_token_is_a_row(store, side, tmp_path):
    rnet, data = reader(), batches(*LENGTHS, side=side)
    where = Disk(tmp_path / "run", chunk_bytes=300) if store == "disk" else store
    recording = rnet.collect(data, store=where, rows=Tokens())
    names = ["embed", "mix", "act"]
    for name, values in seen(rnet.net, names, run_all(rnet.net, data)).items():
        assert torch.equal(recording[name][:], tokens(values, data)), name
        lengths = [length for batch in LENGTHS for length in batch]
        assert [len(part) for part in recording.by_sample(name)] == lengths
    assert_rows(recording, columns(data))
    assert recording.num_samples == 9
    if store == "disk":
        assert_rows(open_recording(tmp_path / "run", verify=True), columns(data))


def test_without_padding_no_row_is_left_out():
    rnet, data = reader("mix"), [{"input_ids": padded(5, 5)["input_ids"]}]
    recording = rnet.collect(data, rows=Tokens())
    (values,) = seen(rnet.net, ["mix"], run_all(rnet.net, data))["mix"]
    assert torch.equal(recording["mix"], values.flatten(0, 1))
    assert recording.rows["position"].tolist() == [0, 1, 2, 3, 4] * 2
