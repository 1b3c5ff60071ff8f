"""Training of autoencoders: one loop, the same whole, streamed and shared, resumed to the bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gulliver.checkpoint import load
from gulliver.checkpoint.files import read_tensors
from gulliver.checkpoint.tree import split_state
from gulliver.cli.dispatch import main
from gulliver.comm import World
from gulliver.data import Bucket, BucketSampler
from gulliver.data.table import ClipTable
from gulliver.errors import GulliverError
from gulliver.jobs.log import Log, derive
from gulliver.models import VideoAutoencoder
from gulliver.video import TrainAutoencoderConfig, load_autoencoder
from gulliver.video.autoencoder_config import (
    AutoencoderDataConfig,
    AutoencoderLossConfig,
    AutoencoderModelConfig,
)
from gulliver.video.autoencoders import AutoencoderTrainer
from gulliver.video.autoencoders.clips import make_sources
from gulliver.video.autoencoders.job import run_autoencoder
from gulliver.video.autoencoders.losses import PatchDiscriminator
from gulliver.video.digits import MovingDigits
from gulliver.video.media import read_frames, write_clip
from gulliver.video.public_models import autoencoder_figures
from gulliver.video.run import Run
from gulliver.video.sources import make_dataset
from tests.pool import Pool
from tests.video.test_video_training import final_tensors
from tests.video.video_steps import all_steps

STEPS = 4
SHAPES = ("9x16x24:2", "1x16x16:1")
EVERYTHING = AutoencoderLossConfig(
    reconstruction="l1",
    learnt_variance=True,
    kl=0.01,
    perceptual="tests.video.test_autoencoder_losses:features",
    adversarial=0.5,
    adversarial_start=2,
    discriminator_width=8,
)


def small(out: Path, **changes: Any) -> TrainAutoencoderConfig:
    config = TrainAutoencoderConfig(
        out=out,
        steps=STEPS,
        log_every=1,
        data=AutoencoderDataConfig(shapes=SHAPES, batch_size=3, clips=24),
        model=AutoencoderModelConfig(latent_channels=3, posterior=True),
        loss=EVERYTHING,
    )
    return replace(config, **changes)


def tiny(config: TrainAutoencoderConfig) -> VideoAutoencoder:
    torch.manual_seed(3)
    return VideoAutoencoder(3, width=8, posterior=config.model.posterior).double()


def curve(world: World, config: TrainAutoencoderConfig) -> list[dict[str, float]]:
    """Figures of each step, in float64."""
    sources = make_sources(make_dataset(config.data, 100), config.data, config.seed)
    trainer = AutoencoderTrainer(config, tiny(config), sources, world)
    lines = all_steps(trainer)
    trainer.passes.off()
    drop = ("step", "learning_rate")
    return [{n: v for n, v in line.items() if n not in drop} for line in lines]


def naive_curve(config: TrainAutoencoderConfig) -> list[dict[str, float]]:
    """The same by plain torch: what the loop is meant to compute."""
    from tests.video.test_autoencoder_losses import naive_perceptual

    dataset = make_dataset(config.data, 100)
    assert isinstance(dataset, MovingDigits)
    buckets = [dataset.bucket_of(index) for index in range(len(dataset))]
    sampler = BucketSampler(buckets, config.data.batch_size, seed=config.seed)
    model, spread = tiny(config), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(derive(config.seed, 9))
    critic = PatchDiscriminator(config.loss.discriminator_width).double()
    one = torch.optim.AdamW(
        [*model.parameters(), spread], lr=config.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        one, config.learning_rate, total_steps=config.steps + 1, pct_start=0.1
    )
    two = torch.optim.AdamW(
        critic.parameters(), lr=config.loss.discriminator_rate, betas=(0.5, 0.9), weight_decay=0.0
    )
    found = []
    for done, step in enumerate(list(sampler)[: config.steps]):
        video = dataset.batch(step.indices).double()
        seed = derive(config.seed, step.epoch, step.number)
        draw = torch.Generator().manual_seed(seed)
        mean, logvar = model.moments(video).split(3, dim=1)
        noise = torch.randn(mean.shape, generator=draw).double()
        decoded = model.decode_raw(mean + (logvar / 2).exp() * noise)
        error = (decoded - video).abs().mean() + naive_perceptual(video, decoded)
        likelihood = error / spread.exp() + spread
        loss = likelihood + 0.01 * 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        if done >= config.loss.adversarial_start:
            made = -critic(decoded).mean()
            last = model.last_layer
            norms = [
                torch.autograd.grad(term, last, retain_graph=True)[0].norm()
                for term in (likelihood, made)
            ]
            loss = loss + 0.5 * (norms[0] / (norms[1] + 1e-4)).clamp(max=1e4) * made
        one.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*model.parameters(), spread], config.clip)
        one.step()
        schedule.step()
        figures = {"loss": float(loss.detach()), "grad_norm": float(norm)}
        if done >= config.loss.adversarial_start:
            two.zero_grad()
            wrong = F.relu(1 - critic(video)).mean() + F.relu(1 + critic(decoded.detach())).mean()
            (wrong / 2).backward()
            two.step()
            figures["discriminator"] = float(wrong.detach() / 2)
        found.append(figures)
    return found


def assert_same_curve(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted) == STEPS
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for name in other:
            assert one[name] == pytest.approx(other[name], rel=1e-10, abs=1e-10), (step, name)


def _curves(world: World, configs: list[TrainAutoencoderConfig]) -> list[list[dict[str, float]]]:
    return [curve(world, config) for config in configs]


def test_whole_streamed_and_shared_steps_have_the_curve_of_plain_torch(
    pool: Pool, tmp_path: Path
) -> None:
    config = small(tmp_path)
    wanted = naive_curve(config)
    assert {"discriminator", "grad_norm", "loss"} == set(wanted[-1])
    alone = World(0, 1, 0, torch.device("cpu"))
    assert_same_curve(curve(alone, config), wanted)
    assert_same_curve(curve(alone, replace(config, segment_frames=4)), wanted)
    ways = [
        config,
        replace(config, share_ranks=2),
        replace(config, share_ranks=2, share_dim="time"),
    ]
    for way in pool.run(_curves, 2, ways)[0]:
        assert_same_curve(way, wanted)


def test_a_stopped_and_resumed_run_ends_with_the_same_bytes(
    films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = AutoencoderDataConfig(
        table=films, shapes=("5x16x16", "1x16x16"), batch_size=2, repeats=2, in_memory=True
    )
    config = small(tmp_path / "whole", steps=6, save_every=100, report_every=4, ema=0.9, data=data)
    outcome = run_autoencoder(config)
    assert outcome.finished
    assert outcome.path.name == "autoencoder.safetensors"
    content, log = read_tensors(outcome.path), Run(config.out).log.read()
    first = all_tensors(config.out)
    assert {name.split(":")[0] for name in first} >= {"discriminator", "discriminator_optimizer"}
    assert [line["step"] for line in log] == [1, 2, 3, 4, 4, 5, 6, 6]
    assert (config.out / "reconstruction.png").stat().st_size > 100
    broken = replace(config, out=tmp_path / "broken")
    with monkeypatch.context() as patched:
        patched.setattr(Log, "append", _stopping_at(3, Log.append))
        stopped = run_autoencoder(broken)
    assert (stopped.step, stopped.finished, stopped.path.exists()) == (3, False, False)
    with pytest.raises(GulliverError, match="already holds a run"):
        run_autoencoder(broken)
    again = run_autoencoder(replace(broken, resume=True))
    assert autoencoder_figures(again.path) == outcome.figures
    result = read_tensors(again.path)
    assert [name for name in content if not torch.equal(content[name], result[name])] == []
    second = all_tensors(broken.out)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    for old, new in zip(log, Run(broken.out).log.read(), strict=True):
        assert {**old, "seconds": 0} == {**new, "seconds": 0}
    with pytest.raises(GulliverError, match=r"cannot be resumed.*loss\.kl was 0\.01"):
        run_autoencoder(replace(broken, resume=True, loss=replace(config.loss, kl=1.0)))
    loaded = load_autoencoder(again.path)
    assert loaded.config["posterior"]
    clip = MovingDigits("heldout", 1, shapes={Bucket(5, 16, 16): 1.0})[0].video[None]
    assert loaded.encode(clip).shape == (1, 3, 2, 4, 4)
    # The result goes on with other options.
    model = AutoencoderModelConfig(init=again.path)
    further = small(tmp_path / "further", steps=1, model=model, loss=AutoencoderLossConfig())
    assert load_autoencoder(run_autoencoder(further).path).config["posterior"]
    pulled = replace(further, out=tmp_path / "pull", loss=AutoencoderLossConfig(latent_pull=0.1))
    with pytest.raises(GulliverError, match=r"--loss\.latent-pull is 0\.1\b"):
        run_autoencoder(pulled)


def _stopping_at(step: int, append: Callable[[Log, dict[str, Any]], None]) -> Any:
    """Appends a line, and asks this process to stop at the line of a step."""

    def stopping(log: Log, line: dict[str, Any]) -> None:
        append(log, line)
        if line["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stopping


def all_tensors(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = dict(final_tensors(out))
    values = load(Run(out).newest_checkpoint()).values
    for entry in ("discriminator", "discriminator_optimizer"):
        tensors, _ = split_state(values[entry])
        found |= {f"{entry}:{name}": value for name, value in tensors.items()}
    return found


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two films whose frames say which they are, and a picture."""
    folder = tmp_path_factory.mktemp("films")
    for name, frames in (("rising_light", 40), ("falling-light", 12)):
        levels = torch.arange(frames).float() / 20 - 1
        video = levels.view(1, frames, 1, 1).expand(3, frames, 48, 64)
        write_clip(folder / "sub" / f"{name}.mp4", video, fps=8)
    write_clip(folder / "grey.png", torch.zeros(3, 1, 32, 32), fps=8)
    return folder


