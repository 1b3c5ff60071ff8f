"""Options of `gulliver dreambooth`.

Nothing here imports torch: ``gulliver dreambooth --help`` reads this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from gulliver.errors import GulliverError
from gulliver.io.hub import fetch
from gulliver.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    GUIDANCE,
    POSITIVE,
    RANKS,
    RATE,
    SEED,
    SHARE,
    Options,
    Range,
    Tracker,
    check_needs,
)

SIZE = Range(1, 65536)


@dataclass(frozen=True)
class DreamboothConfig(Options):
    """Teaches an image or video model one subject from a few pictures."""

    model: tyro.conf.Positional[Path | None] = None
    """Folder of the base model: a diffusers pipeline, or a run of `gulliver train`."""
    subject: Path | None = None
    """Folder with the subject's pictures, each with an optional caption of the same name (.txt)."""
    out: Path = Path("runs/dreambooth")
    """Run folder for config, plan, log, samples, checkpoints and the result."""
    token: str = "sks"
    """Word that names the subject in prompts."""
    class_word: str = ""
    """Class of the subject, such as dog; enables default prompts and prior preservation."""
    prompt: str = "a photo of {token} {class}"
    """Prompt for pictures without a caption."""
    method: Literal["lora", "full", "token"] = "lora"
    """Train low-rank adapters, all weights, or only the token (textual inversion)."""
    text_encoder: bool = False
    """Also train the text encoder."""
    learn_token: bool = False
    """Add --token as a new word with a trainable embedding; always on with --method token."""
    initial: str | None = None
    """Existing word whose embedding initializes the new token; default: --class-word."""
    lora_rank: Annotated[int, SIZE] = 4
    """Rank of the adapters."""
    lora_alpha: Annotated[float | None, Range(0, 1e6, open_below=True)] = None
    """LoRA alpha: scale of the adapters times their rank; default: the rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the layers to adapt; default: the attention layers."""
    adapter: Path | None = None
    """Adapter to continue training: a folder or file written by this command for the same base."""
    prior_pictures: Annotated[int | None, AT_LEAST_0] = None
    """Generated class pictures for prior preservation; default: 100 with --class-word, else 0."""
    prior_weight: Annotated[float, AT_LEAST_0] = 1.0
    """Loss weight of prior pictures relative to the subject's."""
    prior_folder: Path | None = None
    """Folder that stores prior pictures for several runs; default: in the run folder."""
    prior_prompt: str = "a photo of {class}"
    """Prompt of prior pictures; alternatives such as {left|right} are used in turn."""
    motion: str = ""
    """Prompt with which a video base model animates the learned pictures, to train on the
    clips: 'the {class} {token} moving {left|right}'.
    """
    motion_after: Annotated[int | None, AT_LEAST_1] = None
    """Steps on still pictures before the clips of --motion; default: a third of --steps."""
    motion_clips: Annotated[int, AT_LEAST_1] = 40
    """Number of animated clips."""
    motion_placed: bool = False
    """Create clips by moving the picture along the motion of a clip of the base model; for subjects
    on a plain background. Otherwise the base model continues the picture.
    """
    resolution: Annotated[int | None, Range(8, 8192)] = None
    """Side length of the pictures in pixels; default: that of the base model."""
    on_broken: Literal["refuse", "skip"] = "refuse"
    """How to handle unreadable pictures; they are named in both cases."""
    background: Literal["white", "black", "grey"] = "white"
    """Background color for transparent pictures."""
    steps: Annotated[int, AT_LEAST_1] = 400
    """Optimizer steps."""
    batch_size: Annotated[int, AT_LEAST_1] = 1
    """Global batch size in pictures of the subject; as many prior pictures are added."""
    micro_batch: Annotated[int | None, AT_LEAST_1] = None
    """Micro-batch size per rank; larger batches accumulate gradients."""
    learning_rate: Annotated[float | None, RATE] = None
    """Peak learning rate; default: 1e-4 for adapters, 5e-6 for all weights, 5e-4 for a token."""
    token_rate: Annotated[float, RATE] = 5e-4
    """Learning rate of the new token's embedding."""
    warmup: Annotated[int, AT_LEAST_0] = 0
    """Linear warm-up steps."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate schedule after the warm-up."""
    weight_decay: Annotated[float, SHARE] = 0.01
    """Decoupled weight decay; not applied to token embeddings."""
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    snr_gamma: Annotated[float | None, POSITIVE] = None
    """Clip loss weights at this signal-to-noise ratio (Min-SNR); not for flow models."""
    seed: Annotated[int, SEED] = 0
    """Random seed."""
    plugin: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """How ranks share the state; auto: DDP, or ZeRO-3 with --memory-limit."""
    memory_limit: str | None = None
    """Memory limit per rank for weights, gradients, optimizer state and activations: 6GiB, 70%."""
    disk: str | None = None
    """Disk folder and size for state that exceeds --memory-limit, such as /scratch:100GiB."""
    activations: Literal["keep", "recompute", "auto"] = "auto"
    """Activation recomputation; auto recomputes blocks if --memory-limit requires it."""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Training dtype; bf16 keeps float32 master weights. auto: bf16 on GPUs. fp64 is for tests."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU. Ignored under torchrun."""
    validate_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between validation pictures; default: a fifth of the run."""
    validation_prompt: tuple[str, ...] = ()
    """Prompts of validation pictures; default: the subject's prompt."""
    validation_pictures: Annotated[int, AT_LEAST_0] = 4
    """Pictures per validation prompt; 0 disables them."""
    sampling_steps: Annotated[int, AT_LEAST_1] = 25
    """Sampling steps for prior and validation pictures."""
    guidance: Annotated[float | None, GUIDANCE] = None
    """Guidance scale; default: 7.5, or 2 for a run of `gulliver train`."""
    save_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between checkpoints; default: as for validation pictures."""
    report_to: tuple[Tracker, ...] = ("tensorboard",)
    """Experiment trackers that get losses and samples."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Number of checkpoints to keep."""
    resume: bool = False
    """Resume from the newest checkpoint of the run folder, with bitwise identical results; more
    --steps extend a run without --motion, and the learning rate schedule adapts to its new length.
    """
    plan: bool = False
    """Print the predicted memory use and exit before reading weights."""
    GROUPS: ClassVar = {
        **{"token": "wording", "method": "method", "prior_pictures": "prior", "motion": "motion"},
        **{"resolution": "training", "plugin": "resources", "validate_every": "validation"},
        **{"save_every": "checkpoints"},
    }

    ranks_of_a_model: ClassVar[int] = 1
    """Tensor parallel size: these denoisers have no tensor parallel plan."""

    @property
    def trains_token(self) -> bool:
        """Whether the token is a new word with a trainable embedding."""
        return self.learn_token or self.method == "token"

    @property
    def rate(self) -> float:
        """Peak learning rate of all weights except token embeddings."""
        return self.learning_rate or {"lora": 1e-4, "full": 5e-6, "token": 5e-4}[self.method]

    @property
    def priors(self) -> int:
        usual = 100 if self.class_word and self.method != "token" else 0
        return usual if self.prior_pictures is None else self.prior_pictures

    @property
    def every(self) -> int:
        return self.validate_every or max(1, self.steps // 5)

    @property
    def still_steps(self) -> int:
        """Number of steps on still images, before clips are made from them."""
        return self.motion_after or max(1, self.steps // 3)

    def filled(self, prompt: str) -> str:
        text = prompt.replace("{token}", self.token).replace("{class}", self.class_word)
        return " ".join(text.split())


def alternatives(prompt: str) -> list[str]:
    """Expands the alternatives in braces of a prompt, in order."""
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", prompt)
    choices = [part.split("|") if n % 2 else [part] for n, part in enumerate(parts)]
    return [" ".join("".join(one).split()) for one in product(*choices)]


def check_filled(config: DreamboothConfig, prompt: str, where: str, turns: bool = False) -> str:
    if "{class}" in prompt and not config.class_word and prompt != DreamboothConfig.prompt:
        raise GulliverError(f"{where} contains {{class}}; set --class-word, such as dog")
    text = config.filled(prompt)
    for one in alternatives(text) if turns else [text]:
        left = re.search(r"\{[^{}]*\}?|\}", one.replace(config.token, ""))
        if left:
            more = " and alternatives" if turns else "; alternatives are not supported here"
            raise GulliverError(
                f"{where} contains {left[0]}; only {{token}} and {{class}} are filled in{more}"
            )
    return text


MAY_CHANGE = frozenset(
    {"out", "model", "subject", "adapter", "prior_folder"}  # compared by fingerprint
    | {"plugin", "memory_limit", "disk", "ranks", "activations", "micro_batch", "resume", "plan"}
    | {"keep", "save_every", "validate_every", "validation_prompt", "validation_pictures"}
    | {"on_broken", "report_to", "steps"}
)
"""Options that may change on resume: they affect where, how and how long a run trains."""


def check_dreambooth(config: DreamboothConfig) -> DreamboothConfig:
    if config.model is None:
        raise GulliverError(
            "the model is missing; pass a folder, such as that of a diffusers pipeline: gulliver "
            "dreambooth FOLDER"
        )
    config = replace(config, model=(model := fetch(config.model)))
    if not model.is_dir():
        raise GulliverError(
            f"{model} is not a folder; pass a diffusers pipeline or a run of `gulliver train`"
        )
    _check_subject(config)
    _check_words(config)
    _check_motion(config)
    check_needs(config, _needs(config))
    out = config.out.resolve()
    for option, path in (("--model", config.model), ("--subject", config.subject)):
        given = None if path is None else path.resolve()
        if given is not None and (given == out or given in out.parents or out in given.parents):
            raise GulliverError(
                f"--out {config.out} and {option} {path} overlap; pass separate folders"
            )
    return config


def _check_subject(config: DreamboothConfig) -> None:
    if config.subject is None:
        if config.plan:
            return
        raise GulliverError("--subject is missing; set it to the folder with its pictures")
    if not config.subject.is_dir():
        raise GulliverError(
            f"--subject {config.subject} is not a folder; put the pictures into a folder"
        )


def _check_words(config: DreamboothConfig) -> None:
    if not config.token.strip() or len(config.token.split()) != 1:
        raise GulliverError(f"--token {config.token!r} is not a single word; use one such as sks")
    if config.priors and not config.class_word and "{class}" in config.prior_prompt:
        raise GulliverError(
            f"--prior-pictures {config.priors} needs --class-word, the class of the subject, such "
            "as dog"
        )
    for option, text in (("--prompt", config.prompt), ("--prior-prompt", config.prior_prompt)):
        if option == "--prompt" or config.priors:
            check_filled(config, text, option, option != "--prompt")
        if not config.filled(text):
            raise GulliverError(f"{option} is empty; write a prompt such as 'a photo of a dog'")
    for text in config.validation_prompt:
        check_filled(config, text, "--validation-prompt")
    if config.token not in config.filled(config.prompt).split():
        raise GulliverError(
            f"--prompt {config.prompt!r} does not name the subject; include {{token}}"
        )


def _check_motion(config: DreamboothConfig) -> None:
    check_filled(config, config.motion, "--motion", True)
    for text in alternatives(config.filled(config.motion)) if config.motion else ():
        if config.token not in text.split():
            raise GulliverError(f"--motion {text!r} does not name the subject; include {{token}}")
    if config.motion and config.still_steps >= config.steps:
        raise GulliverError(
            f"--motion-after {config.still_steps} leaves no steps of --steps {config.steps} for "
            "clips; lower --motion-after"
        )


def _needs(config: DreamboothConfig) -> dict[str, tuple[bool, str]]:
    lora, limited = config.method == "lora", config.memory_limit is not None
    adapters = "it only applies to adapters; add --method lora or omit it"
    moved = "it only applies to animated pictures; add --motion or omit it"
    priors = "it only applies to prior pictures; add --class-word and --prior-pictures, or omit it"
    return {
        **dict.fromkeys(("lora_rank", "lora_alpha", "lora_targets", "adapter"), (lora, adapters)),
        **dict.fromkeys(
            ("prior_weight", "prior_folder", "prior_prompt"), (config.priors > 0, priors)
        ),
        "text_encoder": (
            config.method != "token",
            "--method token trains only the token's embedding; omit it",
        ),
        "initial": (config.trains_token, "it needs --learn-token or --method token"),
        "token_rate": (config.trains_token, "it needs --learn-token or --method token"),
        "motion": (
            lora,
            "training on clips continues adapters; add --method lora or omit it",
        ),
        **dict.fromkeys(
            ("motion_after", "motion_clips", "motion_placed"), (bool(config.motion), moved)
        ),
        "disk": (limited, "it needs --memory-limit; state that fits stays in memory"),
        "plugin": (
            not limited,
            "--memory-limit implies ZeRO-3; leave --plugin at auto",
        ),
    }
