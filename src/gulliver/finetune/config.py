"""Options of fine-tuning: frozen dataclasses that also define the command line.

This module does not import torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from gulliver.errors import GulliverError
from gulliver.io.hub import check_push, fetch
from gulliver.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    RANKS,
    RATE,
    SEED,
    SHARE,
    Options,
    Range,
    Size,
    Tracker,
)

FORMS = ("messages", "instruction", "completion", "text")
LONGEST = 2**20
LENGTH = 2048  # default sequence length, if the model's context is not shorter


@dataclass(frozen=True)
class DataConfig(Options):
    """Training data."""

    data: tuple[Path, ...] = ()
    """Files or folders with JSON Lines, JSON, Parquet, CSV, TSV or plain text."""
    form: Literal["auto", "messages", "instruction", "completion", "text"] = "auto"
    """Format of the rows; auto: detected from the columns."""
    answers_only: Literal["auto", "yes", "no"] = "auto"
    """Train on answers only; auto: yes, if there are answers."""
    seq_length: Annotated[int | None, Range(2, LONGEST)] = None
    """Maximum sequence length in tokens; default: the model's context, at most 2048."""
    long_chats: Literal["cut", "skip"] = "cut"
    """How to handle conversations longer than --seq-length; other texts are split into windows."""
    packing: Literal["auto", "yes", "no"] = "auto"
    """Pack several texts into a sequence; auto: if results stay exact with this model."""
    held_out: Annotated[float | Path, Range(0, 1, open_above=True)] = 0.05
    """Fraction of the texts held out for evaluation, or a file of them."""
    bad_rows: Literal["skip", "refuse"] = "skip"
    """How to handle unusable rows; they are counted and listed."""
    chat_template: Path | None = None
    """Jinja chat template that replaces the tokenizer's own."""
    seed: Annotated[int, SEED] = 0
    """Random seed."""


def check_data(config: DataConfig) -> None:
    """Validates the data options without reading files."""
    if not config.data:
        raise GulliverError("--data is missing; set it to a file, such as --data chats.jsonl")
    for path in config.data:
        if not path.exists():
            raise GulliverError(f"--data {path} does not exist")
    share = config.held_out
    if isinstance(share, Path) and not share.exists():
        raise GulliverError(
            f"--held-out {share} does not exist; set it to a file, or to a fraction such as 0.05"
        )
    if config.form == "text" and config.answers_only == "yes":
        raise GulliverError(
            "--answers-only yes does not apply to plain text, which has no answers; leave it at "
            "auto"
        )


# Options of a fine-tuning run.
#
# Nothing here imports torch: ``gulliver finetune --help`` reads this module. Values of None are
# chosen once model and data are known, and printed with the reason (`planning.py`).


SIZE = Range(1, 65536)  # allowed number of ranks that share a model