def test_frames_are_held_out_pictures_mixed_in_and_clips_kept_in_memory(films: Path) -> None:
    table = ClipTable(films, (Bucket(5, 32, 32), Bucket(1, 32, 32)))
    assert [row.text for row in table.rows] == ["grey", "falling light", "rising light"]
    data = AutoencoderDataConfig(
        table=films, held_out_frames=0.25, repeats=8, image_share=0.5, in_memory=True
    )
    training, held_out, name, _ = make_sources(table, data, 0)
    assert name == "2 held-out windows of 1 clips"
    assert len(training) == 24
    buckets = [training.bucket_of(index) for index in range(24)]
    assert buckets.count(Bucket(1, 32, 32)) >= 12
    levels = set()
    for index in range(24):
        if training.bucket_of(index).frames == 5 and table.rows[index % 3].text == "rising light":
            for seed in range(40):
                clip = training.read(index, seed)
                levels |= {round((float(v) + 1) * 20) for v in clip.video.mean(dim=(0, 2, 3))}
    # Frames 0 to 29 are trained on, the windows 30 to 34 and 35 to 39 are held out.
    assert {0, 29} <= levels <= set(range(30))
    for index, first in enumerate((30, 35)):
        means = held_out[index].video.mean(dim=(0, 2, 3))
        assert [round((float(v) + 1) * 20) for v in means] == list(range(first, first + 5))
    direct = make_sources(table, replace(data, in_memory=False), 0).held_out[0].video
    assert float((direct - held_out[0].video).abs().max()) < 1.1 / 127.5


