"""Teaching runs of `gulliver train`: what a plain computation gives, and what is loaded of it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("peft")

from gulliver.cli.dispatch import main
from gulliver.comm import init_world
from gulliver.data import Bucket
from gulliver.dreambooth import DreamboothConfig
from gulliver.dreambooth.base import Picture
from gulliver.dreambooth.config import alternatives
from gulliver.dreambooth.student import make_student
from gulliver.dreambooth.trainer import DreamBoothTrainer, _plan, dreambooth, make_plugin
from gulliver.dreambooth.video_base import VideoBase, along, load_adapter
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.video import DataConfig, Request, SamplingConfig, TrainConfig, VideoModel
from gulliver.video.config import AutoencoderConfig, OptimizerConfig
from gulliver.video.digits import MovingDigits
from gulliver.video.media import write_clip
from gulliver.video.pipeline import open_run
from gulliver.video.planned_training import train
from gulliver.video.public_models import save_autoencoder
from gulliver.video.text_encoders import words_of
from tests.video.test_public_training import config_of, parts  # noqa: F401

CLIP, STILL = Bucket(5, 16, 16), Bucket(1, 16, 16)
TEXT = "the digit sks"


def trained(folder: Path, seed: int = 0) -> Path:
    """A run of one step."""
    torch.manual_seed(seed)
    save_autoencoder(folder / "a.safetensors", VideoAutoencoder(width=8))
    config = TrainConfig(
        out=folder / "run",
        steps=1,
        seed=seed,
        data=DataConfig(shapes=(str(CLIP),), batch_size=2, clips=8),
        autoencoder=AutoencoderConfig(path=folder / "a.safetensors"),
        optimizer=OptimizerConfig(warmup=1),
    )
    train(config)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("subject")
    stills = MovingDigits("train", 3, shapes={STILL: 1}).batch([0, 1, 2])
    for number, still in enumerate(stills):
        write_clip(folder / f"{number}.png", still, 8)
    return folder


def config_for(run: Path, subject: Path, out: Path, **changes: Any) -> DreamboothConfig:
    config = DreamboothConfig(
        model=run,
        subject=subject,
        out=out,
        learn_token=True,
        class_word="digit",
        prompt="the {class} {token}",
        prior_prompt="the digit {1|2} moving left",
        prior_pictures=2,
        steps=3,
        batch=2,
        learning_rate=1e-2,
        token_rate=1e-1,
        validation_pictures=0,
        sampling_steps=2,
        background="black",
        ranks=1,
    )
    return replace(config, **changes)


def picture(pixels: Tensor) -> Picture:
    levels = ((pixels + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
    return Picture(Path("picture"), levels if len(levels) > 1 else levels[0])


def encoded_by_hand(words: Any, text: str, row: Tensor) -> Tensor:
    """Vectors of a sentence [1, L, D] with a row for sks, and the code of each place."""
    vectors, channels = [], words.channels
    for place, word in enumerate(words_of(text)):
        angles = place * 10_000.0 ** -(torch.arange(channels // 2) / (channels // 2))
        code = torch.cat([angles.sin(), angles.cos()]).double()
        vectors.append((row if word == "sks" else words.vector(word).double()) + code)
    return torch.stack(vectors)[None]


def loss_by_hand(
    network: Any, weights: dict[str, Tensor], latent: Tensor, y: Tensor, seed: int
) -> Tensor:
    """The loss of a sample of the usual flow: shifted logit-normal level, velocity, mean square."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(1, generator=generator).sigmoid()
    level = (3 * t / (1 + 2 * t) * 1000).double()
    noise = torch.randn(latent.shape, generator=generator).double()[None]
    drop = torch.rand(1, generator=generator) < 0.1
    inputs = {
        "mask": torch.ones(1, y.shape[2], dtype=torch.bool),
        "fps": torch.tensor([8.0]).double(),
        "height": torch.tensor([16.0]).double(),
        "width": torch.tensor([16.0]).double(),
        "drop_caption": drop,
    }
    x = (1 - level / 1000) * latent[None] + level / 1000 * noise
    answer = torch.func.functional_call(network, weights, (x, level, y), inputs)
    return (answer[0, : len(latent)] - (latent - noise[0])).square().mean()


