"""Tasks with given frames: which latent frames of a real clip a model is shown, which it makes.

The judges look at the frames that were made, never at those that were given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gulliver.data import Bucket
from gulliver.video._digits import MovingDigits
from gulliver.video._generate import Request


@dataclass(frozen=True)
class Task:
    """A way to condition on frames of a clip."""

    name: str
    title: str
    given: Callable[[int], tuple[int, ...]]
    """Function from the latent frames of a clip to those that are given."""

    def fits(self, latent_frames: int) -> bool:
        """Whether a clip of so many latent frames has any to give and any to make."""
        given = set(self.given(latent_frames))
        return 0 < len(given) < latent_frames and max(given) < latent_frames

    def request(
        self, clip: Tensor, prompt: str, bucket: Bucket, seed: int, compression: int
    ) -> Request:
        """Asks for a clip that has the given frames of a real one [3, T, H, W]."""
        given = self.given(latent_frames(bucket, compression))
        needed = clip[:, : max(given) * compression + 1]
        strategy = ";".join(f"0,0,{place},{place},1,0" for place in given)
        return Request(prompt, bucket, seed, references=(needed,), mask_strategy=strategy)

    def frames_made(self, bucket: Bucket, compression: int) -> list[int]:
        """Lists the frames of the clip that the model makes."""
        given = self.given(latent_frames(bucket, compression))
        # The first latent frame is one frame, each other is `compression` of them.
        return [n for n in range(bucket.frames) if -(-n // compression) not in given]


def latent_frames(bucket: Bucket, compression: int) -> int:
    """Counts the latent frames of a clip of 1 + k * `compression` frames."""
    return (bucket.frames - 1) // compression + 1


TASKS = (
    Task(
        "image_to_video",
        "image to video: the first frame is a scan the model never saw",
        lambda frames: (0,),
    ),
    Task(
        "extension",
        "extension: the first frames are real",
        lambda frames: (0, 1),
    ),
    Task(
        "tail",
        "ending: the last frames are real, what leads there is made",
        lambda frames: (frames - 1,),
    ),
    Task(
        "first_and_last",
        "connecting: the first and the last frames are real",
        lambda frames: (0, frames - 1),
    ),
    Task(
        "every_second",
        "interpolation: every second latent frame is real",
        lambda frames: tuple(range(0, frames, 2)),
    ),
)


def real_clips(count: int, bucket: Bucket, seed: int) -> MovingDigits:
    """Makes clips of handwriting that no model and no judge was trained on."""
    return MovingDigits("heldout", count, seed=seed, shapes={bucket: 1})


def requests_of(task: Task, real: MovingDigits, compression: int) -> list[Request]:
    """Asks for a clip in place of each real one, with its sentence and its given frames."""
    return [
        task.request(
            real[index].video, real.caption(index), real.bucket_of(index), index, compression
        )
        for index in range(len(real))
    ]
