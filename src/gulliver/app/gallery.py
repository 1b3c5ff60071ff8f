"""Clips on disk, each with its settings in a JSON file, so that they survive a restart."""

from __future__ import annotations

import json
import math
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gulliver.app.worker import ClipMade, Settings, Source
from gulliver.errors import GulliverError
from gulliver.io.files import write_text

SHOWN = 60
"""Maximum number of clips on the page, newest first."""


@dataclass(frozen=True)
class Entry:
    """A clip with its settings."""

    path: Path
    # Settings that it was made with.
    settings: Settings
    # Other fields of its JSON file: source (options that name the model), checkpoint, fps, scale,
    # seconds, date.
    facts: dict[str, Any]

    @property
    def caption(self) -> str:
        s = self.settings
        shape = f"{s.frames}x{s.height}x{s.width}"
        return f"{s.prompt} · {shape} · {s.steps} steps · guidance {s.guidance:g} · seed {s.seed}"

    @property
    def command(self) -> str:
        """The `gulliver generate` command that produces the same clip."""
        s, facts = self.settings, self.facts
        divisor = math.gcd(s.height, s.width)
        options = {
            **facts.get("source", {}),
            "prompt": s.prompt,
            **({"negative-prompt": s.negative_prompt} if s.negative_prompt else {}),
            **({"image": s.picture} if s.picture else {}),
            "frames": s.frames,
            "aspect-ratio": f"{s.width // divisor}:{s.height // divisor}",
            "resolution": round(math.sqrt(s.height * s.width)),
            "steps": s.steps,
            "guidance": s.guidance,
            "seed": s.seed,
            "scale": facts.get("scale", 1),
            "out": "clip.mp4",
        }
        words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
        return shlex.join(["gulliver", "generate", *words])


@dataclass(frozen=True)
class Gallery:
    """A folder of clips."""

    folder: Path

    def place(self) -> Path:
        now = time.time()
        moment = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now % 1 * 1000):03d}"
        return self.folder / f"{moment}-{secrets.token_hex(3)}.mp4"

    def keep(self, made: ClipMade, settings: Settings, source: Source) -> Entry:
        if settings.picture is not None:
            # gradio deletes its copy when the page is closed.
            picture = made.path.with_suffix(f".picture{settings.picture.suffix.lower()}")
            shutil.copyfile(settings.picture, picture)
            settings = replace(settings, picture=picture)
        facts = {
            "source": source.options,
            "checkpoint": made.checkpoint,
            "fps": made.fps,
            "scale": made.scale,
            "seconds": made.seconds,
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        plain = asdict(settings) | {"picture": settings.picture and settings.picture.name}
        text = json.dumps({"settings": plain, **facts}, indent=1, ensure_ascii=False)
        write_text(made.path.with_suffix(".json"), text + "\n")
        return Entry(made.path, settings, facts)

    def entries(self) -> list[Entry]:
        """Lists the clips, newest first; ignores other files."""
        found: list[Entry] = []
        for path in sorted(self.folder.glob("*.json"), reverse=True):
            if len(found) == SHOWN:
                break
            found.extend(self._read(path))
        return found

    def find(self, name: str) -> Entry:
        for entry in self._read(self.folder / f"{Path(name).stem}.json"):
            return entry
        raise GulliverError(f"{Path(name).name} is no longer in {self.folder}")

    def _read(self, path: Path) -> Iterator[Entry]:
        """Yields a JSON file's clip; nothing if the JSON is invalid or the clip is missing."""
        clip = path.with_suffix(".mp4")
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            plain = facts.pop("settings")
            settings = Settings(**{f.name: plain[f.name] for f in fields(Settings)})
            if settings.picture is not None:
                settings = replace(settings, picture=self.folder / Path(settings.picture).name)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, GulliverError):
            return
        if clip.is_file():
            yield Entry(clip, settings, facts)
