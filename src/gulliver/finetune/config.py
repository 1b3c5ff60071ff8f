"""Options of fine-tuning: frozen dataclasses, which are also the command line.

Nothing here imports torch, so that `--help` does not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, AT_LEAST_1, RANKS, RATE, SEED, SHARE, Options, Range

FORMS = ("messages", "instruction", "completion", "text")
LONGEST = 2**20
LENGTH = 2048
"""Length of sequences where none is asked for and the model's context is not shorter."""


@dataclass(frozen=True)
class DataConfig(Options):
    """Texts to learn from."""

    data: tuple[Path, ...] = ()
    """Files, or folders of them: JSON Lines, JSON, Parquet, CSV, TSV; any other file is a text."""
    form: Literal["auto", "messages", "instruction", "completion", "text"] = "auto"
    """What a row is; auto: recognised by its columns, the same for all rows."""
    answers_only: Literal["auto", "yes", "no"] = "auto"
    """Learn the answers and not the questions; auto: yes, where there are answers."""
    seq_length: Annotated[int | None, Range(2, LONGEST)] = None
    """Longest sequence in tokens; by default the model's context, at most 2048."""
    long_chats: Literal["cut", "skip"] = "cut"
    """What becomes of longer conversations; other texts are split into windows."""
    packing: Literal["auto", "yes", "no"] = "auto"
    """Put several texts into a sequence, each on its own; auto: where the model does so exactly."""
    held_out: Annotated[float | Path, Range(0, 1, open_above=True)] = 0.05
    """Share of the texts that is kept for evaluation, or a file of them."""
    bad_rows: Literal["skip", "refuse"] = "skip"
    """What becomes of rows that cannot be used; they are counted and listed."""
    chat_template: Path | None = None
    """A Jinja template for conversations, where the tokenizer has none or another is wanted."""
    seed: Annotated[int, SEED] = 0
    """Seed of everything random."""


def check_data(config: DataConfig) -> None:
    """Refuses options that no data set could be read with, before anything is read.

    Raises:
        GulliverError: naming the option, its value and what would be right.
    """
    if not config.data:
        raise GulliverError("no data is named: give --data FILE, such as --data chats.jsonl")
    for path in config.data:
        if not path.exists():
            raise GulliverError(f"--data {path} does not exist")
    share = config.held_out
    if isinstance(share, Path) and not share.exists():
        raise GulliverError(
            f"--held-out {share} does not exist: give a file, or a share such as 0.05"
        )
    if config.form == "text" and config.answers_only == "yes":
        raise GulliverError("--answers-only yes: a plain text has no answers, leave it at auto")


# Options of a fine-tuning run: how it learns, where it runs, what it keeps.
#
# Those of the data are in `config.py`. Nothing here imports torch: ``gulliver finetune --help``
# reads this module. What is None is chosen when model and data are known, and printed with the
# reason (`planning.py`).


SIZE = Range(1, 65536)
"""Range of numbers of ranks that share a model."""


