"""Rows of passes that go on with the samples of others: real ``generate`` against plain hooks."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Tokens, open_recording, reductions
from scio_recorder.errors import CollectError
from tests.capture.test_watch_libraries import PROMPT, gpt2, llama, passes_by_hooks, past
from tests.harness import run_in_threads
from tests.recording.nets import recorder_of

transformers = pytest.importorskip("transformers")

TOKENS = {"bos_token_id": 48, "eos_token_id": 49, "pad_token_id": 0, "vocab_size": 50}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def mistral() -> Any:
    config = transformers.MistralConfig(**SIZES, **TOKENS, sliding_window=4)
    return transformers.MistralForCausalLM(config).eval()


def gemma() -> Any:
    config = transformers.Gemma2Config(**SIZES, **TOKENS, head_dim=4, sliding_window=4)
    return transformers.Gemma2ForCausalLM(config).eval()


def bloom() -> Any:
    config = transformers.BloomConfig(**TOKENS, hidden_size=16, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config).eval()


def mamba() -> Any:
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, **TOKENS)).eval()


def minimax(kinds: tuple[str, ...] = ("linear_attention", "full_attention")) -> Any:
    options = {"layer_types": list(kinds), "block_size": 4, "num_local_experts": 2}
    return transformers.MiniMaxForCausalLM(
        transformers.MiniMaxConfig(**SIZES, **TOKENS, **options)
    ).eval()


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, **TOKENS, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


NETS: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (gpt2, "transformer.h.*.mlp"),
    "llama": (llama, "model.layers.*.mlp"),
    "mistral": (mistral, "model.layers.*.mlp"),
    "gemma2": (gemma, "model.layers.*.mlp"),
    "bloom": (bloom, "transformer.h.*.mlp"),
    "mamba": (mamba, "backbone.layers.*.mixer"),
    # Its cache answers for its first layer, which keeps a state and no keys.
    "minimax": (minimax, "model.layers.*.*layernorm"),
    # Its cache says that it is empty, whatever it holds.
    "states": (lambda: minimax(("linear_attention",) * 2), "model.layers.*.*layernorm"),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "in parts": {"do_sample": False, "prefill_chunk_size": 2},
}
# One in the default run, and one on disk below.
CASES = [
    ("llama", "sampled"),
    ("gpt2", "in parts"),
    *[(name, "greedy") for name in ("mistral", "gemma2", "bloom", "mamba", "minimax", "states")],
]


def recorder(name: str) -> Recorder:
    make, layers = NETS[name]
    torch.manual_seed(0)
    return recorder_of(make(), layers, input_data=PROMPT)


def generate(net: Any, **options: Any) -> Tensor:
    torch.manual_seed(1)
    given = {**PROMPT, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": 99, **options}
    text: Tensor = net.generate(**given)
    return text


def by_hand(rnet: Recorder, passes: list[dict[Any, Any]], text: Tensor) -> dict[Any, list[Tensor]]:
    """Put prompt and continuation of each sample together, without padding on the left."""
    real = PROMPT["attention_mask"].bool()
    real = torch.cat([real, torch.ones(2, text.shape[1] - 1 - real.shape[1], dtype=torch.bool)], 1)
    joined: dict[Any, Tensor] = {"input_ids": text[:, :-1]}
    for label in passes[0] if passes else ():
        joined[label] = torch.cat([each[label] for each in passes], 1)
    return {
        label: [x[mask] for x, mask in zip(of, real, strict=True)] for label, of in joined.items()
    }


@pytest.mark.parametrize(
    ("name", "way", "where"),
    [
        ("gpt2", "greedy", "host"),
        *[pytest.param(*case, "host", marks=pytest.mark.campaign) for case in CASES],
        ("llama", "in parts", "disk"),
    ],
)
def test_each_row_is_what_plain_hooks_saw(name: str, way: str, where: str, tmp_path: Path) -> None:
    rnet = recorder(name)
    passes, text = passes_by_hooks(rnet, lambda: generate(rnet.net, **WAYS[way]))
    store = "host" if where == "host" else f"disk:{tmp_path}/run"
    with rnet.collecting(rows=Tokens(fields=("input_ids",)), store=store) as collection:
        assert torch.equal(generate(rnet.net, **WAYS[way]), text)
    recording = collection.recording if where == "host" else open_recording(f"{tmp_path}/run")
    truth = by_hand(rnet, passes, text)
    assert recording.num_samples == 2
    assert recording.num_rows == sum(map(len, truth["input_ids"])) == 18
    rows = {name: column[:] for name, column in recording.rows.items()}
    assert list(rows) == ["sample", "position", "step", "input_ids"]
    for sample in range(2):
        own = rows["sample"] == sample
        assert torch.equal(rows["input_ids"][own], truth["input_ids"][sample])
        assert rows["position"][own].tolist() == list(range(len(truth["input_ids"][sample])))
        for label in rnet.recording:
            assert torch.equal(recording.by_sample(label)[sample], truth[label][sample])
            assert torch.equal(recording[label][:][own], truth[label][sample])
    assert int(rows["step"].max()) == len(passes) - 1
    assert bool((rows["step"].diff() >= 0).all())
    if way != "in parts":
        counts = torch.bincount(rows["step"]).tolist()
        assert counts == [8, 2, 2, 2, 2, 2]


def test_several_prompts_one_after_the_other_are_samples_of_their_own() -> None:
    rnet = recorder("llama")
    with rnet.collecting(rows=Tokens(), reduce=reductions.Mean()) as collection:
        generate(rnet.net)
        generate(rnet.net, max_new_tokens=2)
        rnet.net(**PROMPT)
    with rnet.collecting(rows=Tokens()) as other:
        generate(rnet.net)
        generate(rnet.net, max_new_tokens=2)
        rnet.net(**PROMPT)
    recording = other.recording
    assert recording.num_samples == 6
    assert torch.bincount(recording.rows["sample"]).tolist() == [8, 10, 4, 6, 3, 5]
    assert [len(x) for x in recording.by_sample(rnet.recording[0])] == [8, 10, 4, 6, 3, 5]
    for label in rnet.recording:
        torch.testing.assert_close(collection.recording[label], recording[label].mean(0))


def test_a_loop_by_hand_goes_on_with_what_the_pass_before_left() -> None:
    rnet = recorder("llama")
    ids = PROMPT["input_ids"]
    with torch.no_grad(), rnet.collecting(rows=Tokens()) as collection:
        out = rnet.net(input_ids=ids, use_cache=True)
        for _ in range(3):
            ids = out.logits[:, -1:].argmax(-1)
            out = rnet.net(input_ids=ids, **past(out.past_key_values), use_cache=True)
    rows = collection.recording.rows
    assert torch.bincount(rows["sample"]).tolist() == [8, 8]
    assert rows["position"][rows["sample"] == 1].tolist() == list(range(8))
    assert list(collection.recording.sample_ids) == [0, 1]


@pytest.mark.campaign
def test_generation_that_is_guided_by_a_second_cache_is_not_mixed_with_it() -> None:
    rnet = recorder("llama")
    options = {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[7, 8], [9, 7]])}
    passes, _ = passes_by_hooks(rnet, lambda: generate(rnet.net, **options))
    with rnet.collecting(rows=Tokens()) as collection:
        text = generate(rnet.net, **options)
    recording = collection.recording
    assert recording.num_samples == 4
    first = rnet.recording[0]
    own = by_hand(rnet, passes[::2], text)
    for sample in range(2):
        assert torch.equal(recording.by_sample(first)[sample], own[first][sample])


class Remembering(nn.Module):
    """Makes another cache in each pass, as nets did before there were classes for it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> tuple[Tensor, Any]:
        hidden = self.embedding(input_ids)
        keys = hidden[:, None]
        if past_key_values is not None:
            keys = torch.cat([past_key_values[0][0], keys], 2)
        return hidden, ((keys, keys),)


