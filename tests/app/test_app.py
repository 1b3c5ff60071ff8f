"""The page without a browser: previews, turns of users, the process that samples, clips on disk."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gulliver.app import worker as _worker
from gulliver.app.gallery import Gallery
from gulliver.app.page import POINTS, look
from gulliver.app.server import find_run, first_settings, is_local, open_page
from gulliver.app.service import Service
from gulliver.app.worker import (
    ClipJob,
    ClipMade,
    ClipMaker,
    ClipQueued,
    ClipStopped,
    Failed,
    Sampling,
    Settings,
    Source,
)
from gulliver.checkpoint import save_huggingface
from gulliver.cli import video as _commands
from gulliver.cli.dispatch import run as run_command
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.video import Guidance, RectifiedFlow, VideoPipeline
from gulliver.video.flows import IDDPM
from gulliver.video.media import read_frames, write_clip
from gulliver.video.public_models import save_autoencoder
from tests.app.app_workers import make_run, obedient, stillborn
from tests.models.test_text_encoders import save_t5
from tests.patience import Deadline
from tests.video.test_video_pipeline import shaken

SOURCE = Source(run=Path("nowhere"))
QUICK = Settings("the digit 3 moving left", frames=5, steps=4, seed=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("app"))


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service(SOURCE, obedient)
    yield service
    service.close()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Frames of the clips that are written: the encoder gives the same ones other bytes."""
    found: list[Tensor] = []

    def write(path: Path, video: Tensor, fps: float, scale: int = 1) -> Path:
        found.append(video)
        return write_clip(path, video, fps, scale)

    monkeypatch.setattr(_worker, "write_clip", write)
    monkeypatch.setattr(_commands, "write_clip", write)
    return found


def job(prompt: str) -> ClipJob:
    return ClipJob(Settings(prompt), Path(f"{prompt}.mp4"))


def ends(*tickets) -> list:
    return [list(ticket.follow())[-1] for ticket in tickets]


def waited_for(reached: Callable[[], bool]) -> bool:
    deadline = Deadline(30)
    while not reached() and deadline.left() > 0:
        time.sleep(0.01)
    return reached()


# ---- previews


def test_flow_previews_are_estimated_clean_latents() -> None:
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 2, 4, 3, 3, 3, dtype=torch.float64).unbind()
    size = {"height": torch.tensor([24.0]), "width": torch.tensor([24.0])}
    mask = torch.ones(2, 3, dtype=torch.float64)
    mask[:, 0] = 0
    flow, seen = RectifiedFlow(), list[tuple[int, int, Tensor]]()

    def model(x: Tensor, t: Tensor, **inputs: Tensor) -> Tensor:
        return x0 - noise

    options = {"steps": 3, "cfg_scale": Guidance(), "given": x0, "mask": mask}
    last = flow.sample(model, noise, size, preview=lambda *step: seen.append(step), **options)
    assert [(done, steps) for done, steps, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    for _, _, clean in seen:
        torch.testing.assert_close(clean, x0, rtol=0, atol=1e-12)
        assert torch.equal(clean[:, :, 0], x0[:, :, 0])
    assert torch.equal(last, flow.sample(model, noise, size, **options))


def test_ddpm_previews_are_estimated_clean_latents() -> None:
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 1, 4, 3, 3, 3, dtype=torch.float64).unbind()
    flow, seen = IDDPM(), list[Tensor]()

    def model(x: Tensor, t: Tensor, **inputs: Tensor) -> Tensor:
        kept = flow.process.kept[int(t[0])]
        exact = (x - kept.sqrt() * x0) / (1 - kept).sqrt()
        return torch.cat([exact, torch.zeros_like(exact)], dim=1)

    flow.sample(model, noise, {}, steps=4, preview=lambda done, steps, clean: seen.append(clean))
    assert len(seen) == 4
    for clean in seen:
        torch.testing.assert_close(clean, x0, rtol=0, atol=1e-8)


# ---- the process that samples