def test_loss_and_gradients_of_stills_and_clips_are_those_computed_by_hand(
    run: Path, subject: Path, tmp_path: Path
) -> None:
    base = VideoBase(run, dtype=torch.float64)
    student, _ = make_student(base, config_for(run, subject, tmp_path), [TEXT])
    data = MovingDigits("train", 8, shapes={CLIP: 1, STILL: 1}, seed=4)
    found = [data[n].video for n in range(8)]
    some = [next(v for v in found if v.shape[1] == frames) for frames in (1, 5, 1)]
    latents = base.encode_pictures([picture(one) for one in some])
    texts = [TEXT, f"{TEXT} moving left", "the digit 3"]
    torch.manual_seed(1)
    learnt = {n: p for n, p in student.named_parameters() if p.requires_grad}
    assert {n.rpartition(".lora_")[0].rpartition(".")[0] for n in learnt if "lora" in n}
    assert all("spatial_blocks" in name or name == "text.rows" for name in learnt)
    with torch.no_grad():
        for name, parameter in learnt.items():
            if ".lora_B" in name:
                parameter.normal_(std=0.05)
    losses = student(
        latents, texts, [torch.Generator().manual_seed(n) for n in (5, 6, 7)], [0.5, 2, 1]
    )
    losses.loss.backward()

    plain = VideoModel.load(run)
    network = plain.model.double().requires_grad_(False)
    leaves = {n: p.detach().double().clone().requires_grad_() for n, p in learnt.items()}
    weights: dict[str, Tensor] = dict(network.state_dict())
    for name, down in leaves.items():
        if ".lora_A" in name:
            path = name.removeprefix("trained.").partition(".lora_A")[0]
            up = leaves[name.replace("lora_A", "lora_B")]
            weights[f"{path}.weight"] = weights[f"{path}.weight"] + up @ down
    total, lengths = torch.zeros(()).double(), [1, 2, 1]
    for row, (text, weight) in enumerate(zip(texts, (0.5, 2, 1), strict=True)):
        y = encoded_by_hand(plain.text, text, leaves["text.rows"][0])[None]
        latent = latents[row, :, : lengths[row]]
        loss = loss_by_hand(network, weights, latent, y, 5 + row)
        assert float(losses.each[row]) == pytest.approx(float(loss.detach()), rel=1e-6)
        total = total + weight * loss
    total.backward()
    for name, leaf in leaves.items():
        expected, own = leaf.grad, learnt[name].grad
        assert expected is not None and own is not None, name  # noqa: PT018
        assert float((own - expected).norm()) <= 2e-6 * float(expected.norm()), name


def test_what_is_saved_makes_the_same_clips_and_only_adapters_and_the_row_have_learnt(
    run: Path, subject: Path, tmp_path: Path
) -> None:
    config = config_for(run, subject, tmp_path / "out")
    plugin, world = make_plugin(config, "fp32", 1), init_world()
    planned = _plan(config, plugin, world, "fp32", 1, lambda _: None)
    trainer = DreamBoothTrainer(config, planned, world, "fp32")
    outcome = trainer.run_to_end(_Never())  # type: ignore[arg-type]
    assert outcome.result is not None
    requests = [Request(f"{TEXT} moving left", CLIP, 3), Request("the digit 2", CLIP, 4)]
    sampling = SamplingConfig(steps=3)
    trainer.base.trained.eval()
    made = trainer.base.maker.generate(requests, sampling)  # type: ignore[attr-defined]
    loaded, base = open_run(run), open_run(run)
    load_adapter(loaded, outcome.result)
    # On some processors a product depends on where its operands lie.
    again = loaded.generate(requests, sampling)
    torch.testing.assert_close(again, made, rtol=1e-4, atol=1e-5)
    plain = base.generate(requests, sampling)
    assert (plain[0] - made[0]).abs().max() > 1e-2
    frozen = dict(base.model.state_dict())  # type: ignore[union-attr]
    for name, value in trainer.base.trained.state_dict().items():
        if "lora" not in name:
            assert torch.equal(value, frozen[name.replace(".base_layer", "")]), name
    assert not any("sks" in line for line in loaded.remarks(requests[0]))


class _Never:
    wanted = False


