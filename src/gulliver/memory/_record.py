"""Records in which order, and when, a step uses its parameters.

`UseRecorder` sees modules' calls, wherever parameters are, and takes the time. `AccessRecord` is
the sequence of what a step does with chunks: uses, passes, gradients; it can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gulliver._compat import compiled_call, is_compiled
from gulliver.memory._streams import Stamp, stamp


class AccessRecord:
    """What one step did with chunks, in its order."""

    def __init__(self) -> None:
        # What was done, and to the chunk of which number.
        self.events: list[tuple[str, int]] = []
        # Whether a whole step has been seen; nothing is noted any more.
        self.complete = False

    def restart(self) -> None:
        """Forgets all: what follows is noted."""
        self.events, self.complete = [], False

    def end_step(self) -> None:
        """Ends the record once a step has been seen."""
        self.complete = self.complete or bool(self.events)

    def note(self, what: str, number: int = -1) -> None:
        """Notes an event; the same again right after it counts once."""
        if not self.complete and (not self.events or self.events[-1] != (what, number)):
            self.events.append((what, number))


class UseRecorder:
    """Notes the first use of parameters in a forward, and when their gradients come."""

    def __init__(self, model: nn.Module, names: dict[nn.Parameter, str]) -> None:
        self._device = next(iter(names)).device
        self.first_use: dict[str, Stamp] = {}
        self.ready: dict[str, Stamp] = {}
        self.marks: dict[str, Stamp] = {}
        self._hooks = [
            model.register_forward_pre_hook(self._entering(), prepend=True),
        ]
        for module in _outside_of_compiled(model):
            region = is_compiled(module) or compiled_call(module) is not None
            owned = [names[p] for p in module.parameters(recurse=region) if p in names]
            if owned:
                hook = self._noting(owned)
                self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def clear(self) -> None:
        """Forgets what was noted, but for a forward that no backward has followed yet."""
        # Many a loop calls zero_grad between forward and backward.
        awaited = [*self.marks][-1:] == ["forward"]
        self.first_use = self.first_use if awaited else {}
        self.marks = {"forward": self.marks["forward"]} if awaited else {}
        self.ready = {}

    def close(self) -> None:
        """Stops noting."""
        for hook in self._hooks:
            hook.remove()

    def gradient(self, name: str) -> None:
        """A gradient has come."""
        self.ready[name] = stamp(self._device)

    def mark(self, name: str) -> None:
        """Notes a moment of the step by name; the first of a name counts."""
        self.marks.setdefault(name, stamp(self._device))

    def order(self, names: Iterable[str]) -> list[str]:
        """Names in the order of first use; those that were not seen come last, as they came."""
        known = list(names)
        last = len(self.first_use)
        place = {name: number for number, name in enumerate(self.first_use)}
        return sorted(known, key=lambda name: place.get(name, last))

    def _entering(self) -> Any:
        @torch.compiler.disable
        def enter(*_: Any) -> None:
            self.mark("forward")

        return enter

    def _noting(self, owned: list[str]) -> Any:
        def note(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return  # a clock is not for what is traced: these come in the model's order
            now = stamp(self._device)
            for name in owned:
                self.first_use.setdefault(name, now)

        return note


def _outside_of_compiled(module: nn.Module) -> Iterable[nn.Module]:
    """Modules whose calls are seen from Python, and the compiled regions as wholes."""
    yield module
    if is_compiled(module) or compiled_call(module) is not None:
        return
    for child in module.children():
        yield from _outside_of_compiled(child)