def test_clip_equals_that_of_the_printed_generate_command(
    run: Path, tmp_path: Path, written: list[Tensor]
) -> None:
    picture = write_clip(tmp_path / "first.png", torch.rand(3, 1, 40, 30) * 2 - 1, 8)
    gallery, maker = Gallery(tmp_path / "clips"), ClipMaker(Source(run))
    for settings in (QUICK, replace(QUICK, seed=4, width=40, height=24, picture=picture)):
        told: list = []
        made = maker.make(ClipJob(settings, gallery.place()), told.append, lambda: False)
        entry = gallery.keep(made, settings, Source(run))
        steps = [event for event in told if isinstance(event, Sampling)]
        assert [event.done for event in steps] == [1, 2, 3, 4]
        assert all((event.frames or b"").startswith(b"GIF8") for event in steps)
        other = tmp_path / "clip.mp4"
        words = shlex.split(entry.command)
        assert words[0] == "gulliver"
        assert run_command([*words[1:-1], str(other)]) == 0
        assert torch.equal(*written)
        written.clear()
    newest, oldest = (read_frames(entry.path) for entry in gallery.entries())
    assert newest.shape == (3, 5, 6 * 24, 6 * 40)
    assert oldest.shape == (3, 5, 8 * 32, 8 * 32)


@pytest.mark.full
@pytest.mark.parametrize("keep", [False, True])
def test_public_models_match_generate_and_preview_with_keep(
    tmp_path: Path, written: list[Tensor], keep: bool
) -> None:
    torch.manual_seed(0)
    save_huggingface(shaken("1.3"), tmp_path / "model")
    save_t5(tmp_path / "t5")
    save_autoencoder(tmp_path / "a.safetensors", VideoAutoencoder(latent_channels=8, width=8))
    paths = tmp_path / "model", tmp_path / "a.safetensors", tmp_path / "t5"
    source, gallery = Source(None, *paths, keep=keep), Gallery(tmp_path / "clips")
    first, shapes = first_settings(source)
    assert (shapes, first.guidance) == ([], VideoPipeline.load(*paths).sampling.guidance)
    settings, told = Settings("the cat runs", frames=17, steps=2, guidance=3.0, seed=5), []
    made = ClipMaker(source).make(ClipJob(settings, gallery.place()), told.append, lambda: False)
    frames = [event.frames for event in told if isinstance(event, Sampling)]
    assert [gif is not None for gif in frames] == [keep, keep]
    entry = gallery.keep(made, settings, source)
    *words, _ = shlex.split(entry.command)
    assert run_command([*words[1:], str(tmp_path / "clip.mp4")]) == 0
    assert torch.equal(*written)


def test_new_checkpoint_is_loaded_and_missing_one_reported(run: Path, tmp_path: Path) -> None:
    maker = ClipMaker(Source(run))
    job = ClipJob(replace(QUICK, steps=1), tmp_path / "clip.mp4")
    assert maker.make(job, lambda event: None, lambda: False).checkpoint == "step-00000001"
    (tmp_path / "young").mkdir()
    (tmp_path / "young/config.json").write_bytes((run / "config.json").read_bytes())
    with pytest.raises(GulliverError, match="no complete checkpoint"):
        ClipMaker(Source(tmp_path / "young")).make(job, lambda event: None, lambda: False)
    with pytest.raises(GulliverError, match="do not fit the autoencoder"):
        maker.make(ClipJob(replace(QUICK, frames=6), job.path), lambda event: None, lambda: False)


# ---- users


def test_users_take_turns_and_get_their_own_clips(service: Service) -> None:
    holder = service.submit("h", job("hold"))
    many = [service.submit("a", job(f"a{n}")) for n in range(3)]
    few = [service.submit("b", job(f"b{n}")) for n in range(2)]
    service.stop("h")
    assert ends(holder) == [ClipStopped()]
    made = ends(*many, *few)
    assert [end.checkpoint for end in made] == ["a0", "a1", "a2", "b0", "b1"]
    in_order = sorted(made, key=lambda end: end.seconds)
    assert [end.checkpoint for end in in_order] == ["a0", "b0", "a1", "b1", "a2"]


def test_waiting_users_see_queue_position_and_can_cancel(service: Service) -> None:
    service.submit("h", job("hold"))
    leaving, staying = service.submit("a", job("a")), service.submit("b", job("b"))
    service.stop("a")
    service.stop("h")
    assert ends(leaving) == [ClipStopped()]
    events = list(staying.follow())
    assert isinstance(events[-1], ClipMade)
    places = [event.before for event in events if isinstance(event, ClipQueued)]
    assert places == sorted(places, reverse=True)
    assert 1 <= places[0] <= 2


