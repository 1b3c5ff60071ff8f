"""Options of teaching a subject: what is learnt, where it runs, what it keeps.

Nothing here imports torch: ``gulliver dreambooth --help`` reads this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from gulliver.errors import GulliverError
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
    check_needs,
)

SIZE = Range(1, 65536)


@dataclass(frozen=True)
class DreamboothConfig(Options):
    """Teaches an image or video model one subject from a few pictures."""

    model: tyro.conf.Positional[Path | None] = None
    """Folder of the base: a pipeline of diffusers, or a run of `gulliver train`."""
    subject: Path | None = None
    """Folder with the subject's pictures, each perhaps with a caption of the same name (.txt)."""
    out: Path = Path("runs/dreambooth")
    """The run folder: config, plan, log, samples, checkpoints and the result."""
    token: str = "sks"
    """Word that the subject is called by."""
    class_word: str = ""
    """What the subject is one of, such as dog; it makes prompts, and prior pictures possible."""
    prompt: str = "a photo of {token} {class}"
    """Prompt of pictures without a caption."""
    method: Literal["lora", "full", "token"] = "lora"
    """Train adapters of low rank, all weights, or the word alone (textual inversion)."""
    text_encoder: bool = False
    """Train the text encoder in the same way, too."""
    learn_token: bool = False
    """Make --token a word of its own whose embedding learns; --method token does so always."""
    initial: str | None = None
    """Known word that the embedding of the new one begins with; by default --class-word."""
    lora_rank: Annotated[int, SIZE] = 4
    """Rank of the adapters."""
    lora_alpha: Annotated[float | None, Range(0, 1e6, open_below=True)] = None
    """Scale of the adapters times their rank; by default the rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the layers that are adapted; by default those of attention."""
    adapter: Path | None = None
    """Adapter of this base to continue training: a folder or file that this command has written."""
    prior_pictures: Annotated[int | None, AT_LEAST_0] = None
    """Pictures of the class that the base makes, and that it must not forget; by default 100 with
    --class-word and 0 without."""
    prior_weight: Annotated[float, AT_LEAST_0] = 1.0
    """Weight of the loss of prior pictures, relative to that of the subject's."""
    prior_folder: Path | None = None
    """Folder that keeps prior pictures, for several runs; by default in the run folder."""
    prior_prompt: str = "a photo of {class}"
    """Prompt of prior pictures; alternatives such as {left|right} take turns."""
    motion: str = ""
    """Prompt with which a video base sets the pictures in motion, once it knows them, to learn from
    those clips: 'the {class} {token} moving {left|right}'."""
    motion_after: Annotated[int | None, AT_LEAST_1] = None
    """Steps on the pictures alone before that; by default a third of --steps."""
    motion_clips: Annotated[int, AT_LEAST_1] = 40
    """Number of such clips."""
    motion_placed: bool = False
    """Move each picture itself as the subject of the base's own clip moves; for subjects on a plain
    ground, whose edges are continued. Otherwise the base continues from the picture."""
    resolution: Annotated[int | None, Range(8, 8192)] = None
    """Side of the pictures in pixels; by default what the base was trained with."""
    on_broken: Literal["refuse", "skip"] = "refuse"
    """What becomes of the run where a picture cannot be read; it is named in both cases."""
    background: Literal["white", "black", "grey"] = "white"
    """Colour behind transparent pictures."""
    steps: Annotated[int, AT_LEAST_1] = 400
    """Optimizer steps."""
    batch_size: Annotated[int, AT_LEAST_1] = 1
    """Global batch size: pictures of the subject in a step, all ranks together; as many prior ones
    are added."""
    micro_batch: Annotated[int | None, AT_LEAST_1] = None
    """Pictures that a rank computes at once; a step that has more accumulates gradients."""
    learning_rate: Annotated[float | None, RATE] = None
    """Peak learning rate; by default 1e-4 of adapters, 5e-6 of all weights, 5e-4 of a token."""
    token_rate: Annotated[float, RATE] = 5e-4
    """Learning rate of a new token's embedding."""
    warmup: Annotated[int, AT_LEAST_0] = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after the warm-up."""
    weight_decay: Annotated[float, SHARE] = 0.01
    """Decoupled weight decay; embeddings of tokens have none."""
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    snr_gamma: Annotated[float | None, POSITIVE] = None
    """Weigh times by their signal-to-noise ratio, at most this (Min-SNR); not for flows."""
    seed: Annotated[int, SEED] = 0
    """Seed of everything random."""
    plugin: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """How ranks share the state; auto: DDP, or the limit of --memory-limit."""
    memory_limit: str | None = None
    """Memory for weights, gradients, optimizer state and activations on each rank: 6GiB, 70%."""
    disk: str | None = None
    """Folder and share of a disk for what does not fit --memory-limit, such as /scratch:100GiB."""
    activations: Literal["keep", "recompute", "auto"] = "auto"
    """What forward keeps for backward; auto recomputes blocks where --memory-limit asks for it."""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Dtype of training; bf16 trains float32 copies. auto: bf16 on a GPU. fp64 is for checks."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU. Ignored under torchrun."""
    validate_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between pictures that show what was learnt; by default a fifth of the run."""
    validation_prompt: tuple[str, ...] = ()
    """Prompts of those pictures; by default that of the subject."""
    validation_pictures: Annotated[int, AT_LEAST_0] = 4
    """Pictures of each prompt; 0 makes none."""
    sampling_steps: Annotated[int, AT_LEAST_1] = 25
    """Steps that sampling takes, of prior and validation pictures."""
    guidance: Annotated[float | None, GUIDANCE] = None
    """Weight of the prompt in sampling; by default 7.5, and 2 of a run of `gulliver train`."""
    save_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between checkpoints; by default as often as validation pictures."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Number of newest checkpoints kept."""
    resume: bool = False
    """Continue from the newest checkpoint of the run folder, bit for bit; more --steps extend a run
    without --motion, and the learning rate follows its new length."""
    plan: bool = False
    """Print what the run would take of memory, and end before a weight is read."""
    GROUPS: ClassVar = {
        **{"token": "wording", "method": "method", "prior_pictures": "prior", "motion": "motion"},
        **{"resolution": "training", "plugin": "resources", "validate_every": "validation"},
        **{"save_every": "checkpoints"},
    }

    ranks_of_a_model: ClassVar[int] = 1
    """Ranks that hold one model together: no family says how these denoisers are cut."""

    @property
    def learns_token(self) -> bool:
        """Whether the token is a word of its own."""
        return self.learn_token or self.method == "token"

    @property
    def rate(self) -> float:
        """Peak learning rate of all but tokens."""
        return self.learning_rate or {"lora": 1e-4, "full": 5e-6, "token": 5e-4}[self.method]

    @property
    def priors(self) -> int:
        """Number of prior pictures."""
        usual = 100 if self.class_word and self.method != "token" else 0
        return usual if self.prior_pictures is None else self.prior_pictures

    @property
    def every(self) -> int:
        """Steps between validation pictures."""
        return self.validate_every or max(1, self.steps // 5)

    @property
    def still_steps(self) -> int:
        """Steps on the pictures alone, before they are set in motion."""
        return self.motion_after or max(1, self.steps // 3)

    def filled(self, prompt: str) -> str:
        """A prompt with the token and the class in it."""
        text = prompt.replace("{token}", self.token).replace("{class}", self.class_word)
        return " ".join(text.split())


def alternatives(prompt: str) -> list[str]:
    """All prompts that one with alternatives in braces stands for, in order."""
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", prompt)
    choices = [part.split("|") if n % 2 else [part] for n, part in enumerate(parts)]
    return [" ".join("".join(one).split()) for one in product(*choices)]


def check_filled(config: DreamboothConfig, prompt: str, where: str, turns: bool = False) -> str:
    """A prompt with the token and the class in it."""
    if "{class}" in prompt and not config.class_word and prompt != DreamboothConfig.prompt:
        raise GulliverError(f"{where} has {{class}} in it: give --class-word, such as dog")
    text = config.filled(prompt)
    for one in alternatives(text) if turns else [text]:
        left = re.search(r"\{[^{}]*\}?|\}", one.replace(config.token, ""))
        if left:
            more = ", and alternatives" if turns else "; alternatives are for other prompts"
            raise GulliverError(
                f"{where} has {left[0]} in it: {{token}} and {{class}} are filled in{more}"
            )
    return text


MAY_CHANGE = frozenset(
    {"out", "model", "subject", "adapter", "prior_folder"}  # compared by fingerprint
    | {"plugin", "memory_limit", "disk", "ranks", "activations", "micro_batch", "resume", "plan"}
    | {"keep", "save_every", "validate_every", "validation_prompt", "validation_pictures"}
    | {"on_broken", "steps"}
)
"""Options that may differ between a run and its resumption: where, how, and how long."""


def check_dreambooth(config: DreamboothConfig) -> DreamboothConfig:
    """Refuses options that no run could use, before anything is read."""
    if config.model is None:
        raise GulliverError(
            "no base is given: gulliver dreambooth FOLDER, such as a diffusers pipeline"
        )
    if not config.model.is_dir():
        raise GulliverError(f"{config.model} is no folder")
    _check_subject(config)
    _check_words(config)
    _check_motion(config)
    check_needs(config, _needs(config))
    out = config.out.resolve()
    for option, path in (("--model", config.model), ("--subject", config.subject)):
        given = None if path is None else path.resolve()
        if given is not None and (given == out or given in out.parents or out in given.parents):
            raise GulliverError(
                f"--out {config.out} and {option} {path} lie in one another: give a folder of its "
                "own"
            )
    return config


def _check_subject(config: DreamboothConfig) -> None:
    if config.subject is None:
        if config.plan:
            return
        raise GulliverError("no subject is named: give --subject FOLDER with its pictures")
    if not config.subject.is_dir():
        raise GulliverError(f"--subject {config.subject} is no folder: put the pictures into one")


def _check_words(config: DreamboothConfig) -> None:
    if not config.token.strip() or len(config.token.split()) != 1:
        raise GulliverError(f"--token {config.token!r} is no word: give one, such as sks")
    if config.priors and not config.class_word and "{class}" in config.prior_prompt:
        raise GulliverError(
            f"--prior-pictures {config.priors} needs --class-word, such as dog: what the subject "
            "is one of"
        )
    for option, text in (("--prompt", config.prompt), ("--prior-prompt", config.prior_prompt)):
        if option == "--prompt" or config.priors:
            check_filled(config, text, option, option != "--prompt")
        if not config.filled(text):
            raise GulliverError(f"{option} is empty: write a sentence such as 'a photo of a dog'")
    for text in config.validation_prompt:
        check_filled(config, text, "--validation-prompt")
    if config.token not in config.filled(config.prompt).split():
        raise GulliverError(
            f"--prompt {config.prompt!r} does not name the subject: put {{token}} into it"
        )


def _check_motion(config: DreamboothConfig) -> None:
    check_filled(config, config.motion, "--motion", True)
    for text in alternatives(config.filled(config.motion)) if config.motion else ():
        if config.token not in text.split():
            raise GulliverError(f"--motion {text!r} does not name the subject: put {{token}} in")
    if config.motion and config.still_steps >= config.steps:
        raise GulliverError(
            f"--motion-after {config.still_steps} leaves none of --steps {config.steps} for clips"
        )


def _needs(config: DreamboothConfig) -> dict[str, tuple[bool, str]]:
    """Options by what they need to have an effect, and what would be right without it."""
    lora, limited = config.method == "lora", config.memory_limit is not None
    adapters = "it is of adapters: add --method lora, or leave it out"
    moved = "it is of pictures that are set in motion: add --motion, or leave it out"
    priors = "it is of prior pictures: add --class-word and --prior-pictures, or leave it out"
    return {
        **dict.fromkeys(("lora_rank", "lora_alpha", "lora_targets", "adapter"), (lora, adapters)),
        **dict.fromkeys(
            ("prior_weight", "prior_folder", "prior_prompt"), (config.priors > 0, priors)
        ),
        "text_encoder": (
            config.method != "token",
            "--method token trains nothing but the word's embedding: leave it out",
        ),
        "initial": (config.learns_token, "it needs --learn-token, or --method token"),
        "token_rate": (config.learns_token, "it needs --learn-token, or --method token"),
        "motion": (
            lora,
            "the run on the clips continues adapters: add --method lora, or leave it out",
        ),
        **dict.fromkeys(
            ("motion_after", "motion_clips", "motion_placed"), (bool(config.motion), moved)
        ),
        "disk": (limited, "it needs --memory-limit: what fits that stays in memory"),
        "plugin": (
            not limited,
            "--memory-limit shards state as stage 3 of ZeRO does: leave --plugin at auto",
        ),
    }
