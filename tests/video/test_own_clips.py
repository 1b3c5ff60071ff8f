"""A newcomer's way, through the command line: a folder of clips, a table, latents, a model, clips.

And the samples that a run makes while it trains: those of `gulliver generate` at the same step.
"""

from __future__ import annotations

import json
import math
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("duckdb")
pytest.importorskip("scenedetect")

from gulliver.cli.dispatch import main
from gulliver.comm import World
from gulliver.jobs.log import Log
from gulliver.video import DataConfig, Run, TrainConfig, VideoModel
from gulliver.video.config import OptimizerConfig, SamplesConfig
from gulliver.video.planned_training import train
from gulliver.video.preparation import Table
from tests.pool import Pool
from tests.video.test_video_training import _train_in_world, assert_same_bytes, autoencoder, small

__all__ = ["autoencoder"]  # a fixture

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_clips.py"


def call(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0


def sampled(out: Path, path: Path, **changes: object) -> TrainConfig:
    options = {
        "steps": 3,
        "save_every": 2,
        "data": DataConfig(shapes=("5x16x16",), batch_size=4, clips=40),
        "optimizer": OptimizerConfig(warmup=1),
        "samples": SamplesConfig(every=2, clips=2, steps=3, seed=7),
    }
    return small(out, path, **options | changes)


def files(out: Path, step: int) -> dict[str, bytes]:
    folder = out / "samples" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory, autoencoder: Path) -> TrainConfig:
    """A run that has made samples; nobody may change it."""
    config = sampled(tmp_path_factory.mktemp("sampling") / "run", autoencoder)
    train(config)
    return config


def _train_all(world: World, configs: list[TrainConfig]) -> None:
    for config in configs:
        _train_in_world(world, config)


def test_samples_are_the_clips_of_the_checkpoint_at_any_ranks_and_change_nothing(
    pool: Pool, tmp_path: Path, autoencoder: Path, sampling: TrainConfig, full: bool
) -> None:
    config = sampling
    lines = Run(config.out).samples.read()
    assert [line["step"] for line in lines] == [2, 3], "at the end, too"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(lines[-1]["prompts"]))
    told = ["--run", config.out, "--prompts", prompts, "--frames", 5, "--resolution", 16]
    told += ["--steps", 3, "--seed", 7, "--scale", 8, "--out", tmp_path / "clip.mp4"]
    call("generate", *told)
    made = files(config.out, 3)
    assert set(made) == {"000.mp4", "001.mp4", "sheet.png"}
    for number in range(2):
        assert made[f"{number:03d}.mp4"] == (tmp_path / f"clip-{number:03d}.mp4").read_bytes()
    assert made["000.mp4"] != made["001.mp4"]
    assert made["000.mp4"] != files(config.out, 2)["000.mp4"], "the model has learnt since"
    plain = replace(config, out=tmp_path / "plain", samples=SamplesConfig())
    train(plain)
    assert_same_bytes(plain.out, config.out)
    # Other prompts, of a file; two ranks, and two stages of a pipeline.
    asked = SamplesConfig(every=2, prompts=prompts, steps=3, seed=7)
    ways: dict[str, dict[str, int]] = {"two": {}} | ({"stages": {"pp_size": 2}} if full else {})
    many = [
        sampled(tmp_path / name, autoencoder, samples=asked, steps=2, **changes)
        for name, changes in ways.items()
    ]
    pool.run(_train_all, 2, many)
    for one in many:
        assert [line["step"] for line in Run(one.out).samples.read()] == [2]
        assert VideoModel.load(one.out).fps == 8
        out = one.out.with_suffix(".mp4")
        call("generate", "--run", one.out, *told[2:-1], out)
        found = files(one.out, 2)["001.mp4"]
        assert found == out.with_name(f"{out.stem}-001.mp4").read_bytes()


