"""The Gradio page, and the run that it shows, which may still be training.

Losses are read from the logs; samples are the images and clips in the run's folder `samples`, and
the sheet that `gulliver demo` writes next to the run.
"""

from __future__ import annotations

import base64
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from gulliver.app.gallery import Entry, Gallery
from gulliver.app.service import Service
from gulliver.app.worker import (
    ClipJob,
    ClipMade,
    ClipQueued,
    ClipStopped,
    Event,
    Failed,
    Loading,
    Sampling,
    Settings,
    Source,
)
from gulliver.errors import GulliverError
from gulliver.options import whole_number
from gulliver.video.config import TrainConfig
from gulliver.video.run import Run

POINTS = 400
"""Maximum number of points of a curve: longer logs are averaged over equal intervals."""
SAMPLES = 24
SUFFIXES = {".png", ".gif", ".mp4", ".jpg", ".webp"}


@dataclass(frozen=True)
class RunView:
    """Progress, losses and samples of a run, as shown on the page."""

    # Progress in one line.
    summary: str
    # Points (step, loss, "training" or "held out").
    losses: list[tuple[int, float, str]]
    # Files of pictures and clips, newest first.
    samples: list[Path]


def look(folder: Path) -> RunView:
    run = Run(folder)
    try:
        config = run.read_config()
        newest = run.checkpoints.latest()
        lines, held_out = run.log.read(), run.validation.read()
    except (GulliverError, OSError, ValueError, TypeError, KeyError) as error:
        return RunView(f"{folder} cannot be read: {error}", [], [])
    losses = [*_curve(lines, "training"), *_curve(held_out, "held out")]
    return RunView(_summary(run, config, lines, newest), losses, _samples(folder))


def _summary(
    run: Run, config: TrainConfig, lines: list[dict[str, Any]], newest: Path | None
) -> str:
    told = "no step yet"
    if lines:
        step, loss = lines[-1]["step"], lines[-1].get("loss")
        told = f"step {step} of {config.steps}"
        if isinstance(loss, int | float):
            told += f", loss {loss:.4f}"
        if step < config.steps:
            told += f", {_age(run.log.path)} since the last line of its log"
    checkpoint = "no checkpoint yet" if newest is None else f"newest checkpoint {newest.name}"
    return f"{run.folder}: {told}; {checkpoint}"


def _age(path: Path) -> str:
    try:
        seconds = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return "some time"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _curve(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float, str]]:
    points = [
        (line["step"], float(line["loss"]))
        for line in lines
        if isinstance(line.get("loss"), int | float) and math.isfinite(line["loss"])
    ]
    stretch = max(1, -(-len(points) // POINTS))
    parts = [points[n : n + stretch] for n in range(0, len(points), stretch)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part), name) for part in parts]


def _samples(folder: Path) -> list[Path]:
    found: list[tuple[float, Path]] = []
    for path in [*folder.glob("samples/**/*"), folder.parent / "sheet.gif"]:
        try:
            facts = path.stat()
        except OSError:
            continue
        # A file that is still being written may be empty.
        if path.suffix.lower() in SUFFIXES and facts.st_size and not path.name.startswith("."):
            found.append((facts.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:SAMPLES]]


# The page: settings, progress, the clip, the gallery, and the run in training.
#
# Handlers translate gradio's values to calls of the service, the gallery and the run, and their
# results back. A user is a browser tab: gradio gives each a session.


REFRESH_S = 3.0
CURVE = ["step", "loss", "curve"]
LAST_SEED = 2**31 - 1
CSS = """
#facts pre, #chosen pre { white-space: pre-wrap; font-size: 85%; }
#frames img { image-rendering: pixelated; width: 256px; border-radius: 6px; }
#told .bar { height: 8px; border-radius: 4px; background: var(--neutral-200); overflow: hidden; }
#told .bar div { height: 100%; background: var(--color-accent); }
.wrong { color: var(--error-text-color, #b91c1c); }
"""


@dataclass(frozen=True)
class Parts:
    """Components of the page and the functions that they call."""

    # Service that generates clips.
    service: Service
    # Gallery that stores them.
    gallery: Gallery
    source: Source
    # Initial settings of a new tab.
    first: Settings
    # Shapes to choose from, as frames x height x width; others may be typed.
    shapes: list[str]