class Renamed:
    """An output without a cache, whose class still knows the old name of its field."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.cache = hidden, None

    @property
    def past_key_values(self) -> None:
        warnings.warn("use cache instead", DeprecationWarning, stacklevel=2)
        return self.cache


def test_the_old_name_of_a_cache_is_not_read() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 4)

        def forward(self, input_ids: Tensor) -> Renamed:
            return Renamed(self.embedding(input_ids))

    rnet = recorder_of(Net(), "embedding", input_data=torch.ones(2, 3).long())
    with rnet.collecting(rows=Tokens()) as collection:
        rnet.net(torch.ones(2, 3).long())
    assert collection.recording.num_rows == 6


def test_a_tuple_goes_on_if_it_holds_what_the_pass_left() -> None:
    net = Remembering()
    rnet = recorder_of(net, "embedding", input_data=torch.ones(2, 3).long())
    prompt, step = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7], [8]])
    with rnet.collecting(rows=Tokens()) as collection, torch.no_grad():
        cache = net(prompt)[1]
        later = net(step, past_key_values=cache)[1]
        # The samples have gone on since; rows in another order; rows of which one is left out.
        for other in (
            cache,
            tuple(tuple(x.flip(0) for x in layer) for layer in later),
            tuple(tuple(x[:1] for x in layer) for layer in later),
        ):
            with pytest.raises(CollectError, match=r"latest pass of its samples(.|\n)*watch"):
                net(step, past_key_values=other)
        net(step + 2, past_key_values=later)
    rows = collection.recording.rows
    texts = [rows["input_ids"][rows["sample"] == sample].tolist() for sample in range(2)]
    assert texts == [[1, 2, 3, 7, 9], [4, 5, 6, 8, 10]]


@pytest.mark.parametrize("filled_by", ["a pass without a cache", "other code"])
def test_what_a_pass_without_a_cache_ran_is_not_gone_on_with(filled_by: str) -> None:
    rnet = recorder("llama")
    net, cache = rnet.net, transformers.DynamicCache(config=rnet.net.config)
    with rnet.collecting(rows=Tokens()) as collection, torch.no_grad():
        net(**PROMPT, use_cache=False)
        if filled_by == "other code":
            for layer in range(2):
                cache.update(torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4), layer)
        else:
            rnet(**PROMPT, dont_record=True, **past(cache))
        with pytest.raises(CollectError, match=r"latest pass of its samples(.|\n)*watch"):
            net(input_ids=torch.tensor([[1], [2]]), **past(cache))
    assert collection.recording.num_samples == 2


def test_a_cache_of_fixed_length_goes_on_until_it_is_reset() -> None:
    rnet = recorder("llama")
    ids, step = PROMPT["input_ids"], torch.tensor([[1], [2]])
    cache = transformers.StaticCache(config=rnet.net.config, max_cache_len=9)
    for mode in (torch.no_grad, torch.inference_mode):
        with rnet.collecting(rows=Tokens()) as collection, mode():
            for _ in range(2):
                cache.reset()
                rnet.net(ids, **past(cache))
                rnet.net(step, **past(cache))
            cache.reorder_cache(torch.tensor([1, 0]))
            with pytest.raises(CollectError, match=r"latest pass of its samples(.|\n)*watch"):
                rnet.net(step, **past(cache))
        rows = collection.recording.rows
        assert torch.bincount(rows["sample"]).tolist() == [6] * 4
        assert rows["step"].tolist() == ([0] * 10 + [1] * 2) * 2


@pytest.mark.parametrize("part", ["self_attention_cache", "cross_attention_cache"])
def test_the_cache_of_a_pair_goes_on_unless_a_half_is_reordered(part: str) -> None:
    net = t5()
    first, step = {"decoder_input_ids": torch.ones(2, 3).long()}, torch.tensor([[1], [2]])
    rnet = recorder_of(net, "decoder.block.0", input_data={**PROMPT, **first})
    with (
        rnet.collecting(
            rows=Tokens(mask="decoder_attention_mask"), transform=lambda out, batch: out[0]
        ) as collection,
        torch.no_grad(),
    ):
        out = net(**PROMPT, **first)
        encoded = {"encoder_outputs": (out.encoder_last_hidden_state,)}
        cache = out.past_key_values
        net(**encoded, decoder_input_ids=step, **past(cache))
        getattr(cache, part).reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(CollectError, match=r"latest pass of its samples(.|\n)*watch"):
            net(**encoded, decoder_input_ids=step, **past(cache))
    assert torch.bincount(collection.recording.rows["sample"]).tolist() == [4, 4]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "overwritten": lambda cache: cache.layers[0].keys.copy_(cache.layers[0].keys.flip(0)),
    "cut": lambda cache: cache.crop(-1),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([0, 1])),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_cache_that_has_changed_between_passes_is_refused(how: str) -> None:
    rnet = recorder("llama")
    cache = transformers.DynamicCache(config=rnet.net.config)
    with rnet.collecting(rows=Tokens()) as collection, torch.no_grad():
        rnet.net(**PROMPT, **past(cache))
        changed = CHANGES[how](cache)
        given = changed if how == "copied" else cache
        with pytest.raises(CollectError, match=r"copied, reordered or cut since(.|\n)*watch"):
            rnet.net(input_ids=torch.tensor([[1], [2]]), **past(given))
    assert collection.recording.num_samples == 2


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.campaign)])
def test_a_mask_of_who_attends_to_whom_is_refused(name: str) -> None:
    rnet = recorder(name)
    with (
        pytest.raises(CollectError, match=r"cache of fixed length(.|\n)*watch"),
        rnet.collecting(rows=Tokens()),
    ):
        generate(rnet.net, cache_implementation="static")


def test_a_mask_that_is_longer_than_the_cache_is_refused() -> None:
    rnet = recorder("llama")
    cache = transformers.DynamicCache(config=rnet.net.config)
    longer = torch.nn.functional.pad(PROMPT["attention_mask"], (0, 3), value=1)
    with rnet.collecting(rows=Tokens()) as collection, torch.no_grad():
        with pytest.raises(CollectError, match=r"longer than the cache(.|\n)*watch"):
            rnet.net(PROMPT["input_ids"], attention_mask=longer, **past(cache))
        rnet.net(**PROMPT, **past(cache))
    assert torch.bincount(collection.recording.rows["sample"]).tolist() == [3, 5]


def test_the_decoder_of_a_pair_goes_on_and_has_no_padding() -> None:
    net = t5()
    rnet = Recorder(net, input_data={**PROMPT, "decoder_input_ids": torch.ones(2, 3).long()})
    rnet.record("decoder.block.*.layer.2.DenseReluDense")
    passes, text = passes_by_hooks(rnet, lambda: generate(net))
    with rnet.collecting(rows=Tokens(mask="decoder_attention_mask")) as collection:
        generate(net)
    recording = collection.recording
    for label in rnet.recording:
        whole = torch.cat([each[label] for each in passes], 1)
        assert all(map(torch.equal, recording.by_sample(label), whole))
    rows = recording.rows
    assert torch.equal(rows["decoder_input_ids"][rows["sample"] == 1], text[1, :-1])


@pytest.mark.campaign
def test_threads_that_generate_at_once_are_not_mixed() -> None:
    rnet = recorder("llama")
    texts: dict[int, Tensor] = {}

    def work(number: int) -> None:
        ids = PROMPT["input_ids"] + number
        texts[number] = generate(rnet.net, input_ids=ids, do_sample=False)

    with rnet.collecting(rows=Tokens()) as collection:
        run_in_threads(work, range(4))
    rows, found = collection.recording.rows, []
    for sample in range(8):
        own = rows["sample"] == sample
        assert rows["position"][own].tolist() == list(range(int(own.sum())))
        found.append(rows["input_ids"][own].tolist())
    expected = [
        text.tolist() for each in texts.values() for text in by_hand(rnet, [], each)["input_ids"]
    ]
    assert sorted(found) == sorted(expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "beam_search"),
    "beams without a cache": ({"num_beams": 3, "use_cache": False}, "beam_search"),
    "several": ({"do_sample": True, "num_return_sequences": 2}, r"2 sequence\(s\)"),
    "lookup": ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
}


@pytest.mark.parametrize(
    "way",
    [way if way == "beams" else pytest.param(way, marks=pytest.mark.campaign) for way in REFUSED],
)
def test_rows_that_cannot_be_told_apart_are_refused(way: str) -> None:
    options, said = REFUSED[way]
    rnet = recorder("llama")
    one = {name: value[1:] for name, value in PROMPT.items()}
    with rnet.collecting(rows=Tokens()) as collection:
        generate(rnet.net)
        with pytest.raises(CollectError, match=rf"{said}(.|\n)*rnet\.watch\(\)"):
            generate(rnet.net, **one, **options)
        generate(rnet.net)
    assert collection.recording.num_rows == 36
    with rnet.watch() as passes:
        generate(rnet.net, **one, **options)
    assert len(passes) > 1


def test_a_cache_that_was_filled_outside_of_the_block_is_refused() -> None:
    rnet = recorder("llama")
    net = rnet.net
    cache = transformers.DynamicCache(config=net.config)
    rnet.net(**PROMPT, **past(cache))
    step = {"input_ids": torch.tensor([[1], [2]])}
    with rnet.collecting(rows=Tokens()) as collection, torch.no_grad():
        with pytest.raises(CollectError, match=r"filled outside of the block(.|\n)*watch"):
            net(**step, **past(cache))
        net(**PROMPT)
    assert torch.bincount(collection.recording.rows["sample"]).tolist() == [3, 5]


def test_what_ended_is_passed_over_step_by_step_when_it_comes_again(tmp_path: Path) -> None:
    rnet = recorder("gpt2")
    store, rows = f"disk:{tmp_path}/run", Tokens(fields=("input_ids",))
    calls = []

    def stop(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt

    handle = rnet.net.register_forward_pre_hook(stop)
    options: Any = {
        "store": store,
        "rows": rows,
        "reduce": {"transformer.h.1.mlp": reductions.Moments()},
    }

    def run(last: int = 5) -> None:
        generate(rnet.net)
        generate(rnet.net, max_new_tokens=last)

    def interrupted() -> None:
        with rnet.collecting(**options) as collection:
            held.append(collection)
            run()

    held: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    handle.remove()
    half = held[0].recording
    assert (half.num_samples, half.num_rows, half.complete) == (4, 18 + 8 + 4, False)
    with (
        pytest.raises(CollectError, match="in 30 rows already, and 4 in 28 rows came now"),
        rnet.collecting(**options, resume=True),
    ):
        run(2)
    with rnet.collecting(**options, resume=True) as collection:
        run()
    with rnet.collecting(**{**options, "store": "host"}) as fresh:
        run()
    for recording in (collection.recording, open_recording(f"{tmp_path}/run")):
        assert recording.complete
        assert list(recording.sample_ids) == [0, 1, 2, 3]
        for name, column in fresh.recording.rows.items():
            assert torch.equal(recording.rows[name][:], column)
        first, second = rnet.recording
        assert torch.equal(recording[first][:], fresh.recording[first])
        assert torch.equal(recording[second].mean, fresh.recording[second].mean)
        assert recording[second].count == fresh.recording[second].count


def test_every_nth_pass_leaves_out_those_that_go_on_with_what_is_left_out() -> None:
    rnet = recorder("llama")
    with rnet.collecting(rows=Tokens(), every=2) as collection:
        generate(rnet.net)
        generate(rnet.net, max_new_tokens=5)
        generate(rnet.net)
    rows = collection.recording.rows
    # The third begins in a pass that is left out.
    assert torch.bincount(rows["sample"]).tolist() == [5, 7, 5, 7]
    own = rows["sample"] == 0
    assert rows["step"][own].tolist() == [0, 0, 0, 2, 4]
    assert rows["position"][own].tolist() == [0, 1, 2, 4, 6]


def test_where_leaves_positions_as_they_are() -> None:
    rnet = recorder("llama")
    where = Tokens(where=lambda batch: batch["input_ids"] % 2 == 0)
    with rnet.collecting(rows=where) as collection, rnet.watch() as passes:
        text = generate(rnet.net)
    rows = collection.recording.rows
    own = rows["sample"] == 1
    ids = text[1, :-1]
    assert torch.equal(rows["input_ids"][own], ids[ids % 2 == 0])
    assert torch.equal(rows["position"][own], (ids % 2 == 0).nonzero().squeeze(1))
    label = rnet.recording[0]
    kept = passes.cat(label, dim=1)[1][ids % 2 == 0]
    assert torch.equal(collection.recording.by_sample(label)[1], kept)


def test_classes_by_line_and_by_position() -> None:
    rnet = recorder("llama")
    by_line = reductions.Mean(by=lambda batch: ["a", "b"])
    by_token = reductions.Mean(by=lambda batch: batch["input_ids"] % 2)
    with rnet.collecting(rows=Tokens(), reduce=[by_line, by_token]) as collection:
        generate(rnet.net)
    with rnet.collecting(rows=Tokens()) as other:
        generate(rnet.net)
    label, rows = rnet.recording[0], other.recording.rows
    kept, found = other.recording[label], collection.recording[label]
    for name, chosen in (("a", rows["sample"] == 0), ("b", rows["sample"] == 1)):
        torch.testing.assert_close(found[0][name], kept[chosen].mean(0))
    for parity in (0, 1):
        torch.testing.assert_close(found[1][parity], kept[rows["input_ids"] % 2 == parity].mean(0))


def test_a_pass_that_failed_holds_no_cache() -> None:
    net = gpt2()
    rnet = recorder_of(net, "transformer.h.0.mlp", input_data=PROMPT)
    with rnet.collecting(rows=Tokens()) as collection:
        net(**PROMPT)
        cache = transformers.DynamicCache()
        reference = weakref.ref(cache)
        with pytest.raises(IndexError):
            net(input_ids=torch.full((2, 5), 1000), **past(cache))
        del cache
        gc.collect()
        assert reference() is None
    assert collection.recording.num_samples == 2
