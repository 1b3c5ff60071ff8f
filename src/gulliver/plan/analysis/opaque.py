"""Modules that cannot be followed, and the placeholders that replace them.

A module that looks at its data (``.item()``, numpy, a number of rows that depends on values) fails
with fake tensors. The innermost such module is replaced, with all others of its class: it is costed
by its parameters and inputs, and returns its input. If that does not fit what comes next, the
module around both is replaced.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gulliver._compat import needs_data
from gulliver.errors import GulliverError
from gulliver.hardware.costs import BACKWARD_OF_LINEAR, linear_flops
from gulliver.plan.analysis.recorder import Recorder
from gulliver.plan.analysis.records import BACKWARD, FORWARD, OPAQUE, Opaque, Operator
from gulliver.plan.analysis.repeats import Given, Template, calls_through, replay

OURS = Path(__file__).parents[2]


def widened(
    model: nn.Module, known: Mapping[str, Opaque], error: Exception, running: str
) -> dict[str, Opaque]:
    """Adds the module that made a step fail to those that are not followed."""
    where, line = _where(error), str(error).strip().split("\n")[0]
    if needs_data(error):
        path = running
    elif known:
        # The placeholder returned something that the next module cannot take.
        path = _around(running, known)
    else:
        name = f"module {running!r}" if running else "the model"
        raise GulliverError(
            f"{name} cannot run on this batch ({where}: {type(error).__name__}: {line}): give a "
            "batch and a loss that the model runs with"
        ) from error
    kind = type(model.get_submodule(path))
    alike = [p for p, m in model.named_modules() if type(m) is kind] if path else [""]
    found = {p: one for p, one in known.items() if not any(_inside(p, a) for a in alike)}
    reason = f"{type(error).__name__}: {line}"
    return found | {p: Opaque(p, kind.__name__, where, reason) for p in alike}


def _around(running: str, known: Mapping[str, Opaque]) -> str:
    """The innermost module that contains the running module and one that is not followed."""
    parts = running.split(".") if running else []
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        if path not in known and any(_inside(p, path) for p in known):
            return path
    return ""


def _inside(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(f"{around}.")


def _where(error: Exception) -> str:
    """File and line of the model's code that raised."""
    libraries = Path(torch.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if libraries not in Path(f.filename).parents
        and OURS / "plan" not in Path(f.filename).parents
        and OURS / "memory" not in Path(f.filename).parents
    ]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def left_out(
    model: nn.Module, recorder: Recorder, opaque: Mapping[str, Opaque]
) -> AbstractContextManager[None]:
    """Context in which modules are replaced by placeholders."""
    paths = {model.get_submodule(path): path for path in opaque}

    def call(module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        path = paths[module]
        outer, recorder.path = recorder.path, path
        try:
            return _stand_in(recorder, module, path, (args, kwargs))
        finally:
            recorder.path = outer

    return calls_through(call, list(paths))


def _stand_in(recorder: Recorder, module: nn.Module, path: str, given: Any) -> Any:
    """Placeholder for the call of a module."""
    leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    tensors = list({id(t): t for t in leaves}.values())
    first = next((t for t in tensors if t.is_floating_point()), None)
    if first is None:
        # Then the module around it is replaced.
        raise ValueError(f"what {path} gives is not known")
    forward, backward = operators_of(module, path, tensors, first)
    forward.inputs = recorder.values(tensors)
    recorder.stand_in(forward)
    trained = [p for p in module.parameters() if p.requires_grad]
    grads = torch.is_grad_enabled() and bool(trained or any(t.requires_grad for t in tensors))
    like = replace(Given.of(first, len(recorder.operators) - 1), requires_grad=grads)
    kept = [n for n, t in enumerate(tensors) if t.is_floating_point()] if grads else []
    template = Template(
        path,
        pytree.tree_structure(0),
        [like],
        kept,
        gradients=sum(p.nbytes for p in trained),
        on_backward=lambda: recorder.stand_in(backward),
    )
    output = replay(recorder, template, tensors)
    forward.outputs = recorder.values([output])
    backward.forward = len(recorder.operators) - 1
    return output


def operators_of(
    module: nn.Module, path: str, tensors: list[Tensor], first: Tensor
) -> tuple[Operator, Operator]:
    """Forward and backward operators of a module of which only parameters and input are known."""
    parameters = list(module.parameters())
    weights = sum(p.numel() for p in parameters if p.ndim > 1)
    rows = first.numel() // max(1, first.shape[-1] if first.ndim else 1)
    read = sum(t.nbytes for t in (*tensors, *parameters))
    flops = int(linear_flops(weights, rows))
    forward = Operator(OPAQUE, FORWARD, path, (), (), flops=flops, read=read, written=first.nbytes)
    backward = Operator(
        *(OPAQUE, BACKWARD, path, (), ()),
        flops=int(BACKWARD_OF_LINEAR * flops),
        read=read + first.nbytes,
        written=sum(t.nbytes for t in (*tensors, *parameters)),
    )
    return forward, backward