def test_a_clip_that_cannot_be_read_is_left_out_and_too_many_end_the_run(
    films: Path, tmp_path: Path
) -> None:
    for path in films.rglob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shapes = ("5x32x32", "1x32x32")
    data = AutoencoderDataConfig(table=tmp_path, shapes=shapes, batch_size=4, repeats=4)
    config = small(tmp_path / "run", data=data, loss=AutoencoderLossConfig(), steps=2)
    dataset = make_dataset(data, 100, show=False)
    sources = make_sources(dataset, data, 0)
    (tmp_path / "grey.png").write_bytes(b"")
    trainer = AutoencoderTrainer(config, tiny(config), sources, World(0, 1, 0, torch.device("cpu")))
    with pytest.raises(GulliverError, match=r"4 of the 12 clips.*--data.unreadable-limit"):
        all_steps(trainer)
    allowed = replace(config, data=replace(data, unreadable_limit=1.0), steps=6)
    trainer = AutoencoderTrainer(
        allowed, tiny(config), sources, World(0, 1, 0, torch.device("cpu"))
    )
    assert len(all_steps(trainer)) == 6


def test_the_command_trains_and_its_result_is_taken_by_a_run(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ae"
    options = "--data.shapes 5x32x32 1x32x32 --data.batch-size 4 --data.repeats 3 --steps 3"
    with pytest.raises(SystemExit) as stopped:
        main(["train-autoencoder", "--out", str(out), "--data.table", str(films), *options.split()])
    assert stopped.value.code == 0
    assert "dB, SSIM" in capsys.readouterr().err
    figures = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert figures["psnr"] > 0
    assert -1 <= figures["ssim"] <= 1
    assert read_frames(out / "reconstruction.png").shape[2] > 2 * 96
    given = f"--autoencoder.path {out / 'autoencoder.safetensors'} --steps 1 --data.clips 40"
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--out", str(tmp_path / "run"), "--data.shapes", "5x32x32", *given.split()])
    assert stopped.value.code == 0


def test_nothing_held_out_and_other_ranks_are_refused(films: Path, tmp_path: Path) -> None:
    table = ClipTable(films, (Bucket(5, 32, 32),))
    data = AutoencoderDataConfig(table=films, held_out_frames=0.0)
    with pytest.raises(GulliverError, match=r"--data.held-out-clips 0 .* 2 clips"):
        make_sources(table, data, 0)
    config = small(tmp_path, share_ranks=2)
    sources = make_sources(make_dataset(config.data, 9), config.data, 0)
    with pytest.raises(GulliverError, match="--share-ranks 2 "):
        AutoencoderTrainer(config, tiny(config), sources, World(0, 1, 0, torch.device("cpu")))
