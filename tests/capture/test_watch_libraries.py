"""Libraries that run the network themselves: every pass that they make is recorded, bit for bit."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import UnsupportedNetError
from scio_recorder.postprocessors import Add
from tests.harness import recorder
from tests.rotation import one_in

transformers = pytest.importorskip("transformers")

PROMPT = {
    "input_ids": torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=48, eos_token_id=49)
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 48, "eos_token_id": 49, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, **tokens)
    ).eval()


def past(cache: Any) -> dict[str, Any]:
    """Return a cache under the name that the installed version of transformers gives it."""
    names = inspect.signature(transformers.LlamaModel.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


NETS = {"gpt2": (gpt2, "transformer.h.*"), "llama": (llama, "model.layers.*")}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
}


def passes_by_hooks(rnet: Recorder, run: Callable[[], Any]) -> tuple[list[dict[Any, Any]], Any]:
    """Clone what every recorded module returns, with hooks of our own on the bare network."""
    passes: list[dict[Any, Any]] = []
    handles = [rnet.net.register_forward_pre_hook(lambda *call: passes.append({}))]
    for label in rnet.recording:

        def keep(module: nn.Module, args: Any, output: Any, label: Any = label) -> None:
            first = output if isinstance(output, Tensor) else output[0]
            passes[-1][label] = first.clone()

        module = rnet.architecture[label].module
        assert module is not None
        handles.append(module.register_forward_hook(keep))
    try:
        return passes, run()
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(value: Any) -> Tensor:
    found: Tensor = value if isinstance(value, Tensor) else value[0]
    return found


@pytest.mark.parametrize(("name", "way"), one_in(5, itertools.product(NETS, WAYS)))
def test_generate(name: str, way: str) -> None:
    make, layers = NETS[name]
    net = make()
    rnet = recorder(net, layers, input_data=PROMPT)

    def run() -> Any:
        torch.manual_seed(1)
        return net.generate(**PROMPT, max_new_tokens=6, pad_token_id=0, **WAYS[way])

    expected, text = passes_by_hooks(rnet, run)
    with rnet.watch() as passes:
        assert torch.equal(run(), text)
    assert len(passes) == len(expected) > 1
    for records, truth in zip(passes, expected, strict=True):
        assert records.keys() == truth.keys()
        assert all(torch.equal(first_tensor(records[at]), truth[at]) for at in truth)
    assert torch.equal(run(), text)


class Streamer:
    """What ``generate`` hands tokens to, as to transformers' ``TextIteratorStreamer``."""

    def __init__(self) -> None:
        self.tokens: queue.Queue[Tensor | None] = queue.Queue()

    def put(self, value: Tensor) -> None:
        self.tokens.put(value.flatten().clone())

    def end(self) -> None:
        self.tokens.put(None)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tokens.get, None)


def test_requests_that_stream_from_threads_are_steered_apart() -> None:
    net, prompt = gpt2(), {name: value[1:] for name, value in PROMPT.items()}
    rnet, options = Recorder(net, input_data=prompt), {"max_new_tokens": 6, "pad_token_id": 0}
    rnet.record("transformer.h.0")
    vectors = [*(30 * torch.randn(6, 16)), None, None]

    def by_hand(vector: Tensor | None) -> Tensor:
        bare = copy.deepcopy(net)
        if vector is not None:
            bare.transformer.h[0].register_forward_hook(
                lambda module, args, output: (
                    (output[0] + vector, *output[1:])
                    if isinstance(output, tuple)
                    else output + vector
                )
            )
        return bare.generate(**prompt, **options, do_sample=False)[0]

    def serve(vector: Tensor | None) -> tuple[Tensor, int]:
        streamer = Streamer()
        keywords = {**prompt, **options, "do_sample": False, "streamer": streamer}
        steering = {"transformer.h.0": Add(vector)} if vector is not None else None
        with rnet.watch(steering) if steering else contextlib.nullcontext(()) as passes:
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(net.generate,), kwargs=keywords)
            thread.start()
            tokens = torch.cat([*streamer])
            thread.join()
        return tokens, len(passes)

    expected = [by_hand(vector) for vector in vectors]
    assert len({tuple(tokens.tolist()) for tokens in expected}) > 3
    with ThreadPoolExecutor(len(vectors)) as pool:
        answers = [*pool.map(serve, vectors)]
    for vector, tokens, (answer, num_passes) in zip(vectors, expected, answers, strict=True):
        assert torch.equal(answer, tokens)
        assert num_passes == (0 if vector is None else 6)


# Its new name is unknown to version 5.0.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options", one_in(3, [{}, {"gradient_checkpointing": True}, {"bf16": True}])
)
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    def train(net: nn.Module) -> None:
        transformers.set_seed(3)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no", **options,
        )  # fmt: skip
        rows = [{"input_ids": torch.arange(5) + n, "labels": torch.arange(5) + n} for n in range(6)]
        transformers.Trainer(model=net, args=arguments, train_dataset=rows).train()

    net = gpt2().train()
    bare = copy.deepcopy(net)
    rnet = Recorder(net, input_data=PROMPT, mode="train")
    rnet.record("transformer.h.*.mlp", gradients=True)
    train(bare)
    with rnet.watch() as passes:
        train(net)
    assert all(map(torch.equal, bare.parameters(), net.parameters()))
    assert len(passes) == 3
    assert passes[0]["transformer.h.1.mlp"].shape == (2, 5, 16)
    assert rnet.gradients["transformer.h.1.mlp"].shape == (2, 5, 16)


def test_a_trainer_that_is_given_the_recorder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    rnet = Recorder(gpt2(), input_data=PROMPT)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UnsupportedNetError, match=r"rnet\.watch\(\)"):
        transformers.Trainer(model=rnet, args=arguments, train_dataset=[])


def diffusion(number: int) -> tuple[Recorder, Callable[[], Tensor]]:
    """Return a recorder of the net of a small pipeline, and what makes so many images with it."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), layers_per_block=1,
    ).eval()  # fmt: skip
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=20))
    pipeline.set_progress_bar_config(disable=True)
    rnet = Recorder(unet, input_data=(torch.randn(1, 1, 8, 8), torch.tensor([1])))
    rnet.record("mid_block", "conv_out")

    def run() -> Tensor:
        seeded = torch.Generator().manual_seed(0)
        made = pipeline(number, generator=seeded, num_inference_steps=4, output_type="np")
        return torch.tensor(made.images)

    return rnet, run


def lightning_module(optimizer: Callable[..., Any]) -> tuple[Any, Callable[[Any], None]]:
    """Return a module with a small ``net``, and what trains such modules for three steps."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.1)

    def fit(module: Any) -> None:
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data)

    torch.manual_seed(0)
    module, data = Module(), torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2)
    return module, fit