def test_killed_worker_is_reported_and_restarted(service: Service) -> None:
    dead, next_one = service.submit("a", job("die")), service.submit("b", job("b"))
    failed, made = ends(dead, next_one)
    assert isinstance(failed, Failed)
    assert "SIGKILL" in failed.reason
    assert "\n" not in failed.reason
    assert made.checkpoint == "b"
    assert "SIGKILL" in service.notice
    pid = service.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert waited_for(lambda: service.pid != pid)
    assert ends(service.submit("a", job("a")))[0].checkpoint == "a"


def test_worker_that_always_dies_is_not_restarted_forever() -> None:
    service = Service(SOURCE, stillborn)
    first, second = ends(service.submit("a", job("a")), service.submit("b", job("b")))
    assert "exited with code 3" in first.reason
    assert "exited with code 3" in second.reason
    service.close()


# ---- clips on disk


def test_gallery_survives_restart_without_partial_clips(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path)
    settings = Settings('a "quoted" <b>prompt</b> ü', "reachable from", 5, 24, 40, 3, 1.5, 7)
    places = [gallery.place() for _ in range(2)]
    for place in places:
        place.write_bytes(b"clip")
        gallery.keep(ClipMade(place, "step-1", 8.0, 4, 1.0), settings, Source(Path("run")))
    (tmp_path / "0-torn.json").write_text(places[0].with_suffix(".json").read_text()[:40])
    (tmp_path / "1-other.json").write_text('{"settings": {"prompt": 3}}')
    (tmp_path / "2-list.json").write_text("[1]")
    wide = json.loads(places[0].with_suffix(".json").read_text())
    wide["settings"]["frames"] = 0
    (tmp_path / "3-wide.json").write_text(json.dumps(wide))
    (tmp_path / "4-no-clip.json").write_bytes(places[0].with_suffix(".json").read_bytes())
    found = Gallery(tmp_path).entries()
    assert sorted(entry.path for entry in found) == sorted(places)
    assert {entry.settings for entry in found} == {settings}
    assert gallery.find(places[0].name).settings == settings
    with pytest.raises(GulliverError, match="no longer in"):
        gallery.find("../elsewhere.mp4")


# ---- a run that trains


def test_run_can_be_read_while_it_is_written(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "cannot be read" in look(folder).summary
    folder.mkdir()
    config = (run / "config.json").read_text()
    (folder / "config.json").write_text(config[: len(config) // 2])
    assert "cannot be read" in look(folder).summary
    (folder / "config.json").write_text(config)
    assert "no step yet" in look(folder).summary
    lines = [{"step": n, "loss": float(n)} for n in range(1, 2 * POINTS + 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    odd = '{"step": 9000, "loss": NaN}\n{"step": 9001}\n{"step": 9002, "loss": "x"}\n{"step": 90'
    (folder / "log.jsonl").write_text(text + odd)
    (folder / "validation.jsonl").write_text('{"step": 5, "loss": 2.5, "buckets": {}}\n{"st')
    (folder / "samples").mkdir()
    (folder / "samples/half.mp4").touch()
    (folder / "samples/whole.png").write_bytes(b"png")
    before = sorted(folder.rglob("*"))
    view = look(folder)
    training = [point for point in view.losses if point[2] == "training"]
    assert training[0] == (2, 1.5, "training")
    assert len(training) == POINTS
    assert [point for point in view.losses if point[2] == "held out"] == [(5, 2.5, "held out")]
    assert view.samples == [folder / "samples/whole.png"]
    assert "no checkpoint yet" in view.summary
    assert sorted(folder.rglob("*")) == before


# ---- the command


def test_run_is_found_or_error_lists_candidates(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_run(run) == find_run(run.parent) == run
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GulliverError, match=r"out/demo/run and runs/video .*gulliver demo"):
        find_run(None)
    with pytest.raises(GulliverError, match="no training run in away and away/run"):
        run_command(["app", "away"])
    with pytest.raises(GulliverError, match=r"--autoencoder .* needs --model"):
        run_command(["app", "--autoencoder", "a"])
    with pytest.raises(GulliverError, match="cannot be combined"):
        run_command(["app", "run", "--model", "m"])


def test_port_in_use_is_one_line_error(run: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(GulliverError, match=rf"127\.0\.0\.1:{port}\b.*--port"):
            open_page(Source(run), tmp_path, port=port)


def test_only_loopback_addresses_are_local() -> None:
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8")))
    assert not any(map(is_local, ("0.0.0.0", "::", "192.168.0.2", "example.org", "")))