def test_a_run_that_was_killed_while_it_sampled_makes_the_samples_when_it_is_resumed(
    tmp_path: Path, sampling: TrainConfig
) -> None:
    config = replace(sampling, out=tmp_path / "run")
    shutil.copytree(sampling.out, config.out)
    expected = {step: files(config.out, step) for step in (2, 3)}
    shutil.rmtree(config.out / "samples")
    log = Log(config.out / "samples.jsonl")
    log.cut(2)
    train(replace(config, resume=True))
    assert files(config.out, 3) == expected[3]
    assert [line["step"] for line in log.read()] == [2, 3]
    train(replace(config, resume=True, resume_step=2))
    assert files(config.out, 3) == expected[3]
    assert [line["step"] for line in log.read()] == [2, 3]


def test_own_clips_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLE))
    example["main"](Path("footage"), most=12)
    call("data", "scan", "footage")
    call("data", "cut", "footage/clips.parquet", "--out", "clips/clips.parquet")
    call("data", "score", "clips/clips.parquet", "--scorers", "brightness", "phash")
    call("data", "dedup", "clips/clips.parquet", "--out", "clips/unique.parquet")
    good = "clips/good.parquet"
    condition = "brightness > 20 and text <> 'film'"
    call("data", "filter", "clips/unique.parquet", condition, "--out", good)
    call("data", "show", good, "--out", "clips.html")
    told = capsys.readouterr()
    for step in ("cut", "score", "dedup", "filter", "show"):
        assert f"next: gulliver data {step} " in told.err
    assert "next: gulliver train --data.table clips/good.parquet" in told.err
    rows = {
        name: len(Table.read(Path(name)))
        for name in ("footage/clips.parquet", "clips/clips.parquet", "clips/unique.parquet", good)
    }
    # 12 drawn, a film, a dark room, a copy; then the film's three scenes; without dark and copy.
    assert list(rows.values()) == [15, 17, 15, 12]
    assert "download.mp4" in told.out
    texts = set(Table.read(Path(good)).column("text"))
    assert len(texts) == 12

    shapes = ["--data.shapes", "5x16x16", "1x16x16"]
    few = ["--data.batch-size", "4", "--data.held-out-clips", "0.2"]
    call("train-autoencoder", "--out", "ae", "--data.table", good, *shapes, *few, "--steps", "2")
    assert "next: gulliver data encode clips/good.parquet" in capsys.readouterr().err
    coder = "ae/autoencoder.safetensors"
    call(
        "data", "encode", good, "--autoencoder", coder, "--out", "latents", "--shapes", *shapes[1:]
    )
    train_options = ["--data.batch-size", "4", "--validation.every", "12", "--validation.share"]
    train_options += [
        "0.3",
        "--samples.every",
        "12",
        "--optimizer.warmup",
        "1",
        "--samples.steps",
        "2",
        "--samples.clips",
    ]
    call("train", "--out", "run", "--data.encoded", "latents", "--steps", "24", *train_options, "2")
    told = capsys.readouterr()
    run = Run(Path("run"))
    validations = run.validation.read()
    assert [line["step"] for line in validations] == [12, 24]
    assert set(validations[0]["buckets"]) == {"5x16x16"}
    first, last = (np.mean(line["buckets"]["5x16x16"]) for line in validations)
    assert math.isfinite(first)
    assert last < first
    samples = run.samples.read()
    assert [line["step"] for line in samples] == [12, 24]
    assert set(samples[0]["prompts"]) <= texts
    assert "sheet.png" in told.err
    assert "next: gulliver generate --run run" in told.err
    assert "--frames 5 --resolution 16 --aspect-ratio 1:1" in told.err
    assert json.loads(run.clips_path.read_text()) == {"fps": 12.0}
    prompt = ["--prompt", samples[-1]["prompts"][0], "--frames", "5", "--resolution", "16"]
    call("generate", "--run", "run", *prompt, "--steps", "2", "--scale", "8", "--out", "x.mp4")
    assert Path("x.mp4").read_bytes() == files(Path("run"), 24)["000.mp4"]
