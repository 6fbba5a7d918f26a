"""Hidden states by layer in the forms in which other programs leave them, put together here."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.integrations.hidden_states import (
    recording_of_hidden_states,
    recording_of_sglang,
)

MASK = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 1, 1]])


def layers(number: int = 2, *shape: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"layers.{at}": torch.randn(shape or (3, 3, 4)) for at in range(number)}


def test_a_row_is_a_sample_without_a_mask_and_a_token_with_one():
    states = layers()
    whole = recording_of_hidden_states(states, sample_ids=["a", "b", "c"])
    assert whole.sample_ids == ["a", "b", "c"]
    assert not whole.has_rows
    assert torch.equal(whole["layers.1"], states["layers.1"])
    recording = recording_of_hidden_states(states, mask=MASK)
    assert recording.rows["sample"].tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert recording.rows["position"].tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert torch.equal(recording.by_sample("layers.1")[0], states["layers.1"][0, 1:])
    assert torch.equal(recording.by_sample("layers.0")[1], states["layers.0"][1, :2])


def test_tokens_without_padding_are_parted_by_lengths():
    states = layers(1, 6, 4)
    recording = recording_of_hidden_states(states, lengths=[1, 3, 2])
    assert torch.equal(recording.by_sample("layers.0")[1], states["layers.0"][1:4])


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_files(tmp_path, ending):
    states, path = layers(), tmp_path / f"states.{ending}"
    if ending == "pt":
        torch.save(states, path)
    else:
        save_file(states, path)
    for at in (path, str(path)):
        recording = recording_of_hidden_states(at)
        assert torch.equal(recording["layers.1"], states["layers.1"])
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RecordingError, match="is damaged"):
        recording_of_hidden_states(path)


def test_sequences_and_outputs_of_transformers_are_numbered():
    from transformers import AutoConfig, AutoModel

    states = list(layers().values())
    assert torch.equal(recording_of_hidden_states(states)["hidden_states.1"], states[1])
    net = AutoModel.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2)).eval()
    output = net(torch.ones(2, 3, dtype=torch.long), output_hidden_states=True)
    recording = recording_of_hidden_states(output)
    assert not recording["hidden_states.1"].requires_grad
    assert torch.equal(recording["hidden_states.1"], output.last_hidden_state)


def test_what_does_not_fit():
    states = layers()
    for wrong in ({}, {"a": 1}, torch.ones(3), ((torch.ones(1),),), None):
        with pytest.raises(ArgumentError, match="not tensors by layer"):
            recording_of_hidden_states(wrong)
    for options in ({"mask": MASK[:2]}, {"lengths": [1, 1]}):
        with pytest.raises(ArgumentError, match=r"'layers.0' is \[3, 3, 4\], but"):
            recording_of_hidden_states(states, **options)
    with pytest.raises(ArgumentError, match="lengths="):
        recording_of_hidden_states(states, lengths=[4, -1])
    with pytest.raises(ArgumentError, match="sample_ids has 2 ids for 3 samples"):
        recording_of_hidden_states(states, sample_ids=[1, 2])
    with pytest.raises(ArgumentError, match="is no file that can be read"):
        recording_of_hidden_states("states.csv")
    with pytest.raises(RecordingError):
        recording_of_hidden_states("there is none.pt")


def sglang_pass(lengths: list[int], *, is_decoding: bool = False) -> dict[str, object]:
    """Return what sglang notes of a pass: values of modules, and what it ran on."""
    number = len(lengths) if is_decoding else sum(lengths)
    positions = [torch.arange(length) for length in lengths]
    return {
        "model.layers.0.input_layernorm": [torch.randn(number, 4), torch.randn(number, 4)],
        "model.layers.0.mlp.down_proj": torch.randn(number, 4),
        "model.forward_batch_info.seq_lens": torch.tensor(lengths),
        "model.forward_batch_info.positions": torch.cat(positions)[-number:],
        # Of the pass before.
        "logits_processor": torch.randn(9, 50),
        "model": torch.randn(number, 4),
    }


def test_a_dump_of_sglang_has_the_prompts_of_all_passes(tmp_path):
    passes = [sglang_pass([2, 3]), sglang_pass([3, 4], is_decoding=True), sglang_pass([1])]
    for number, tensors in enumerate(passes):
        torch.save(tensors, tmp_path / f"Pass{number:05}.pt")
    recording = recording_of_sglang(tmp_path)
    names = [layer.name for layer in recording.architecture.values()]
    norm = "model.layers.0.input_layernorm"
    assert names == [norm, f"{norm}.1", "model.layers.0.mlp.down_proj"]
    assert recording.rows["sample"].tolist() == [0, 0, 1, 1, 1, 2]
    residual = passes[0][norm][1]
    assert torch.equal(recording.by_sample(f"{norm}.1")[1], residual[2:])
    assert torch.equal(recording.by_sample(names[2])[2], passes[2][names[2]])


def test_a_folder_without_prompts_of_sglang(tmp_path):
    torch.save(sglang_pass([3, 4], is_decoding=True), tmp_path / "Pass00000.pt")
    with pytest.raises(RecordingError, match="no whole prompts of sglang"):
        recording_of_sglang(tmp_path)
    with pytest.raises(RecordingError):
        recording_of_sglang(tmp_path / "none")
