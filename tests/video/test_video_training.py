"""The training job: the same on any number of ranks, and after any end."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gulliver.checkpoint import load
from gulliver.checkpoint.reader import StepReader
from gulliver.checkpoint.tree import split_state
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.options import resolved
from gulliver.video import DataConfig, TrainConfig, Trainer
from gulliver.video.config import (
    AutoencoderConfig,
    FlowConfig,
    OptimizerConfig,
)
from gulliver.video.planned_training import train
from gulliver.video.public_models import save_autoencoder
from gulliver.video.run import Run
from gulliver.video.sources import make_dataset
from tests.patience import patient
from tests.pool import Pool
from tests.programs import Program, module
from tests.video.video_steps import one_step

SHAPES = ("9x32x32:2", "5x24x40:1", "1x32x32:1")


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained autoencoder: what it encodes to does not matter here."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("autoencoder") / "a.safetensors"
    save_autoencoder(path, VideoAutoencoder(width=8))
    return path


def small(out: Path, autoencoder: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        out=out,
        steps=8,
        save_every=3,
        log_every=1,
        data=DataConfig(shapes=SHAPES, batch_size=7, clips=60),
        autoencoder=AutoencoderConfig(path=autoencoder),
        optimizer=OptimizerConfig(warmup=2),
        # Given frames often, so that a few steps meet them.
        flow=FlowConfig(masks=("image_head:0.3", "extend:0.3")),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def final_tensors(out: Path) -> dict[str, Tensor]:
    values = load(Run(out).newest_checkpoint()).values
    found: dict[str, Tensor] = {}
    for entry in ("model", "ema", "optimizer"):
        tensors, rest = split_state(values[entry])
        found |= {f"{entry}:{name}": value for name, value in tensors.items()}  # type: ignore[misc]
        text = bytearray(repr(rest).encode())
        found[f"rest of {entry}"] = torch.frombuffer(text, dtype=torch.uint8)
    return found


def position(out: Path) -> dict:
    with StepReader(Run(out).newest_checkpoint()) as reader:
        return reader.value("run")


def assert_same_bytes(one: Path, other: Path) -> None:
    first, second = final_tensors(one), final_tensors(other)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []
    states = [position(out) for out in (one, other)]
    assert states[0]["step"] == states[1]["step"]
    assert states[0]["position"] == states[1]["position"]


def _train_in_world(world: World, config: TrainConfig) -> list[dict]:
    train(config)
    return Run(config.out).log.read()


def test_one_two_and_four_ranks_train_the_same_model(
    pool: Pool, tmp_path: Path, autoencoder: Path, full: bool
) -> None:
    logs = {}
    ways: list[tuple[str, int, dict]] = [
        ("one", 1, {}),
        ("four", 4, {"stage": 2}),
        ("ddp", 2, {"plugin": "ddp"}),
    ]
    if full:
        ways += [("two", 2, {}), ("accumulating", 2, {"accumulate": 2})]
    for name, size, changes in ways:
        config = small(tmp_path / name, autoencoder, **changes)
        logs[name] = pool.run(_train_in_world, size, config)[0]
    expected = final_tensors(tmp_path / "one")
    for name, log in logs.items():
        assert [line["step"] for line in log] == list(range(1, 9))
        for line, first in zip(log, logs["one"], strict=True):
            assert line["loss"] == pytest.approx(first["loss"], rel=2e-5)
            assert line["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
        found = final_tensors(tmp_path / name)
        # As a whole: biases of keys have no gradient but rounding, which AdamW makes steps of.
        names = [key for key in expected if key.startswith("model")]
        error = sum(float((found[k] - expected[k]).double().square().sum()) for k in names)
        size = sum(float(expected[k].double().square().sum()) for k in names)
        assert math.sqrt(error / size) < 1e-3, name


def cli(*arguments: str) -> Program:
    """The command line in a process of its own, which leads a group of processes."""
    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return Program(module, "gulliver.cli", *arguments, env=environment)


def options_of(config: TrainConfig) -> list[str]:
    """The command line of a small run."""
    path = config.out.parent / f"{config.out.name}.json"
    path.write_text(json.dumps(resolved(config)))
    return ["train", "--config", str(path)]


def wait_for_step(out: Path, step: int, process: Program) -> None:
    end = time.monotonic() + patient(60)
    while time.monotonic() < end and process.poll() is None:
        log = out / "log.jsonl"
        if log.is_file() and log.read_text().count("\n") >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step}: {process.communicate()}")


def test_killed_and_resumed_ends_with_the_same_bytes(
    pool: Pool, tmp_path: Path, autoencoder: Path, full: bool
) -> None:
    whole = small(tmp_path / "whole", autoencoder, ranks=2)
    pool.run(_train_in_world, 2, whole)
    broken = small(tmp_path / "broken", autoencoder, ranks=2)
    process = cli(*options_of(broken))
    wait_for_step(broken.out, random.Random().randint(2, 7), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    if full:
        process = cli(*options_of(broken), "--resume")
        _, errors = process.communicate(timeout=patient(90))
        assert process.returncode == 0, errors
        assert "resumed at step" in errors or "8/8" in errors
    else:
        pool.run(_train_in_world, 2, replace(broken, resume=True))
    assert_same_bytes(whole.out, broken.out)
    assert [line["step"] for line in Run(broken.out).log.read()] == list(range(1, 9))


def test_sigterm_saves_and_resuming_continues_bit_for_bit(
    tmp_path: Path, autoencoder: Path
) -> None:
    whole = small(tmp_path / "whole", autoencoder, steps=12, save_every=100)
    train(whole)
    stopped = small(tmp_path / "stopped", autoencoder, steps=12, save_every=100)
    process = cli(*options_of(stopped))
    wait_for_step(stopped.out, 3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=patient(60))
    if process.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert process.returncode == 143
    assert "continue with --resume" in errors
    reached = position(stopped.out)["step"]
    assert 3 <= reached < 12
    train(replace(stopped, resume=True))
    assert_same_bytes(whole.out, stopped.out)


def _trainer(config: TrainConfig, autoencoder: Path) -> Trainer:
    from gulliver.video import load_autoencoder

    config.out.mkdir(parents=True, exist_ok=True)
    world = World(0, 1, 0, torch.device("cpu"))
    dataset = make_dataset(config.data, config.model.text_length)
    return Trainer(config, Run(config.out), dataset, load_autoencoder(autoencoder), world)


def test_a_loss_that_is_no_number_stops_before_the_weights_change(
    tmp_path: Path, autoencoder: Path
) -> None:
    trainer = _trainer(small(tmp_path, autoencoder), autoencoder)
    batches = trainer.maker.batches()
    one_step(trainer, next(batches))
    trainer.save()
    before = {n: p.detach().clone() for n, p in trainer.plain_model.named_parameters()}
    batch = next(batches)
    spoiled = replace(batch, latents=batch.latents * float("nan"))
    with pytest.raises(GulliverError, match=r"loss nan.*step-00000001.*lower"):
        one_step(trainer, spoiled)
    batches.close()
    for name, parameter in trainer.plain_model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_the_average_follows_its_definition(tmp_path: Path, autoencoder: Path) -> None:
    trainer = _trainer(small(tmp_path, autoencoder), autoencoder)
    name = "final_layer.linear.weight"
    expected = trainer.plain_model.state_dict()[name].detach().clone()
    batches = trainer.maker.batches()
    for k in range(1, 4):
        one_step(trainer, next(batches))
        decay = min(0.995, (1 + k) / (10 + k))
        expected = decay * expected + (1 - decay) * trainer.plain_model.state_dict()[name]
    batches.close()
    torch.testing.assert_close(trainer.average.shadow[name], expected)


def test_a_rank_without_a_sample_takes_part(pool: Pool, tmp_path: Path, autoencoder: Path) -> None:
    data = DataConfig(shapes=("5x32x32",), batch_size=1, clips=10)
    config = small(tmp_path / "a", autoencoder, data=data, steps=3)
    one = pool.run(_train_in_world, 1, config)[0]
    two = pool.run(_train_in_world, 2, replace(config, out=tmp_path / "b"))[0]
    for line, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(line["loss"], rel=2e-5)


def test_a_run_is_not_overwritten_nor_resumed_as_another(tmp_path: Path, autoencoder: Path) -> None:
    config = small(tmp_path / "run", autoencoder, steps=2)
    train(config)
    with pytest.raises(GulliverError, match=r"already holds a run.*--resume"):
        train(config)
    other = replace(config, resume=True, optimizer=replace(config.optimizer, clip=2.0))
    with pytest.raises(GulliverError, match=r"optimizer.clip was 1.0, is 2.0"):
        train(other)
    assert train(replace(config, resume=True)).finished


def test_resume_step_selects_a_checkpoint(tmp_path: Path, autoencoder: Path) -> None:
    config = small(tmp_path / "run", autoencoder, steps=3, save_every=1)
    train(config)
    first = final_tensors(config.out)
    back = replace(config, resume=True, resume_step=1)
    assert train(back).finished
    # Three steps again, of which this call made two, to the same bytes.
    assert [line["step"] for line in Run(config.out).log.read()] == [1, 2, 3]
    for name, value in final_tensors(config.out).items():
        assert torch.equal(value, first[name]), name
    with pytest.raises(GulliverError, match=r"no complete step 7: it has \[1, 2, 3\]"):
        train(replace(back, resume_step=7))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trian"], 2, "'train'"),
        (["train", "--model.size", "tinny"], 2, "'tinny': did you mean 'tiny'?"),
        (["train", "--data.shapes", "13by32"], 2, "'13by32'"),
        (["train", "--data.shapes", "12x32x32"], 2, "such as 13"),
        (["train", "--data.table", "x", "--data.shapes", "4x32x32"], 2, "such as 5x32x32"),
        (["train", "--data.held-out", "12:9"], 1, "is not digit:direction"),
        (["train", "--autoencoder.path", "no.safetensors"], 1, "no.safetensors does not exist"),
        (["generate", "--run", "nowhere", "--prompt", "x"], 1, "nowhere has no training run"),
        (["generate", "--prompt", "x", "--out", "a.avi"], 2, "'a.avi'"),
        (["generate"], 2, "nothing to generate"),
    ],
)
def test_mistakes_end_in_one_clear_line(
    arguments: list[str], code: int, message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from gulliver.cli.dispatch import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert list(tmp_path.rglob("*.*")) == []


TABLE = DataConfig(table=Path("x.csv"))


def test_training_on_a_table_counts_what_it_cannot_use(
    tmp_path: Path, autoencoder: Path, capsys: pytest.CaptureFixture
) -> None:
    from tests.video.test_data import write_table, write_video

    for name in ("a.mp4", "b.mp4", "c.mp4"):
        write_video(tmp_path / name, 9, 32, 32)
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    rows = [{"path": n, "text": "a ramp"} for n in ("a.mp4", "b.mp4", "c.mp4", "bad.mp4")]
    table = write_table(tmp_path, rows)
    data = DataConfig(table=table, shapes=("9x32x32",), batch_size=2)
    config = small(tmp_path / "run", autoencoder, data=data, steps=3)
    train(config)
    said = " ".join(capsys.readouterr().err.split())
    assert "3 clips used, 1 skipped" in said
    assert "bad.mp4: cannot be decoded" in said
    assert len(Run(config.out).log.read()) == 3
    for shape in ("8x32x32", "9x36x32"):
        odd = replace(config, out=tmp_path / "odd", data=replace(data, shapes=(shape,)))
        with pytest.raises(GulliverError, match=rf"--data\.shapes {shape} .*4 k \+ 1"):
            train(odd)
    long = [{"path": "a.mp4", "text": "one two three four five six seven eight nine"}]
    wordy = replace(
        config, out=tmp_path / "wordy", data=replace(data, table=write_table(tmp_path, long))
    )
    with pytest.raises(GulliverError, match=r"add --model\.text-length 9"):
        train(wordy)


def _ramps(folder: Path, count: int) -> Path:
    """A table of clips that says how long they are."""
    from tests.video.test_data import write_table, write_video

    folder.mkdir()
    names = [f"{number}.mp4" for number in range(count)]
    write_video(folder / names[0], 5, 32, 32)
    for name in names[1:]:
        (folder / name).write_bytes((folder / names[0]).read_bytes())
    claimed = {"text": "a ramp", "num_frames": "5", "height": "32", "width": "32", "fps": "8"}
    return write_table(folder, [{"path": name, **claimed} for name in names])


def _train_until_the_clips_are_gone(world: World, config: TrainConfig, after: int) -> list[dict]:
    """Moves the clips away after a step, by rank 0."""
    from gulliver.video import planned_training as training

    table = config.data.table
    assert table is not None

    class Mover(training.Trainer):
        def after_update(self) -> Mapping[str, float]:
            figures = super().after_update()
            if self.step_number == after and self.world.is_main:
                for clip in table.parent.glob("*.mp4"):
                    clip.rename(clip.with_suffix(".away"))
            return figures

    before, training.Trainer = training.Trainer, Mover
    try:
        with pytest.raises(GulliverError) as stopped:
            train(config)
    finally:
        training.Trainer = before
    return [str(stopped.value), *Run(config.out).log.read()]  # type: ignore[list-item]


def test_a_run_that_loses_its_clips_stops_and_keeps_what_it_has_learnt(
    pool: Pool, tmp_path: Path, autoencoder: Path
) -> None:
    table = _ramps(tmp_path / "clips", 12)
    data = DataConfig(table=table, shapes=("5x32x32",), batch_size=2)
    config = small(tmp_path / "run", autoencoder, data=data, steps=12, save_every=4, keep=2)
    for ranks in (1, 2):
        config = replace(config, out=tmp_path / str(ranks))
        message, *log = pool.run(_train_until_the_clips_are_gone, ranks, config, 3)[0]
        assert "clips of epoch" in message
        assert "could not be read" in message
        assert "continue with --resume" in message
        # Batches made ahead were steps still; none had a loss of zero, none came without clips.
        assert 3 <= len(log) <= 7
        assert all(line["loss"] > 0.1 for line in log)
        reached = position(config.out)
        assert reached["step"] == len(log)
        assert f"step-{len(log):08d}" in message
        for clip in table.parent.glob("*.away"):
            clip.rename(clip.with_suffix(".mp4"))
    assert train(replace(config, resume=True)).finished


def test_a_batch_without_a_sample_is_no_step(tmp_path: Path, autoencoder: Path) -> None:
    table = _ramps(tmp_path / "clips", 4)
    data = DataConfig(table=table, shapes=("5x32x32",), batch_size=2, unreadable_limit=1.0)
    trainer = _trainer(small(tmp_path / "run", autoencoder, data=data), autoencoder)
    batches = trainer.maker.batches()
    one_step(trainer, next(batches))
    before = {n: p.detach().clone() for n, p in trainer.plain_model.named_parameters()}
    shadow = {n: v.clone() for n, v in trainer.average.shadow.items()}
    rate, position = trainer.scheduler.get_last_lr(), trainer.position
    empty = replace(next(batches), latents=torch.zeros(1, 8, 2, 8, 8), weight=0.0, skipped=2)
    figures = one_step(trainer, empty)
    batches.close()
    assert figures == {}
    assert (trainer.step_number, trainer.scheduler.get_last_lr()) == (1, rate)
    assert trainer.position == position
    for name, parameter in trainer.plain_model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert all(torch.equal(v, shadow[n]) for n, v in trainer.average.shadow.items())


def test_torn_log_is_repaired_on_resume(tmp_path: Path, autoencoder: Path) -> None:
    config = small(tmp_path / "run", autoencoder, steps=2, save_every=1)
    log = Run(config.out).log.path
    log.parent.mkdir()
    # Killed before its first checkpoint, in the middle of a line.
    log.write_bytes(b'{"step": 1, "loss": 9, "seconds": 1}\n{"step": 2, "lo')
    train(config)
    assert [line["step"] for line in Run(config.out).log.read()] == [1, 2]
    assert "9," not in log.read_text()
    with log.open("ab") as file:
        file.write(b'{"step": 3, "loss": 1.0, "sec\xff\x00')
    longer = replace(config, steps=2, resume=True)
    Run(config.out).checkpoints.path(2).rename(tmp_path / "away")
    assert train(longer).finished
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]
    log.unlink()
    log.symlink_to(tmp_path / "victim")
    with pytest.raises(GulliverError, match=r"log\.jsonl cannot be written"):
        Run(config.out).log.append({"step": 1})
    assert not (tmp_path / "victim").exists()
