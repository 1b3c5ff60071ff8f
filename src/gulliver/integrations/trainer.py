"""The transformers `Trainer`, with Gulliver instead of torch's DDP.

    from gulliver.integrations.trainer import Trainer    # was: from transformers import Trainer

Loop, losses, metrics and logs come from transformers; the accelerator from
`gulliver.integrations.accelerate` boosts the model. Weights are gathered and saved in the standard
Hugging Face format; sharded state is saved in the folder ``gulliver`` of a checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.trainer_callback import TrainerCallback

from gulliver.comm.world import init_world
from gulliver.errors import GulliverError
from gulliver.integrations.accelerate import FOLDER, Accelerator
from gulliver.integrations.prepared import (
    Options,
    one_of,
    owner_of,
    plugin_of,
    refuse_arguments,
)

# Files of transformers' checkpoints.
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def _check(args: Any, model: Any) -> None:
    """Raises an error for arguments and models that use another library for parallelism."""
    refuse_arguments("TrainingArguments", vars(args))
    if args.n_gpu > 1:
        raise GulliverError(f"one process has {args.n_gpu} GPUs; start one per GPU with torchrun")
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise GulliverError(
            "the model was sharded by from_pretrained(distributed_config=...); load it unsharded"
        )


class _Forget(TrainerCallback):
    """Clears the optimizer's gradients, because the loop only clears the model's."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        others["optimizer"].zero_grad()


if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class _Boosted(_Base):
    """Mixin with the changes to a `Trainer`.

    Args:
        args: arguments of the trainer.
        gulliver: options, as for `gulliver.integrations.accelerate.Accelerator`; None for the field
            ``gulliver`` of the training arguments.
        kwargs: arguments of the trainer.

    Raises:
        GulliverError: a training argument is not supported with Gulliver, or the two options
            differ.
    """

    accelerator: Accelerator

    def __init__(self, *args: Any, gulliver: Options = None, **kwargs: Any) -> None:
        self._gulliver = gulliver
        super().__init__(*args, **kwargs)
        self.add_callback(_Forget)

    def create_accelerator_and_postprocess(self) -> None:
        _check(self.args, self.model)
        self._gulliver = one_of(self._gulliver, getattr(self.args, "gulliver", None))
        plugin: Any = plugin_of(self._gulliver)
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator.taking_over(self.accelerator, plugin)
        if plugin.max_norm and self.args.max_grad_norm:
            raise GulliverError(
                f"gulliver's max_norm={plugin.max_norm} conflicts with "
                f"TrainingArguments(max_grad_norm={self.args.max_grad_norm}); omit max_norm and "
                "use max_grad_norm"
            )
        if getattr(plugin, "step_in_backward", False):
            raise GulliverError(
                "step_in_backward=True updates parameters before the gradient norm is known, "
                "which Trainer needs in each step; omit it"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # A model on meta is filled when it is boosted, and a boosted one is already on its device.
        if not any(p.is_meta for p in model.parameters()) and owner_of(model) is None:
            super()._move_model_to_device(model, device)

    @property
    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module), "a trainer has a model"
        return self.model

    # Checkpoints.

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Saves the model in the standard format; rank 0 writes (collective)."""
        folder = Path(output_dir or self.args.output_dir or ".")
        if state_dict is None:
            folder.mkdir(parents=True, exist_ok=True)
            state_dict = self.accelerator.get_state_dict(self._module, folder=folder)
        super()._save(str(folder), state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves each rank's shard of the trained parameters and their optimizer state."""
        self.accelerator.save_boosted(Path(output_dir), frozen=False)
        if self.args.should_save:
            schedule: Any = self.lr_scheduler
            torch.save(schedule.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the state saved by `_save_optimizer_and_scheduler`, on any number of ranks."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / FOLDER).is_dir():
            self.accelerator.load_boosted(folder, frozen=False)
            schedule: Any = self.lr_scheduler
            schedule.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))
        elif (folder / OPTIMIZER).is_file():
            raise GulliverError(
                f"{folder} is a checkpoint of transformers' own Trainer, with an unsupported "
                "optimizer state; finish the run with that Trainer, or load the model and start a "
                "new run"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights; the exact values of trained ones are loaded later."""
        if not any(p.is_meta for p in (model or self._module).parameters()):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint or "")
        if (folder / FOLDER).is_dir():
            self.accelerator.load_boosted(folder, frozen=False, optimizers=False)
        else:
            super()._load_best_model()


class Trainer(_Boosted, transformers.Trainer):
    """transformers' `Trainer` with a boosted model; see `_Boosted` for ``gulliver=``."""


class Seq2SeqTrainer(_Boosted, transformers.Seq2SeqTrainer):
    """transformers' `Seq2SeqTrainer` with a boosted model."""


@dataclass
class _Arguments:
    """Adds options to training arguments, and initializes the world before accelerate."""

    gulliver: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Arguments of gulliver's plugin, such as '{\"stage\": 3}' or "
            '\'{"memory_limit": "6GiB", "disk": "/scratch:100GiB"}\'.'
        },
    )

    def __post_init__(self) -> None:
        world = init_world(device=torch.device("cpu") if self.use_cpu else None)
        if world.size > 1 and world.device.type == "cpu":
            self.use_cpu = True
        super().__post_init__()  # type: ignore[misc]


@dataclass
class TrainingArguments(_Arguments, transformers.TrainingArguments):
    """transformers' `TrainingArguments` with the field ``gulliver``."""


@dataclass
class Seq2SeqTrainingArguments(_Arguments, transformers.Seq2SeqTrainingArguments):
    """transformers' `Seq2SeqTrainingArguments` with the field ``gulliver``."""