def build(parts: Parts) -> gr.Blocks:
    with gr.Blocks(title="Gulliver", analytics_enabled=False) as page:
        gr.Markdown(f"## Gulliver · `{parts.source.name}`")
        notice = gr.HTML(elem_id="notice")
        with gr.Tabs() as tabs:
            with gr.Tab("Make", id="make"):
                fields, made = _make_tab(parts)
            with gr.Tab("Gallery", id="gallery"):
                shown = _gallery_tab(parts, tabs, fields)
            if parts.source.run is not None:
                with gr.Tab("Training", id="training"):
                    _training_tab(page, parts.source.run)
        refresh = {"fn": lambda: _listed(parts.gallery), "outputs": shown, **QUIET}
        made.then(**refresh)
        page.load(**refresh)
        timer = gr.Timer(REFRESH_S)
        timer.tick(lambda: _notice(parts.service), outputs=notice, **QUIET)

        def leave(request: gr.Request) -> None:
            parts.service.stop(_user(request))

        page.unload(leave)
    # Clips are queued by the service, which is fair to users; gradio must not queue them as well.
    page.queue(default_concurrency_limit=None)
    return page


QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
"""Options of handlers that return immediately."""

PICTURES: dict[str, Any] = {
    "columns": 4,
    "object_fit": "contain",
    "interactive": False,
    # Not the third button: it would upload a clip to a public server.
    "buttons": ["download", "fullscreen"],
}


