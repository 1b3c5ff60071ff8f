"""The training job: the same on any number of ranks, and after any end."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gulliver.checkpoint import StepReader, load, split_state
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.video import (
    AutoencoderConfig,
    DataConfig,
    FlowConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    Trainer,
    from_plain,
    resolved,
    save_autoencoder,
    train,
)
from gulliver.video._run import Run
from gulliver.video._sources import make_dataset
from tests.patience import patient
from tests.pool import Pool

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
        flow=FlowConfig(mask_first=0.3, mask_head=0.3),
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
    assert states[0]["sampler"] == states[1]["sampler"]


def _train_in_world(world: World, config: TrainConfig) -> list[dict]:
    train(config)
    return Run(config.out).read_log()


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


def cli(*arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "gulliver.cli", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def options_of(config: TrainConfig) -> list[str]:
    """The command line of a small run."""
    path = config.out.parent / f"{config.out.name}.json"
    path.write_text(json.dumps(resolved(config)))
    return ["train", "--config", str(path)]


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
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
    process = cli(*options_of(broken), start_new_session=True)
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
    assert [line["step"] for line in Run(broken.out).read_log()] == list(range(1, 9))


def test_sigterm_saves_and_resuming_continues_bit_for_bit(
    tmp_path: Path, autoencoder: Path
) -> None:
    whole = small(tmp_path / "whole", autoencoder, steps=12, save_every=100)
    train(whole)
    stopped = small(tmp_path / "stopped", autoencoder, steps=12, save_every=100)
    process = cli(*options_of(stopped))
    wait_for_step(stopped.out, 3, process)
    process.terminate()
    _, errors = process.communicate(timeout=patient(60))
    if process.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert process.returncode == 143
    assert "continue with --resume" in errors
    reached = position(stopped.out)["step"]
    assert 3 <= reached < 12
    train(replace(stopped, resume=True))
    assert_same_bytes(whole.out, stopped.out)


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path, autoencoder: Path) -> None:
    config = small(tmp_path / "run", autoencoder, ranks=2, steps=100_000)
    process = cli(*options_of(config))
    wait_for_step(config.out, 5, process)  # past the first checkpoint
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {
        child: dict(
            item.split("=", 1)
            for item in Path(f"/proc/{child}/environ").read_text().split("\0")
            if "=" in item
        ).get("RANK")
        for child in children
    }
    (victim,) = [int(child) for child, rank in ranks.items() if rank == "1"]
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=patient(90))
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in errors
    assert Run(config.out).checkpoints.latest() is not None


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
    trainer.step(next(batches))
    trainer.save()
    before = {n: p.detach().clone() for n, p in trainer.plain_model.named_parameters()}
    batch = next(batches)
    spoiled = replace(batch, latents=batch.latents * float("nan"))
    with pytest.raises(GulliverError, match=r"loss nan.*step-00000001.*lower"):
        trainer.step(spoiled)
    batches.close()
    for name, parameter in trainer.plain_model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_the_average_follows_its_definition(tmp_path: Path, autoencoder: Path) -> None:
    trainer = _trainer(small(tmp_path, autoencoder), autoencoder)
    name = "final_layer.linear.weight"
    expected = trainer.plain_model.state_dict()[name].detach().clone()
    batches = trainer.maker.batches()
    for k in range(1, 4):
        trainer.step(next(batches))
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


def test_a_truncated_checkpoint_is_passed_over(tmp_path: Path, autoencoder: Path) -> None:
    config = small(tmp_path / "run", autoencoder, steps=6, save_every=3)
    train(config)
    newest = Run(config.out).newest_checkpoint()
    assert newest.name == "step-00000006"
    (model,) = newest.glob("model*.safetensors")
    model.write_bytes(model.read_bytes()[:1000])
    assert Run(config.out).newest_checkpoint().name == "step-00000003"


def test_configurations_survive_json_and_unknown_keys_name_the_nearest() -> None:
    config = TrainConfig(
        steps=7, model=ModelConfig(size="S/2"), data=DataConfig(table=Path("x.csv"))
    )
    assert from_plain(json.loads(json.dumps(resolved(config)))) == config
    with pytest.raises(
        GulliverError, match=r"'optimizer.learnin_rate': did you mean 'learning_rate'"
    ):
        from_plain({"optimizer": {"learnin_rate": 1}})
    with pytest.raises(GulliverError, match=r"'steps' is 'many'.*type int"):
        from_plain({"steps": "many"})
    with pytest.raises(GulliverError, match="'stage' is 7: choose from 1, 2"):
        from_plain({"stage": 7})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'?"),
        (["train", "--model.size", "tinny"], "unknown model size 'tinny': did you mean 'tiny'?"),
        (["train", "--steps", "0"], "--steps is 0: it must be positive"),
        (["train", "--data.shapes", "13by32"], "'13by32' is not frames x height x width"),
        (["train", "--data.shapes", "12x32x32"], "frames must be 4 k + 1"),
        (["train", "--data.held-out", "12:9"], "is not digit:direction"),
        (["train", "--data.table", "no.csv"], "table no.csv does not exist"),
        (["train", "--autoencoder.path", "no.safetensors"], "no.safetensors does not exist"),
        (["generate", "--run", "nowhere", "--prompt", "x"], "holds no training run"),
        (["generate", "--prompt", "x", "--out", "a.avi"], "cannot write 'a.avi'"),
        (["generate", "--prompt", "x", "--out", "a.png"], "holds one frame, not 13"),
        (["generate"], "nothing to show"),
        (["train", "--config"], "--config needs a file"),
    ],
)
def test_mistakes_end_in_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from gulliver.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_training_on_a_table_counts_what_it_cannot_use(tmp_path: Path, autoencoder: Path) -> None:
    from tests.test_data import write_table, write_video

    for name in ("a.mp4", "b.mp4", "c.mp4"):
        write_video(tmp_path / name, 9, 32, 32)
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    rows = [{"path": n, "text": "a ramp"} for n in ("a.mp4", "b.mp4", "c.mp4", "bad.mp4")]
    table = write_table(tmp_path, rows)
    data = DataConfig(table=table, shapes=("9x32x32",), batch_size=2)
    config = small(tmp_path / "run", autoencoder, data=data, steps=3)
    process = cli(*options_of(config))
    _, errors = process.communicate(timeout=patient(90))
    assert process.returncode == 0, errors
    assert "3 clips used, 1 skipped" in errors
    assert "bad.mp4: cannot be decoded" in errors
    assert len(Run(config.out).read_log()) == 3
    long = [{"path": "a.mp4", "text": "one two three four five six seven eight nine"}]
    wordy = replace(
        config, out=tmp_path / "wordy", data=replace(data, table=write_table(tmp_path, long))
    )
    with pytest.raises(GulliverError, match=r"add --model\.text-length 9"):
        train(wordy)


def test_clips_that_break_during_training_are_left_out_and_listed(
    pool: Pool, tmp_path: Path, autoencoder: Path
) -> None:
    from tests.test_data import write_table, write_video

    names = ["a.mp4", "b.mp4", "c.mp4"]
    for name in names:
        write_video(tmp_path / name, 5, 32, 32)
    claimed = {"text": "a ramp", "num_frames": "5", "height": "32", "width": "32", "fps": "8"}
    whole = write_table(tmp_path, [{"path": name, **claimed} for name in names])
    data = DataConfig(table=whole, shapes=("5x32x32",), batch_size=3)
    config = small(tmp_path / "whole", autoencoder, data=data, steps=1)
    (tmp_path / "b.mp4").write_bytes(b"broken since the table was made")
    process = cli(*options_of(config))
    _, errors = process.communicate(timeout=patient(90))
    assert process.returncode == 0, errors
    assert "1 clips could not be read" in errors
    assert "b.mp4: cannot be decoded" in errors
    one = Run(config.out).read_log()
    two = pool.run(_train_in_world, 2, replace(config, out=tmp_path / "two"))[0]
    # The mean is over the two clips that could be read, on any number of ranks.
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=2e-5)
    assert one[0]["loss"] > 0.5
