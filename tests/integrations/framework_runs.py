"""Runs of transformers' Trainer and of accelerate, plain and with Gulliver, in a pool's ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gulliver.booster import limited as _limited
from gulliver.comm import World

ROWS, LENGTH, VOCABULARY = 24, 12, 64
EXACT = {"chunk_mb": 0.05}
"""Small chunks, and nothing that is tuned by time."""


def limited(disk: Path) -> dict[str, Any]:
    """A limit below the 3 MiB of the model's state."""
    return {"memory_limit": "2.5MiB", "disk": f"{disk}:64MiB"}


@contextmanager
def launched(world: World) -> Iterator[None]:
    """The environment that torchrun gives a rank, with nothing of accelerate made before."""
    from accelerate.state import AcceleratorState, GradientState

    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "1"}
    if world.size > 1:
        place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
        variables |= {name: str(value) for name, value in place.items()}
        variables |= {"LOCAL_WORLD_SIZE": str(world.size), "MASTER_ADDR": "localhost"}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    # What else a process of tests holds, and gives back, is no business of a model's limit.
    footprint = patch.object(_limited, "Footprint", side_effect=OSError)
    with patch.dict(os.environ, variables), warnings.catch_warnings(), footprint:
        warnings.simplefilter("ignore")
        yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def llama(**changes: Any) -> Any:
    """A tiny language model with the same weights wherever it is made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 192},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def texts(rows: int = ROWS) -> list[dict[str, Tensor]]:
    """Texts whose numbers of learnt tokens differ much, so that means of means would show."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(rows):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: (number * 5) % (LENGTH - 2)] = -100
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


@dataclass
class Case:
    """A run of a Trainer.

    Attributes:
        gulliver: arguments of the plugin; None for the plain Trainer.
        args: training arguments beside those of `train`.
        model: changes of the model's configuration.
        lora: whether adapters are trained.
        whole: modules that are trained whole beside the adapters.
        given: further arguments of the Trainer, by name.
        resume: checkpoint to go on from.
    """

    gulliver: dict[str, Any] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    whole: list[str] | None = None
    resume: str | None = None
    given: dict[str, Any] = field(default_factory=dict)


def made_trainer(world: World, folder: Path, case: Case) -> Any:
    """A trainer of `case`, plain or Gulliver's."""
    import transformers

    from gulliver.integrations.trainer import Trainer

    given = dict(case.given)
    model = given.pop("model") if "model" in given else llama(**case.model)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "v_proj"]
        config = LoraConfig(r=4, target_modules=names, modules_to_save=case.whole)
        model = get_peft_model(model, config)
    args: dict[str, Any] = {
        "per_device_train_batch_size": 4 // world.size,
        "per_device_eval_batch_size": 4 // world.size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch",
        "adam_epsilon": 1e-5,
    }
    args |= case.args
    deepspeed, options = args.pop("deepspeed", None), args.pop("gulliver", None)
    arguments = transformers.TrainingArguments(str(folder), **args)
    arguments.deepspeed = deepspeed  # its package need not be here
    rows = texts()
    given = {"train_dataset": rows, "eval_dataset": rows[:7], **given}
    if case.gulliver is None:
        return transformers.Trainer(model, arguments, **given)
    arguments.gulliver = options  # type: ignore[attr-defined]
    options = {**EXACT, **case.gulliver}
    return Trainer(model, arguments, gulliver=options, **given)


def logged(trainer: Any, names: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> Any:
    """What a trainer has logged of its steps."""
    log = trainer.state.log_history
    return [{name: line[name] for name in names} for line in log if names[0] in line]


def weights(trainer: Any) -> dict[str, Tensor]:
    """The model's state dict, as every rank has it."""
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def train(world: World, folder: Path, cases: list[Case]) -> list[tuple[Any, dict[str, Tensor]]]:
    """Trains each case on every rank; logs and weights."""
    found = []
    for number, case in enumerate(cases):
        with launched(world):
            trainer = made_trainer(world, folder / str(number), case)
            trainer.train(resume_from_checkpoint=case.resume)
            found.append((logged(trainer), weights(trainer)))
    return found


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of an element; infinite where names differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)