@dataclass(frozen=True)
class FinetuneConfig(DataConfig):
    """Fine-tunes a language model on texts."""

    model: tyro.conf.Positional[Path | None] = None
    """Base model: a Hugging Face folder, or a name on the Hub such as org/name."""
    out: Path = Path("runs/finetune")
    """Run folder for config, plan, log, checkpoints, samples and the result."""
    method: Literal["full", "lora"] = "full"
    """Train all weights, or low-rank adapters with frozen weights."""
    memory_limit: Annotated[str | None, Size(share=True)] = None
    """Memory limit per rank for weights, gradients, optimizer state and activations: 6GiB, 70%."""
    disk: str | None = None
    """Disk folder and size for state that exceeds --memory-limit, such as /scratch:100GiB."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or one model's ranks. Ignored under torchrun."""
    tp_size: Annotated[int, SIZE] = 1
    """Tensor parallel size."""
    pp_size: Annotated[int, SIZE] = 1
    """Pipeline parallel size."""
    sp_size: Annotated[int, SIZE] = 1
    """Sequence parallel size."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Training dtype of the weights; bf16 keeps float32 master weights. auto: bf16 on GPUs."""
    activations: Literal["auto", "keep", "recompute"] = "auto"
    """Activation recomputation; auto recomputes blocks if they would not fit otherwise."""
    epochs: Annotated[int, AT_LEAST_1] = 3
    """Number of passes over the data."""
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Optimizer steps; overrides --epochs."""
    batch_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Global batch size in tokens."""
    micro_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Maximum micro-batch size per rank in tokens; larger batches accumulate gradients."""
    learning_rate: Annotated[float | None, RATE] = None
    """Peak learning rate; default: depends on method and model size."""
    warmup: Annotated[int | None, AT_LEAST_0] = None
    """Linear warm-up steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    final_fraction: Annotated[float, SHARE] = 0.1
    """Final learning rate as a fraction of the peak."""
    weight_decay: Annotated[float, SHARE] = 0.0
    """Decoupled weight decay of matrices."""
    beta2: Annotated[float, Range(0, 1, open_above=True)] = 0.999
    """Adam beta2."""
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    lora_rank: Annotated[int, SIZE] = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[float | None, Range(0, 1e6, open_below=True)] = None
    """LoRA alpha: scale of the adapters times their rank; default: twice the rank."""
    lora_dropout: Annotated[float, Range(0, 1, open_above=True)] = 0.0
    """Dropout before the adapters."""
    lora_targets: tuple[str, ...] = ()
    """Target layers of the adapters, by name suffix; default: those of the model family."""
    adapter: Path | None = None
    """PEFT LoRA adapter of this model to continue training; it determines rank and layers."""
    merge: bool = False
    """Also write the whole model with the adapters merged into its weights."""
    eval_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between evaluations on held-out texts; default: a tenth of the run."""
    patience: Annotated[int, AT_LEAST_0] = 0
    """Stop after this many evaluations without improvement; 0: never."""
    result: Literal["best", "last"] = "best"
    """Checkpoint to use as the result; best needs held-out texts."""
    samples: Annotated[int | None, AT_LEAST_0] = None
    """Number of held-out texts to sample continuations for at each evaluation."""
    sample_tokens: Annotated[int, AT_LEAST_1] = 48
    """Maximum tokens of a sample."""
    prompt: tuple[str, ...] = ()
    """Additional prompts to sample continuations for."""
    save_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between checkpoints; default: as for evaluations."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Number of checkpoints to keep."""
    log_every: Annotated[int, AT_LEAST_1] = 1
    """Steps between log lines."""
    report_to: tuple[Tracker, ...] = ("tensorboard",)
    """Experiment trackers that get losses and samples."""
    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the resulting weights; auto: that of the base model."""
    push_to_hub: str | None = None
    """Hub repository, org/name, to upload the result to; a new one is private."""
    resume: bool = False
    """Resume from the newest checkpoint of the run folder, with bitwise identical results; more
    --steps extend the run, and the learning rate schedule adapts to its new length.
    """
    dry_run: bool = False
    """Print the plan and exit before reading weights."""
    json: bool = False
    """Print the plan as JSON, in seconds and bytes; needs --dry-run."""
    GROUPS: ClassVar = {
        **{"data": "data", "model": "", "method": "run", "epochs": "training"},
        **{"lora_rank": "adapters", "eval_every": "evaluation", "save_every": "checkpoints"},
    }

    @property
    def ranks_of_a_model(self) -> int:
        """Number of ranks that share a model and read the same texts."""
        return self.tp_size * self.pp_size * self.sp_size


MAY_CHANGE = frozenset(
    {"out", "model", "data", "held_out", "adapter", "chat_template"}  # compared by fingerprint
    | {"memory_limit", "disk", "ranks", "tp_size", "pp_size", "sp_size", "activations"}
    | {"micro_tokens", "resume", "dry_run", "json", "keep", "log_every", "save_every", "merge"}
    | {"save_dtype", "result", "bad_rows", "report_to", "push_to_hub"}
    | {"samples", "sample_tokens", "prompt", "steps", "epochs"}
)
"""Options that may change on resume: they affect only where, how and how long a run trains."""


def check_finetune(config: FinetuneConfig) -> FinetuneConfig:
    """Validates the options without reading files."""
    if config.model is None:
        raise GulliverError("the model is missing; pass a folder: gulliver finetune FOLDER")
    check_push(config.push_to_hub)
    config = replace(config, model=(model := fetch(config.model)))
    if not (model / "config.json").is_file():
        raise GulliverError(f"{model} is not a Hugging Face folder: it has no config.json")
    if config.json and not config.dry_run:
        raise GulliverError("--json prints the plan of a dry run; add --dry-run")
    check_data(config)
    _check_out(config, model)
    _check_adapters(config)
    if config.disk is not None and config.memory_limit is None:
        raise GulliverError(
            f"--disk {config.disk} has no effect without --memory-limit; set it, or omit --disk"
        )
    if config.ranks and config.ranks % config.ranks_of_a_model:
        raise GulliverError(
            f"--ranks {config.ranks} is not a multiple of --tp-size {config.tp_size} x --pp-size "
            f"{config.pp_size} x --sp-size {config.sp_size} = {config.ranks_of_a_model}"
        )
    if config.packing == "yes" and config.sp_size > 1:
        raise GulliverError(
            f"--packing yes does not support --sp-size {config.sp_size}, because document masks "
            "need full sequences on a rank; leave --packing at auto, which sorts batches by length"
        )
    return config


def _check_out(config: FinetuneConfig, model: Path) -> None:
    out = config.out.resolve()
    folders = [("--model", model), ("--adapter", config.adapter)]
    files = [("--data", path) for path in config.data]
    if isinstance(config.held_out, Path):
        files.append(("--held-out", config.held_out))
    for option, path in (*folders, *files):
        given = path.resolve() if path is not None else None
        if given is None:
            continue
        if given == out or given in out.parents:
            raise GulliverError(
                f"--out {config.out} is {option} {path} or inside it; pass a separate folder"
            )
        if (option, path) in folders and out in given.parents:
            raise GulliverError(
                f"--out {config.out} contains {option} {path}; pass a separate folder"
            )


def _check_adapters(config: FinetuneConfig) -> None:
    if config.method == "lora":
        return
    default = FinetuneConfig()
    names = ("adapter", "merge", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    for name in names:
        if getattr(config, name) != getattr(default, name):
            option = f"--{name.replace('_', '-')}"
            raise GulliverError(f"{option} only applies to adapters; add --method lora or omit it")