def _make_tab(parts: Parts) -> tuple[list[Any], Any]:
    """Builds the prompt tab; returns its fields and the event for a finished clip."""
    with gr.Row():
        with gr.Column():
            fields = _fields(parts)
            seed = fields[7]
            with gr.Row():
                make = gr.Button("Make", variant="primary", elem_id="make", min_width=120)
                stop = gr.Button("Stop", elem_id="stop", min_width=80)
                another = gr.Button("New seed", elem_id="another", min_width=100)
        with gr.Column():
            told, frames = gr.HTML(elem_id="told"), gr.HTML(elem_id="frames")
            clip = gr.Video(
                label="Clip", autoplay=True, loop=True, interactive=False, elem_id="clip"
            )
            facts = gr.HTML(elem_id="facts")

    def asked(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from _asked(parts, list(values), _user(request))

    def stopped(request: gr.Request) -> None:
        parts.service.stop(_user(request))

    event: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    made = gr.on(
        [make.click, fields[0].submit], asked, fields, [told, frames, clip, facts], **event
    )
    stop.click(stopped, **QUIET)
    another.click(lambda: random.randint(0, LAST_SEED), outputs=seed, **QUIET)
    return fields, made


def _fields(parts: Parts) -> list[Any]:
    first = parts.first

    def number(name: str, value: float) -> gr.Number:
        # No precision: gradio would round 2.5 steps, which must be an error.
        return gr.Number(value, label=name, precision=None, elem_id=name, min_width=80)

    prompt = gr.Textbox(first.prompt, label="Prompt", elem_id="prompt")
    negative = gr.Textbox(label="Negative prompt", elem_id="negative")
    picture = gr.Image(
        label="First frame: picture to animate",
        type="filepath",
        sources=["upload", "clipboard"],
        height=180,
        elem_id="picture",
    )
    # gradio would only show "Error" for an unreadable picture; our reader reports the cause.
    setattr(picture, "preprocess", lambda data: data.path if data else None)  # noqa: B010
    shape = gr.Dropdown(parts.shapes, label="Training shapes", visible=bool(parts.shapes))
    with gr.Row():
        sizes = [number(name, getattr(first, name)) for name in ("frames", "height", "width")]
    with gr.Row():
        steps, seed = number("steps", first.steps), number("seed", first.seed)
        guidance = number("guidance", first.guidance)
    shape.input(lambda text: [int(n) for n in text.split("x")], shape, sizes, **QUIET)
    return [prompt, negative, *sizes, steps, guidance, seed, picture]


def _gallery_tab(parts: Parts, tabs: gr.Tabs, fields: list[Any]) -> list[Any]:
    """Builds the clips tab; returns the components that `_listed` fills."""
    gallery = gr.Gallery(label="Clips", elem_id="gallery", **PICTURES)
    names, chosen = gr.State([]), gr.State("")
    facts = gr.HTML(elem_id="chosen")
    again = gr.Button("Use these settings again", elem_id="again")

    def choose(listed: list[str], event: gr.SelectData) -> tuple[str, str]:
        name = listed[event.index] if event.index < len(listed) else ""
        try:
            return name, _facts(parts.gallery.find(name))
        except GulliverError as error:
            return "", _wrong(str(error))

    def use(name: str) -> tuple[Any, ...]:
        if not name:
            return (gr.Tabs(), "<p>Choose a clip first.</p>", *[gr.skip()] * len(fields))
        try:
            settings = parts.gallery.find(name).settings
        except GulliverError as error:
            return (gr.Tabs(), _wrong(str(error)), *[gr.skip()] * len(fields))
        return gr.Tabs(selected="make"), gr.skip(), *_values(settings)

    gallery.select(choose, names, [chosen, facts], **QUIET)
    again.click(use, chosen, [tabs, facts, *fields], **QUIET)
    return [gallery, names]


def _training_tab(page: gr.Blocks, run: Path) -> None:
    summary = gr.HTML(elem_id="summary")
    plot = gr.LinePlot(
        _table([]), x="step", y="loss", color="curve", height=320, label="Loss", elem_id="loss"
    )
    samples = gr.Gallery(label="Training samples", elem_id="samples", **PICTURES)

    def refresh() -> tuple[Any, ...]:
        view = look(run)
        return f"<p>{escape(view.summary)}</p>", _table(view.losses), list(map(str, view.samples))

    event = {"fn": refresh, "outputs": [summary, plot, samples], **QUIET}
    page.load(**event)
    gr.Timer(REFRESH_S).tick(**event)


def _table(losses: list[tuple[int, float, str]]) -> pd.DataFrame:
    return pd.DataFrame(losses, columns=CURVE)


def _user(request: gr.Request) -> str:
    return str(request.session_hash)


def _values(settings: Settings) -> list[Any]:
    s = settings
    picture = None if s.picture is None or not s.picture.is_file() else str(s.picture)
    shape = s.frames, s.height, s.width
    return [s.prompt, s.negative_prompt, *shape, s.steps, s.guidance, s.seed, picture]


def _settings(values: list[Any]) -> Settings:
    prompt, negative, frames, height, width, steps, guidance, seed, picture = values
    if guidance is None:
        raise GulliverError("guidance is empty; enter a number such as 2")
    whole = {"frames": frames, "height": height, "width": width, "steps": steps, "seed": seed}
    return Settings(
        prompt=(prompt or "").strip(),
        negative_prompt=(negative or "").strip(),
        guidance=float(guidance),
        picture=None if picture is None else Path(picture),
        **{name: whole_number(name, _plain(value)) for name, value in whole.items()},
    )


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _asked(parts: Parts, values: list[Any], user: str) -> Iterator[tuple[Any, ...]]:
    """Requests a clip; yields status, frames, clip and details to show."""
    try:
        settings = _settings(values)
    except GulliverError as error:
        yield _wrong(str(error)), "", None, ""
        return
    ticket = parts.service.submit(user, ClipJob(settings, parts.gallery.place()))
    yield "<p>Asked.</p>", "", None, ""
    try:
        for event in ticket.follow():
            yield _shown(parts, settings, event)
    except GeneratorExit:
        # The tab was closed.
        parts.service.stop(user)
        raise


def _shown(parts: Parts, settings: Settings, event: Event) -> tuple[Any, ...]:
    same = gr.skip()
    match event:
        case ClipQueued(before):
            clips = "clip is" if before == 1 else "clips are"
            text = f"Waiting: {before} {clips} ahead of yours." if before else "Next."
            return f"<p>{text}</p>", same, same, same
        case Loading():
            return "<p>Loading the model …</p>", same, same, same
        case Sampling():
            return _progress(event), _frames(event.frames), same, same
        case Failed(reason):
            return _wrong(reason), "", None, ""
        case ClipStopped():
            return "<p>Stopped.</p>", "", None, ""
        case ClipMade():
            try:
                entry = parts.gallery.keep(event, settings, parts.source)
            except (GulliverError, OSError) as error:
                return _wrong(f"the clip cannot be saved: {error}"), "", None, ""
            told = f"<p>Generated in {event.seconds:.1f} s with {escape(event.checkpoint)}.</p>"
            notes = "".join(f"<p>Note: {escape(note)}</p>" for note in event.notes)
            return told + notes, "", str(entry.path), _facts(entry)


def _progress(event: Sampling) -> str:
    share = 100 * event.done / event.steps
    left = f"{event.seconds_left:.0f} s left" if event.seconds_left >= 1 else "nearly done"
    bar = f'<div class="bar"><div style="width:{share:.0f}%"></div></div>'
    return f"<p>Step {event.done} of {event.steps}, {left}</p>{bar}"


def _frames(gif: bytes | None) -> Any:
    if gif is None:
        return gr.skip()
    content = base64.b64encode(gif).decode()
    return f'<img alt="preview of the clip" src="data:image/gif;base64,{content}">'


def _wrong(line: str) -> str:
    return f'<p class="wrong">{escape(line)}</p>'


def _notice(service: Service) -> str:
    return _wrong(service.notice) if service.notice else ""


def _facts(entry: Entry) -> str:
    facts, negative = entry.facts, entry.settings.negative_prompt
    lines = [
        entry.caption + (f" · not: {negative}" if negative else ""),
        f"{facts.get('made')} · {facts.get('checkpoint')} · {facts.get('seconds')} s",
        str(entry.path),
    ]
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f"{told}<p>Command for the same clip:</p><pre>{escape(entry.command)}</pre>"


def _listed(gallery: Gallery) -> tuple[list[tuple[str, str]], list[str]]:
    entries = gallery.entries()
    return [(str(e.path), e.caption) for e in entries], [e.path.name for e in entries]
