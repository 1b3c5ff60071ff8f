"""Compiled blocks of a model that is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gulliver._compat import compiled_call, is_compiled
from gulliver.booster.hybrid._inside import STAYS
from gulliver.errors import GulliverError
from gulliver.families import SHARED_BY_TENSOR
from gulliver.parallel.pipeline import style_of
from gulliver.parallel.tensor import TensorPlan

BLOCKS = "compile its blocks, one by one: block.compile(...)"


# [Note: compiled first, cut later] ``block.compile()`` puts a compiled call in the place of the
# block's own and traces nothing yet. A cut replaces what is inside of a block and keeps the block,
# so what is traced, when it first runs, is the block as this rank has it. Column and row layers,
# whose messages no compiler can move, run as they are, between what is compiled. A whole model
# cannot be compiled so: a stage leaves its forward by an exception.
def check_compiled(
    model: nn.Module, plan: TensorPlan | None, lists: Iterable[str], style: str, mode: str | None
) -> None:
    """Refuses compiled modules that cannot be cut."""
    for path, module in model.named_modules():
        if is_compiled(module):
            name = path.removesuffix("._orig_mod") or "the model"
            raise GulliverError(f"{name} is what torch.compile(module) returned: {BLOCKS}")
        if compiled_call(module) is None:
            continue
        if not path or any(f"{inside}.".startswith(f"{path}.") for inside in lists):
            raise GulliverError(f"{path or 'the model'} is compiled with all its blocks: {BLOCKS}")
        placed = plan.modules.get(path) if plan is not None else None
        if placed is not None and placed.how.kind not in STAYS:
            raise GulliverError(f"{path} is compiled and is replaced where it is cut: {BLOCKS}")
        if mode in SHARED_BY_TENSOR:
            raise GulliverError(
                f"{path} is compiled, and sequence_parallelism_mode={mode!r} hands it tensors that "
                "are still under way: leave one of the two out"
            )
        if style_of(style).splits:
            raise GulliverError(
                f"{path} is compiled, so its backward is one piece, and pp_style={style!r} needs "
                "it in two: take pp_style='1f1b'"
            )


def refuse_whole(model: nn.Module) -> None:
    """Refuses to run a cut model that was compiled as a whole after boost."""
    refuse: Callable[[bool], None] = torch.compiler.disable(_refuse)  # pyright: ignore

    def before(*_: Any) -> None:
        # A constant in what is traced.
        refuse(torch.compiler.is_compiling())

    model.register_forward_pre_hook(before, prepend=True)


def _refuse(traced: bool) -> None:
    if traced:
        raise GulliverError(f"the model is cut, and was compiled as a whole: {BLOCKS}")