@dataclass(frozen=True)
class FinetuneConfig(DataConfig):
    """Fine-tunes a language model on texts."""

    model: tyro.conf.Positional[Path | None] = None
    """Hugging Face folder of the model to begin with: config.json, safetensors, tokenizer."""
    out: Path = Path("runs/finetune")
    """The run folder: config, plan, log, checkpoints, samples and the result."""
    method: Literal["full", "lora"] = "full"
    """Train all weights, or adapters of low rank with the weights frozen."""
    memory_limit: str | None = None
    """Memory for weights, gradients, optimizer state and activations on each rank: 6GiB, 70%."""
    disk: str | None = None
    """Folder and share of a disk for what does not fit --memory-limit, such as /scratch:100GiB."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or one model's. Ignored under torchrun."""
    tp_size: Annotated[int, SIZE] = 1
    """Ranks that share each layer's tensors."""
    pp_size: Annotated[int, SIZE] = 1
    """Pipeline stages that the blocks are cut into."""
    sp_size: Annotated[int, SIZE] = 1
    """Ranks that share each sequence."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the weights in training; bf16 trains float32 copies. auto: bf16 on a GPU."""
    activations: Literal["auto", "keep", "recompute"] = "auto"
    """What forward keeps for backward; auto recomputes blocks where it would not fit."""
    epochs: Annotated[int, AT_LEAST_1] = 3
    """Times that every text is shown."""
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Optimizer steps, instead of --epochs."""
    batch_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Tokens of an optimizer step, all ranks together."""
    micro_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Most tokens that a rank computes at once; a step that has more accumulates gradients."""
    learning_rate: Annotated[float | None, RATE] = None
    """Peak learning rate; by default it follows from method and size."""
    warmup: Annotated[int | None, AT_LEAST_0] = None
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    final_fraction: Annotated[float, SHARE] = 0.1
    """The last learning rate as a fraction of the peak."""
    weight_decay: Annotated[float, SHARE] = 0.0
    """Decoupled weight decay of matrices."""
    beta2: Annotated[float, Range(0, 1, open_above=True)] = 0.999
    """Decay of the second moment."""
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    lora_rank: Annotated[int, SIZE] = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[float | None, Range(0, 1e6, open_below=True)] = None
    """Scale of the adapters times their rank; by default twice the rank."""
    lora_dropout: Annotated[float, Range(0, 1, open_above=True)] = 0.0
    """Dropout before the adapters."""
    lora_targets: tuple[str, ...] = ()
    """Last parts of the names of the layers that are adapted; by default those of the family."""
    adapter: Path | None = None
    """PEFT adapter (LoRA) of this model to continue training; it sets rank and layers."""
    merge: bool = False
    """Write the whole model with the adapters added to its weights, as well as the adapter."""
    eval_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between evaluations on the held-out texts; by default a tenth of the run."""
    patience: Annotated[int, AT_LEAST_0] = 0
    """Evaluations without a better loss after which the run ends; 0: never."""
    result: Literal["best", "last"] = "best"
    """Weights that become the result; best needs held-out texts."""
    samples: Annotated[int | None, AT_LEAST_0] = None
    """Held-out texts that the model continues at each evaluation."""
    sample_tokens: Annotated[int, AT_LEAST_1] = 48
    """Most tokens of such a sample."""
    prompt: tuple[str, ...] = ()
    """Further texts that it continues."""
    save_every: Annotated[int | None, AT_LEAST_1] = None
    """Steps between checkpoints; by default as often as evaluations."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Number of newest checkpoints kept."""
    log_every: Annotated[int, AT_LEAST_1] = 1
    """Steps between lines of the log."""
    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the resulting weights; auto: that of the model to begin with."""
    resume: bool = False
    """Continue from the newest checkpoint of the run folder, bit for bit; more --steps extend the
    run, and the learning rate follows its new length."""
    dry_run: bool = False
    """Say what the run would take, and end before a weight is read."""
    GROUPS: ClassVar = {
        **{"data": "data", "model": "", "method": "run", "epochs": "training"},
        **{"lora_rank": "adapters", "eval_every": "evaluation", "save_every": "checkpoints"},
    }

    @property
    def ranks_of_a_model(self) -> int:
        """Ranks that hold one model together, and read the same texts."""
        return self.tp_size * self.pp_size * self.sp_size


MAY_CHANGE = frozenset(
    {"out", "model", "data", "held_out", "adapter", "chat_template"}  # compared by fingerprint
    | {
        "memory_limit",
        "disk",
        "ranks",
        "tp_size",
        "pp_size",
        "sp_size",
        "activations",
        "micro_tokens",
        "resume",
    }
    | {"dry_run", "keep", "log_every", "save_every", "merge", "save_dtype", "result", "bad_rows"}
    | {"samples", "sample_tokens", "prompt", "steps", "epochs"}
)
"""Options that may differ between a run and its resumption: where, how, and how long."""


def check_finetune(config: FinetuneConfig) -> FinetuneConfig:
    """Refuses options that no run could use, before anything is read.

    Raises:
        GulliverError: naming the option, its value and what would be right.
    """
    if config.model is None:
        raise GulliverError("no model is given: gulliver finetune FOLDER, a Hugging Face folder")
    if not (config.model / "config.json").is_file():
        raise GulliverError(f"{config.model} is no Hugging Face folder: it has no config.json")
    check_data(config)
    _check_out(config, config.model)
    _check_adapters(config)
    if config.disk is not None and config.memory_limit is None:
        raise GulliverError(
            f"--disk {config.disk} needs --memory-limit: what fits that stays in memory"
        )
    if config.ranks and config.ranks % config.ranks_of_a_model:
        raise GulliverError(
            f"--ranks {config.ranks} is no multiple of --tp-size {config.tp_size} x --pp-size "
            f"{config.pp_size} x --sp-size {config.sp_size} = {config.ranks_of_a_model}"
        )
    if config.packing == "yes" and config.sp_size > 1:
        raise GulliverError(
            f"--packing yes with --sp-size {config.sp_size}: masks of documents are exact for "
            "whole sequences on a rank only; leave --packing at auto, which sorts batches then"
        )
    return config


def _check_out(config: FinetuneConfig, model: Path) -> None:
    """Refuses a run folder in which files of a run would take the place of what it begins with."""
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
                f"--out {config.out} is {option} {path}, or lies in it: give a folder of its own"
            )
        if (option, path) in folders and out in given.parents:
            raise GulliverError(
                f"--out {config.out} has {option} {path} in it: give a folder of its own"
            )


def _check_adapters(config: FinetuneConfig) -> None:
    """Refuses options of adapters where there are none."""
    if config.method == "lora":
        return
    default = FinetuneConfig()
    names = ("adapter", "merge", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    for name in names:
        if getattr(config, name) != getattr(default, name):
            option = f"--{name.replace('_', '-')}"
            raise GulliverError(f"{option} is of adapters: add --method lora, or leave it out")
