"""What a loop of accelerate calls of a boosted model and its optimizer."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from gulliver.errors import GulliverError
from gulliver.parallel import BoostedOptimizer

if TYPE_CHECKING:
    from gulliver.integrations.accelerate import Accelerator


class PreparedOptimizer(AcceleratedOptimizer):
    """A boosted optimizer that steps when gradients are complete."""

    def __init__(self, boosted: BoostedOptimizer, accelerator: Accelerator) -> None:
        super().__init__(boosted, device_placement=False)
        self.boosted, self._accelerator = boosted, accelerator

    def step(self, closure: Any = None) -> None:
        accelerator, boosted = self._accelerator, self.boosted
        if accelerator.holds_back and accelerator.sync_gradients and accelerator.num_processes > 1:
            raise GulliverError(
                "a step inside no_sync is one of this rank alone (LocalSGD), and optimizer state "
                "is shared: step outside"
            )
        before = getattr(boosted, "skipped", 0)
        super().step(closure)
        self._is_overflow = getattr(boosted, "skipped", 0) > before

    def state_dict(self) -> dict[str, Any]:
        raise GulliverError("the optimizer's state lies with all ranks: accelerator.save_state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise GulliverError("the optimizer's state lies with all ranks: accelerator.load_state")


def generate_together(model: nn.Module) -> None:
    """Lets ranks generate until the last has its text: each needs the others' parameters."""
    for module in model.modules():
        if hasattr(type(module), "generate"):
            # A method, so that a copy of the model generates by itself.
            module.generate = MethodType(_generate, module)  # type: ignore[assignment]


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})