def test_pictures_in_motion_resume_and_are_loaded_by_the_command(
    run: Path, subject: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    motion = {"motion": "the {class} {token} moving {left|up}", "motion_clips": 2}
    more: dict[str, Any] = {**motion, "motion_after": 1, "motion_placed": True, "steps": 2}
    config = config_for(run, subject, out, **more)
    outcome = dreambooth(config)
    assert outcome.finished
    assert outcome.result == out / "result"
    captions = [path.read_text() for path in sorted((out / "motion").glob("clip*.txt"))]
    assert captions == ["the digit sks moving left"] * 2
    clip = np.load(out / "motion" / "clip-00000.npy")
    assert clip.shape == (5, 16, 16, 3)
    weights = (out / "result" / "adapter_model.safetensors").read_bytes()
    (out / "result").rename(out / "before")
    assert dreambooth(replace(config, resume=True)).finished
    assert (out / "result" / "adapter_model.safetensors").read_bytes() == weights
    shape = ["--frames", "5", "--resolution", "16", "--steps", "2"]
    told = ["generate", "--run", str(run), "--adapter", str(out / "result"), *shape]
    with pytest.raises(SystemExit) as ended:
        main([*told, "--prompt", "the digit sks moving right", "--out", str(tmp_path / "a.gif")])
    assert ended.value.code == 0
    assert (tmp_path / "a.gif").is_file()
    other = trained(tmp_path, seed=1)
    told[2] = str(other)
    with pytest.raises(SystemExit):
        main([*told, "--prompt", "the digit sks", "--out", str(tmp_path / "b.gif")])
    assert "trained on another base" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["STDiT3", "STDiT2"])
def test_public_weights_train_on_clips_without_learn_token(
    parts: Path,  # noqa: F811
    subject: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    train(config_of(parts, tmp_path / "run", kind, steps=1))
    usual = DreamboothConfig()
    options: dict[str, Any] = {
        "prompt": "{token} cat",
        "token": "the",
        "class_word": "",
        "prior_pictures": None,
    }
    options["prior_prompt"] = usual.prior_prompt
    config = config_for(tmp_path / "run", subject, tmp_path / "out", **options)
    with pytest.raises(GulliverError, match="omit --learn-token"):
        dreambooth(config)
    outcome = dreambooth(replace(config, learn_token=False, token_rate=usual.token_rate))
    assert outcome.result is not None
    loaded, base = open_run(tmp_path / "run"), open_run(tmp_path / "run")
    load_adapter(loaded, outcome.result)
    request, sampling = [Request("the cat", Bucket(9, 32, 32))], SamplingConfig(steps=2)
    made, plain = (one.generate(request, sampling)[0] for one in (loaded, base))
    assert made.isfinite().all()
    assert not torch.equal(made, plain)


def test_a_picture_moves_as_a_clip_does() -> None:
    still = torch.full((3, 1, 16, 20), -1.0)
    still[:, :, 6:9, 8:12] = 1.0
    for begin, step in (((0, 0), (0, 0)), ((-4, -3), (2, 0)), ((3, 6), (-1, -3))):
        places = [(begin[0] + n * step[0], begin[1] + n * step[1]) for n in range(5)]
        clip = torch.cat([still.roll(place, (2, 3)) for place in places], 1)
        assert torch.equal(along(still, clip), clip)
        shaken = clip.clone()
        shaken[:, 2] = shaken[:, 2].roll((1, -1), (1, 2))
        assert torch.equal(along(still, shaken), clip), "one frame that is off moves nothing"
    assert torch.equal(along(still, still.roll(2, 3)), still.roll(2, 3))


def test_alternatives_in_braces_take_turns() -> None:
    assert alternatives("the {a|b} goes {up|down}") == [
        *("the a goes up", "the a goes down", "the b goes up", "the b goes down"),
    ]
    assert alternatives("a {word} alone") == ["a {word} alone"]
    assert math.prod(len(alternatives(text)) for text in ("{a|b|c}", "{d|}")) == 6


def test_activations_of_a_base_of_ours_are_known_before_it_runs(
    run: Path, subject: Path, tmp_path: Path
) -> None:
    config = config_for(run, subject, tmp_path / "out", memory="1MiB")
    with pytest.raises(GulliverError) as error:
        dreambooth(config)
    told = re.search(r"limit that works is (\d+)MiB.* 16\.0 MiB", str(error.value))
    assert told is not None, error
    assert int(told[1]) > 16
    assert "not known" not in str(error.value)
