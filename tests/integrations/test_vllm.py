"""Folders of hidden states, in the layout that vLLM's extraction writes: put together here."""

from __future__ import annotations

import fcntl
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from scio_recorder import open_recording
from scio_recorder.errors import ArgumentError, LayerNotFoundError, RecordingError
from scio_recorder.integrations.vllm import open_hidden_states

NAMES = ["model.layers.3", "model.layers.9"]
# In the order of the numbers in their names.
LENGTHS = {"2-a": 3, "10-a": 1, "10-b": 0, "11": 40}


def make(folder, lengths=LENGTHS, dtype=torch.bfloat16, layers=2, features=5):
    """Write the files, not in their order; return what they hold."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    written = {}
    for request, length in reversed(lengths.items()):
        written[request] = {
            "hidden_states": torch.randn(length, layers, features).to(dtype),
            "token_ids": torch.randint(0, 1000, (length,)),
        }
        save_file(written[request], folder / f"{request}.safetensors")
        (folder / f"{request}.safetensors.lock").touch()
    return [written[request] for request in lengths]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_tokens_and_samples_requests(tmp_path, dtype):
    written = make(tmp_path / "states", dtype=dtype)
    recording = open_hidden_states(tmp_path / "states", NAMES)
    assert recording.sample_ids == list(LENGTHS)
    assert (recording.num_samples, recording.num_rows) == (4, 44)
    for number, name in enumerate(NAMES):
        wanted = torch.cat([one["hidden_states"][:, number] for one in written])
        assert recording[name].dtype == dtype
        assert torch.equal(recording[name][:], wanted)
        assert torch.equal(recording[name][2:30], wanted[2:30])
        assert torch.equal(recording[name][[43, 0, 5]], wanted[[43, 0, 5]])
        assert all(
            map(
                torch.equal,
                recording.by_sample(name),
                [one["hidden_states"][:, number] for one in written],
            )
        )
    assert list(recording.rows) == ["sample", "position", "token_ids"]
    lengths = list(LENGTHS.values())
    sample = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(recording.rows["sample"][:], sample)
    assert torch.equal(recording.rows["position"][:], position)
    tokens = torch.cat([one["token_ids"] for one in written])
    assert torch.equal(recording.rows["token_ids"][:], tokens)
    assert torch.equal(recording.rows["token_ids"][3:9], tokens[3:9])


def test_all_that_a_recording_can(tmp_path):
    written = make(tmp_path / "states")
    recording = open_hidden_states(tmp_path / "states", NAMES)
    wanted = torch.cat([one["hidden_states"][:, 1] for one in written])
    assert recording.to_frame()["rows"].tolist() == [44, 44]
    assert recording.to_frame().loc["1-2", "mean"] == pytest.approx(float(wanted.double().mean()))
    assert recording.report(tmp_path / "page.html").exists()
    assert (
        recording.to_arrow().read_all()["token_ids"].to_pylist()
        == torch.cat([one["token_ids"] for one in written]).tolist()
    )
    recording.save(tmp_path / "saved")
    for other in (
        open_recording(tmp_path / "saved", verify=True),
        pickle.loads(pickle.dumps(recording)),
    ):
        assert torch.equal(other["model.layers.9"][:], wanted)
        assert torch.equal(other.rows["token_ids"][:], recording.rows["token_ids"][:])
        assert other.sample_ids == recording.sample_ids


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_a_loader_shuffles_tokens(tmp_path, buffer_bytes, workers):
    written = make(tmp_path / "states")
    recording = open_hidden_states(tmp_path / "states", NAMES)
    loader = recording.loader(
        NAMES[0], batch_size=7, shuffle=True, with_rows=True, buffer_bytes=buffer_bytes
    )
    seen = []
    for batch, known in DataLoader(loader, batch_size=None, num_workers=workers):
        pairs = list(zip(known["sample"].tolist(), known["position"].tolist(), strict=True))
        seen += pairs
        wanted = [written[sample]["hidden_states"][at, 0] for sample, at in pairs]
        assert torch.equal(batch, torch.stack(wanted))
        tokens = [written[sample]["token_ids"][at] for sample, at in pairs]
        assert known["token_ids"].tolist() == tokens
    assert sorted(seen) == [(s, at) for s, n in enumerate(LENGTHS.values()) for at in range(n)]
    assert seen != sorted(seen)


def test_a_state_is_of_this_folder(tmp_path):
    make(tmp_path / "states")
    first = open_hidden_states(tmp_path / "states", NAMES).loader(NAMES[0], batch_size=7)
    state = first.state_dict()
    make(tmp_path / "copy")
    open_hidden_states(tmp_path / "copy", NAMES).loader(NAMES[0], batch_size=7).load_state_dict(
        state
    )
    # Of another net, for the same requests.
    make(tmp_path / "states", dtype=torch.float16)
    other = open_hidden_states(tmp_path / "states", NAMES).loader(NAMES[0], batch_size=7)
    with pytest.raises(RecordingError, match="of another recording"):
        other.load_state_dict(state)


def test_layers_are_named_labelled_or_numbered(tmp_path):
    written = make(tmp_path / "states", layers=3)
    recording = open_hidden_states(tmp_path / "states", ["2-7", (2, 5), 16])
    assert list(recording) == [(2, 7), (2, 5), (1, 3)]
    for key, number in (("2-7", 0), ((2, 5), 1), ("16", 2), ("1-3", 2)):
        wanted = torch.cat([one["hidden_states"][:, number] for one in written])
        assert torch.equal(recording[key][:], wanted)
    assert "16" in str(recording.architecture)
    with pytest.raises(LayerNotFoundError):
        recording["17"]


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        *((layers, ArgumentError, "layers=") for layers in ("ab", 2, [], ["a", "a"], [1, "1"])),
        *((layers, ArgumentError, "layers=") for layers in (["1-2", "a"], [9, 3])),
        (["a"], RecordingError, "hold 2 layers, and layers= names 1"),
        (["a", "b", "c"], RecordingError, "hold 2 layers, and layers= names 3"),
    ],
)
def test_layers_that_name_nothing_or_others(tmp_path, layers, error, message):
    make(tmp_path / "states")
    with pytest.raises(error, match=message):
        open_hidden_states(tmp_path / "states", layers)


def held(states, tokens, dtypes=(torch.bfloat16, torch.int64)):
    """Return shapes and dtypes by name."""
    return {"hidden_states": (states, dtypes[0]), "token_ids": (tokens, dtypes[1])}


OTHERS = "holds other shapes or dtypes .* in different folders"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (held((4, 3, 5), (4,)), OTHERS),
        (held((4, 2, 6), (4,)), OTHERS),
        (held((4, 2, 5), (4,), (torch.float16, torch.int64)), OTHERS),
        (held((4, 2, 5), (4,), (torch.bfloat16, torch.int32)), OTHERS),
        (held((4, 2, 5), (3,)), r"\[4, 2, 5\] must be .* \[3\] one for"),
        (held((4, 10), (4,)), r"\[4, 10\] must be"),
        (held((4, 2, 5), (4, 1)), r"\[4, 1\] one for each token"),
        (
            {"hidden_states": ((4, 2, 5), torch.bfloat16)},
            "holds hidden_states, not hidden_states and token_ids",
        ),
        ({"weight": ((2,), torch.float32)}, "it is not a file of hidden states from vLLM"),
        ({}, "holds nothing"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path, tensors, message):
    make(tmp_path / "states")
    made = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
    save_file(made, tmp_path / "states" / "7.safetensors")
    with pytest.raises(RecordingError, match=message) as raised:
        open_hidden_states(tmp_path / "states", NAMES)
    assert "7.safetensors" in str(raised.value)


def test_files_cut_short_anywhere(tmp_path):
    make(tmp_path / "states")
    file = tmp_path / "states" / "11.safetensors"
    whole = file.read_bytes()
    for length in [0, 4, 8, 50, *range(100, len(whole), 61)]:
        file.write_bytes(whole[:length])
        with pytest.raises(RecordingError, match=r"11\.safetensors"):
            open_hidden_states(tmp_path / "states", NAMES)


def test_what_happens_to_files_after_opening_is_noticed(tmp_path):
    make(tmp_path / "states")
    recording = open_hidden_states(tmp_path / "states", NAMES)
    file = tmp_path / "states" / "11.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(RecordingError, match=r"11\.safetensors is damaged"):
        recording[NAMES[0]][10:20]
    file.unlink()
    with pytest.raises(RecordingError, match="No such file"):
        recording[NAMES[0]][10:20]
    make(tmp_path / "states", {"11": 7})
    with pytest.raises(RecordingError, match="no longer has the files"):
        recording[NAMES[0]][30:44]
    assert recording[NAMES[0]][:4].shape == (4, 5)


def test_a_request_under_way_is_waited_for(tmp_path):
    make(tmp_path / "states")
    for name in ("11", "not there yet"):
        with (tmp_path / "states" / f"{name}.safetensors.lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(RecordingError, match=f"{name}.safetensors.lock is locked"):
                open_hidden_states(tmp_path / "states", NAMES)
    open_hidden_states(tmp_path / "states", NAMES)


def test_folders_without_hidden_states(tmp_path):
    with pytest.raises(RecordingError, match="No such file"):
        open_hidden_states(tmp_path / "nowhere", NAMES)
    with pytest.raises(RecordingError, match="no hidden states of vLLM"):
        open_hidden_states(tmp_path, NAMES)


def test_only_the_layer_that_is_asked_for_is_in_memory(tmp_path):
    written = make(tmp_path / "states", {"0": 20_000}, layers=8, features=64)
    recording = open_hidden_states(tmp_path / "states", list(range(8)))
    part = recording["3"][100:200]
    assert part.untyped_storage().nbytes() == part.nbytes
    assert torch.equal(part, written[0]["hidden_states"][100:200, 3])
