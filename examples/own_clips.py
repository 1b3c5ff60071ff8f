"""Makes a folder of 50 small clips to try data preparation and training on, and a broken one.

    python examples/own_clips.py footage

Most show a coloured shape that moves, as their names say. Two of the 48 sentences
are left out, for the trained model to be asked for. There is a copy of a clip, a film of three
scenes, a clip that is too dark and a download that broke off.
"""

import sys
from itertools import product
from pathlib import Path

import av
import numpy as np

COLOURS = {"red": (220, 50, 40), "green": (60, 190, 70), "blue": (60, 90, 230), "white": (240,) * 3}
SHAPES = ("ball", "square", "ring")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
LEFT_OUT = ("a red ball moving up", "a blue square moving left")
FILM = (("white", "ball", "up"), ("red", "ring", "left"), ("blue", "square", "right"))
SIDE, FRAMES, FPS = 64, 24, 12


def inside(shape: str, y: np.ndarray, x: np.ndarray, size: float) -> np.ndarray:
    """Says which pixels [H, W] are inside of a shape around the origin."""
    if shape == "square":
        return np.maximum(abs(y), abs(x)) < size
    distance = np.hypot(y, x)
    return (distance < size) & (distance > (0.55 * size if shape == "ring" else -1))


def draw(colour: str, shape: str, direction: str, seed: int) -> np.ndarray:
    """Draws a clip: uint8 [T, H, W, 3]."""
    rng = np.random.default_rng(seed)
    size, across = rng.uniform(0.13, 0.2) * SIDE, rng.uniform(0.35, 0.65) * SIDE
    y, x = np.mgrid[:SIDE, :SIDE]
    floor = rng.integers(30, 70, 3) + 0.3 * (x[..., None] * rng.random(3) + y[..., None])
    down, right = DIRECTIONS[direction]
    frames = []
    for way in np.linspace(0.2, 0.8, FRAMES) * SIDE:
        way = SIDE - way if down + right < 0 else way
        place = (way, across) if down else (across, way)
        shown = inside(shape, y - place[0], x - place[1], size)
        frames.append(np.where(shown[..., None], np.array(COLOURS[colour]), floor))
    return np.stack(frames).clip(0, 255).astype(np.uint8)


def write(path: Path, pictures: np.ndarray) -> None:
    """Writes a clip as H.264."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "16"})
        stream.height, stream.width, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def main(folder: Path, most: int = 46) -> None:
    """Makes the folder, with at most so many drawn clips."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        f"a {colour} {shape} moving {direction}": draw(colour, shape, direction, seed)
        for seed, (colour, shape, direction) in enumerate(product(COLOURS, SHAPES, DIRECTIONS))
    }
    for caption in [caption for caption in drawn if caption not in LEFT_OUT][:most]:
        write(folder / f"{caption}.mp4", drawn[caption])
    scenes = [draw(*scene, seed=90 + n) for n, scene in enumerate(FILM)]
    write(folder / "film.mp4", np.concatenate(scenes))
    write(folder / "a dark room.mp4", scenes[0] // 16)
    some = sorted(folder.glob("a red*.mp4"))[0]
    (folder / "copy.mp4").write_bytes(some.read_bytes())
    (folder / "download.mp4").write_bytes(some.read_bytes()[:900])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
