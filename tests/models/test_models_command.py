"""`gulliver models` says what models take: states by the plan, activations as a step has them."""

from __future__ import annotations

import json

import pytest
import torch

from gulliver.cli.dispatch import main
from gulliver.cli.models import inputs_of, needs
from gulliver.cli.options import ModelsConfig
from gulliver.memory import activation_peak
from gulliver.models import CONFIGURATIONS, build
from gulliver.models.configurations import Configuration

TEXT = {"caption_channels": 32, "model_max_length": 6}
SMALL = {
    "STDiT": {"hidden_size": 48, "depth": 4, "num_heads": 4, "input_size": (2, 4, 6), **TEXT},
    "STDiT2": {"hidden_size": 48, "depth": 4, "num_heads": 4, **TEXT},
    "STDiT3": {
        "hidden_size": 48, "depth": 4, "num_heads": 4, "kernel_size": (2, 2, -1),
        "image_conditioning": True, **TEXT,
    },
    "MMDiT": {
        "hidden_size": 48, "depth": 3, "depth_single_blocks": 4, "num_heads": 4,
        "axes_dim": (4, 4, 4), "cond_embed": True, "guidance_embed": True,
        "context_in_dim": 32, "vec_in_dim": 12, "model_max_length": 6,
    },
}  # fmt: skip


FULL = ("STDiT", "STDiT2", "MMDiT")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.full if k in FULL else ()) for k in SMALL]
)
def test_activations_of_many_blocks_follow_from_those_of_two(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = (2, 32, 48)
    one = Configuration("here", kind, SMALL[kind], (1, 8, 8), clip)
    monkeypatch.setitem(CONFIGURATIONS, "small", one)
    config = ModelsConfig(("small",), batch=3, precision="fp32")
    found = needs("small", clip, config)
    with torch.device("meta"):
        model = build("small")
    whole = activation_peak(model, (), inputs_of("small", clip, 3, torch.float32))
    assert whole.bytes is not None, whole.reason
    count = sum(p.numel() for p in model.parameters())
    # Parameters, gradients and two moments in float32.
    states = found.train - whole.bytes
    assert abs(states - 16 * count) < 0.02 * 16 * count + 0.02 * whole.bytes
    assert found.parameters == count
    assert found.train_recomputed < found.train
    assert 4 * count < found.sample < found.train


def test_the_table_and_json_name_every_model_that_is_asked_for(
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["models", "STDiT-XL/2", "--json"])
    assert stop.value.code == 0
    said = json.loads(capsys.readouterr().out)
    (one,) = said["models"].values()
    assert (one["parameters"], one["tokens"], one["clip"]) == (759_620_768, 4096, [16, 256, 256])
    assert 12 * one["parameters"] < one["train_recomputed"] < one["train"]
    for arguments, message in (
        ("models STDiT3-XL", "did you mean 'STDiT3-XL/2'"),
        ("models STDiT-XL/2 --height 300", "takes clips of 16x256x256 alone"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments.split())
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_autoencoders_are_listed_with_the_memory_to_decode_whole_and_streamed(
    capsys: pytest.CaptureFixture,
) -> None:
    names = ["SD-VAE", "OpenSora-VAE-v1.3", "HunyuanVideo-VAE"]
    size = ["--frames", "33", "--height", "64", "--width", "64"]
    with pytest.raises(SystemExit) as stop:
        main(["models", *names, *size, "--json"])
    assert stop.value.code == 0
    said = json.loads(capsys.readouterr().out)["autoencoders"]
    assert list(said) == names
    frames, causal, foreign = said.values()
    assert (causal["parameters"], causal["compression"]) == (259_163_811, [4, 8, 8])
    # The last resolution's activations: 128 channels, several at once.
    layer = 2 * 128 * 33 * 64 * 64
    weights = 2 * 259_163_811
    assert weights + 2 * layer < causal["decode"] < weights + 8 * layer
    assert causal["stream"] - weights < 0.6 * (causal["decode"] - weights)
    assert frames["stream"] < frames["decode"] < frames["stream"] + layer
    assert foreign["parameters"] is None
