"""Kept latents: the same bytes after any end, and the training of clips that are encoded anew."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gulliver.checkpoint import save_huggingface
from gulliver.cli.dispatch import main
from gulliver.comm import World
from gulliver.data import Bucket
from gulliver.data.table import ClipTable
from gulliver.errors import GulliverError
from gulliver.io.files import hold
from gulliver.models import STDiT3, VideoAutoencoder
from gulliver.options import resolved
from gulliver.video import (
    DataConfig,
    LatentCache,
    TrainAutoencoderConfig,
    TrainConfig,
    load_autoencoder,
)
from gulliver.video.autoencoder_config import AutoencoderDataConfig, check_autoencoder_config
from gulliver.video.config import (
    AutoencoderConfig,
    EncodeConfig,
    FlowConfig,
    ModelConfig,
    OptimizerConfig,
    ValidationConfig,
)
from gulliver.video.kept_latents import ClipWindow, file_digest
from gulliver.video.planned_training import train
from gulliver.video.preparation.encoding import Encoded, encode
from gulliver.video.public_models import save_autoencoder
from gulliver.video.run import Run
from tests.models.test_text_encoders import save_t5
from tests.pool import Pool
from tests.programs import module, run_program
from tests.video.test_data import write_table, write_video
from tests.video.test_video_training import assert_same_bytes

SHAPES = ("5x32x32", "9x16x16", "1x32x32")
CAPTIONS = ("a cat", "the cat runs", "a cat on the roof")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoencoder, and a table of clips longer than a window, a broken one and a twin."""
    root = tmp_path_factory.mktemp("parts")
    for seed in (3, 4):
        torch.manual_seed(seed)
        save_autoencoder(root / f"vae{seed}.safetensors", VideoAutoencoder(width=8))
    rows = []
    for number in range(9):
        frames, side = ((8, 32), (12, 16), (1, 32))[number % 3]
        write_video(root / f"{number}.mp4", frames + number // 3, side, side)
        rows.append({"path": f"{number}.mp4", "text": CAPTIONS[number % 3]})
    shutil.copy(root / "0.mp4", root / "twin.mp4")
    (root / "broken.mp4").write_bytes((root / "3.mp4").read_bytes()[:900])
    stated = {"num_frames": "9", "height": "32", "width": "32", "fps": "8"}
    empty = dict.fromkeys(stated, "")
    rows = [row | empty for row in rows]
    rows.append({"path": "twin.mp4", "text": "a cat"} | empty)
    rows.append({"path": "broken.mp4", "text": "the cat"} | stated)
    write_table(root, rows)
    return root


def options(parts: Path, out: Path, **changes: Any) -> EncodeConfig:
    config = EncodeConfig(
        table=parts / "clips.csv",
        autoencoder=parts / "vae3.safetensors",
        out=out,
        shapes=SHAPES,
        windows=3,
        shard_clips=2,
    )
    return replace(config, **changes)


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def kept(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "kept"
    encode(options(parts, out))
    return out


def test_cached_latents_equal_autoencoder_output(parts: Path, kept: Path) -> None:
    latents, coder = LatentCache(kept), load_autoencoder(parts / "vae3.safetensors")
    buckets = [Bucket(5, 32, 32), Bucket(9, 16, 16), Bucket(1, 32, 32)]
    seen = 0
    for number in range(9):
        bucket = buckets[number % 3]
        table = ClipTable(parts / "clips.csv", [bucket])
        index = next(n for n, row in enumerate(table.rows) if row.name == f"{number}.mp4")
        last = table.rows[index].probe.frames - bucket.frames
        for start in {0, last // 2, last}:
            clip: Any = table.read(index, start)
            with torch.no_grad():
                wanted = coder.encode(clip.video[None])[0]
            sample = ClipWindow(file_digest(parts / f"{number}.mp4"), str(bucket), start)
            assert torch.equal(latents.read(sample), wanted)
            seen += 1
    # The twin has the windows of its first; one cannot be read, in each of its windows.
    assert sum(len(shard.members) for shard in latents.shards) == seen
    assert {sample.clip for sample in latents.broken} == {file_digest(parts / "broken.mp4")}


def _encode(world: World, config: EncodeConfig) -> Encoded:
    return encode(config)


def test_any_number_of_ranks_and_a_call_after_the_end_leave_the_same_bytes(
    pool: Pool, parts: Path, kept: Path, tmp_path: Path
) -> None:
    whole = bytes_of(kept)
    for ranks in (2, 3):
        outcomes = pool.run(_encode, ranks, options(parts, tmp_path / str(ranks)))
        assert bytes_of(tmp_path / str(ranks)) == whole
        assert len({outcome.made for outcome in outcomes}) == 1
    again = encode(options(parts, kept))
    assert bytes_of(kept) == whole
    assert [name for name, _ in again.broken] == ["broken.mp4"]
    assert (again.windows, again.made) == (24, 3)  # the broken one is tried again, and nothing else


def killed(config: EncodeConfig, kills: int, seed: int, ranks: int) -> int:
    """Encodes with kills and resumptions; returns the number of kills."""
    told = json.dumps(resolved(config)), str(kills), str(seed), str(ranks)
    done = run_program(module, "tests.video.encode_killed", *told, timeout=240)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(("kills", "ranks"), [(2, 1), pytest.param(20, 2, marks=pytest.mark.full)])
def test_killed_at_any_moment_and_resumed_leaves_the_same_bytes(
    parts: Path, kept: Path, tmp_path: Path, kills: int, ranks: int
) -> None:
    config = options(parts, tmp_path / "kept")
    seed = random.Random().randint(0, 10**6)
    assert killed(config, kills, seed, ranks) == kills
    assert bytes_of(config.out) == bytes_of(kept), f"seed {seed}"


def test_latents_of_another_model_or_other_settings_are_not_mixed(
    parts: Path, kept: Path, tmp_path: Path
) -> None:
    whole = bytes_of(kept)
    with pytest.raises(GulliverError, match=r"other settings \(autoencoder was Vid.*, is Vid"):
        encode(options(parts, kept, autoencoder=parts / "vae4.safetensors"))
    with pytest.raises(GulliverError, match="windows was 3, is 2; dtype was float32, is float16"):
        encode(options(parts, kept, windows=2, dtype="float16"))
    with pytest.raises(GulliverError, match="neither or both of --shapes"):
        encode(options(parts, kept, shapes=()))
    assert bytes_of(kept) == whole


def test_a_table_that_grows_keeps_what_is_there_and_half_precision_rounds(
    parts: Path, kept: Path, tmp_path: Path
) -> None:
    lines = (parts / "clips.csv").read_text().splitlines()
    for path in (p for p in parts.iterdir() if p.suffix == ".mp4"):
        shutil.copy(path, tmp_path / path.name)
    table = tmp_path / "clips.csv"
    table.write_text("\n".join(lines[:5]))
    config = options(parts, tmp_path / "kept", table=table, dtype="bfloat16")
    first = encode(config).made
    table.write_text("\n".join(lines))
    # The clips that are there already are found by content, under whatever name.
    assert encode(config).made == 27 - first
    exact, rounded = LatentCache(kept), LatentCache(config.out)
    for shard in exact.shards:
        for clip, start in shard.members:
            sample = ClipWindow(clip, shard.bucket, start)
            assert torch.equal(rounded.read(sample), exact.read(sample).bfloat16().float())
    path = config.out / "shards" / rounded.shards[0].file
    path.write_bytes(path.read_bytes()[:-10])
    clip, start = rounded.shards[0].members[-1]
    with pytest.raises(GulliverError, match="is truncated or was replaced; run gulliver"):
        rounded.read(ClipWindow(clip, rounded.shards[0].bucket, start))


def test_signal_stops_encode_after_a_shard(
    parts: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, config = ClipTable.read, options(parts, tmp_path / "kept")

    def stopping(*told: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(*told)

    monkeypatch.setattr(ClipTable, "read", stopping)
    assert not encode(config).finished
    monkeypatch.undo()
    assert len(list((config.out / "shards").iterdir())) == 1
    with hold(config.out), pytest.raises(GulliverError, match="is being written by another call"):
        encode(config)
    assert encode(config).finished
    assert bytes_of(config.out) == bytes_of(kept)


def small(parts: Path, out: Path, **data: Any) -> TrainConfig:
    # Buckets have batch sizes of their own.
    batched: dict[str, Any] = {} if "buckets" in data else {"batch_size": 4}
    return TrainConfig(
        out=out,
        steps=2,
        save_every=1,
        log_every=1,
        data=DataConfig(**batched | {"unreadable_limit": 1.0} | data),
        optimizer=OptimizerConfig(warmup=1),
        flow=FlowConfig(masks=("image_head:0.3", "extend:0.3")),
        validation=ValidationConfig(every=1, share=0.3, levels=2),
    )


def losses(out: Path) -> list[list[float]]:
    run = Run(out)
    held = [[x for row in line["buckets"].values() for x in row] for line in run.validation.read()]
    return [[line["loss"], line["grad_norm"]] for line in run.log.read()] + held


def assert_same_curve(one: Path, other: Path) -> None:
    """Compares losses, held-out ones too.

    Clips of a batch are encoded together, kept ones each by itself: kernels may sum in another
    order for another number of clips, so latents differ in the last bits.
    """
    for line, wanted in zip(losses(one), losses(other), strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)


def _train(world: World, config: TrainConfig) -> None:
    train(config)


def test_training_on_kept_latents_is_training_on_clips(
    pool: Pool, parts: Path, kept: Path, tmp_path: Path, full: bool
) -> None:
    clips = small(parts, tmp_path / "clips", table=parts / "clips.csv", shapes=SHAPES, windows=3)
    coder = AutoencoderConfig(path=parts / "vae3.safetensors")
    train(replace(clips, autoencoder=coder))
    # Shapes, windows and autoencoder follow from the folder; the clips need not be there.
    alone = small(parts, tmp_path / "alone", encoded=kept)
    train(alone)
    assert_same_curve(alone.out, clips.out)
    beside = small(parts, tmp_path / "beside", encoded=kept, table=parts / "clips.csv")
    pool.run(_train, 2, beside)
    assert_same_curve(beside.out, clips.out)
    if full:
        for axis in ("tp_size", "sp_size", "pp_size"):
            shared = replace(beside, out=tmp_path / axis, **{axis: 2})
            pool.run(_train, 2, shared)
            assert_same_curve(shared.out, clips.out)
    # Where a batch is one clip, the float path is the same, and so is every bit.
    one: Any = {"steps": 1, "validation": ValidationConfig()}
    each = [
        replace(run, out=tmp_path / f"each{n}", data=replace(run.data, batch_size=1), **one)
        for n, run in enumerate((replace(clips, autoencoder=coder), alone))
    ]
    for run in each:
        train(run)
    assert_same_bytes(each[0].out, each[1].out)
    resumed = replace(alone, resume=True, resume_step=1)
    before = losses(alone.out)
    train(resumed)
    assert losses(alone.out) == before
    assert json.loads(alone.out.joinpath("config.json").read_text())["data"]["windows"] == 3


def test_public_weights_train_on_kept_latents_and_texts_of_every_bucket(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = tmp_path / "buckets.json"
    # The longest clip comes to 9 frames in one epoch, to 5 in another.
    chances = {"1": [0.7, 2], "9": [[0.5, 0.5], 2], "5": [0.8, 2]}
    buckets.write_text(json.dumps({"32px": chances}))
    save_t5(tmp_path / "t5")
    sizes: Any = {"in_channels": 8, "hidden_size": 48, "depth": 1, "num_heads": 2}
    torch.manual_seed(1)
    model = STDiT3(**sizes, caption_channels=16, model_max_length=9)
    save_huggingface(model, tmp_path / "weights")
    named = ModelConfig(weights=tmp_path / "weights", text_encoder=tmp_path / "t5")
    clips = replace(
        small(parts, tmp_path / "clips", table=parts / "clips.csv", buckets=buckets, windows=2),
        autoencoder=AutoencoderConfig(path=parts / "vae3.safetensors"),
        model=named,
    )
    train(clips)
    config = options(parts, tmp_path / "kept", shapes=(), buckets=buckets, windows=2)
    encode(replace(config, text_encoder=tmp_path / "t5", text_length=9))
    lengths = {shard.bucket.split("x")[0] for shard in LatentCache(config.out).shards}
    assert lengths == {"1", "5", "9"}
    kept = small(parts, tmp_path / "run", encoded=config.out)
    default = DataConfig().batch_size  # the folder's buckets have sizes of their own
    kept = replace(kept, data=replace(kept.data, batch_size=default))
    # The text encoder is not loaded: its texts are there.
    monkeypatch.setattr("gulliver.video.sources.make_text", None)
    train(replace(kept, model=ModelConfig(weights=tmp_path / "weights")))
    assert_same_curve(kept.out, clips.out)
    assert not (kept.out / "texts").exists()
    save_t5(tmp_path / "other", 16, seed=1)
    other = ModelConfig(weights=tmp_path / "weights", text_encoder=tmp_path / "other")
    with pytest.raises(GulliverError, match=r"text_encoder is .*other in this run, .*t5 "):
        train(replace(kept, out=tmp_path / "no", model=other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"frame_interval": 2, "windows": 2},
            "frame_interval is 2 in this run, but 1 .*; windows",
        ),
        ({"scores": "1.2"}, "scores is 1.2 in this run"),
        (
            {"shapes": ("9x32x32", "5x16x16")},
            "stored with other shapes than .* run gulliver data enc",
        ),
        ({"encoded": Path("nowhere")}, "nowhere holds no stored latents"),
    ],
)
def test_latents_that_do_not_fit_a_run_are_refused(
    parts: Path, kept: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    config = small(parts, tmp_path / "run", **{"encoded": kept} | changes)
    with pytest.raises(GulliverError, match=message):
        train(config)


def test_latents_of_another_autoencoder_or_of_another_file_are_refused(
    parts: Path, kept: Path, tmp_path: Path
) -> None:
    config = small(parts, tmp_path / "run", encoded=kept)
    other = replace(config, autoencoder=AutoencoderConfig(path=parts / "vae4.safetensors"))
    with pytest.raises(
        GulliverError, match=r"autoencoder is VideoAuto.* in this run, but VideoAuto"
    ):
        train(other)
    assert not config.out.exists()
    for path in (p for p in parts.iterdir() if p.suffix in (".mp4", ".csv")):
        shutil.copy(path, tmp_path / path.name)
    write_video(tmp_path / "4.mp4", 13, 16, 16, rate=9)
    table = replace(config, data=replace(config.data, table=tmp_path / "clips.csv"))
    with pytest.raises(GulliverError, match=r"3 of 30 windows.*clip '4.mp4' is new or was changed"):
        train(table)
    with pytest.raises(GulliverError, match=r"--data.encoded .* an autoencoder trains on pixels"):
        check_autoencoder_config(TrainAutoencoderConfig(data=AutoencoderDataConfig(encoded=kept)))


def test_the_command_encodes_and_says_what_is_broken(
    parts: Path, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept"
    told = ["--autoencoder", parts / "vae3.safetensors", "--out", out, "--shapes", *SHAPES]
    command = ["data", "encode", parts / "clips.csv", *told, "--windows", 3, "--shard-clips", 2]
    with pytest.raises(SystemExit) as ended:
        main([str(part) for part in command])
    told_to = capsys.readouterr().err
    assert ended.value.code == 0, told_to
    assert "24 windows are stored in" in told_to
    assert told_to.count("broken.mp4: ") == 1
    assert bytes_of(out) == bytes_of(kept)
