"""Steps in which ranks call forward and backward as often as each has work: never, or many times.

The loop of a step looks like this:

    with uneven_step(optimizer) as uneven:
        for batch in mine:
            uneven.backward(loss(batch), last=batch is mine[-1])
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from gulliver.comm import guard
from gulliver.errors import GulliverError
from gulliver.parallel.zero._unfreezing import train_unfrozen

if TYPE_CHECKING:
    from gulliver.parallel.zero._optimizer import ZeroOptimizer

UNFINISHED = (
    "a step whose ranks have unequal work is under way: call its own backward(loss) inside the "
    "loop over its micro-batches, and the optimizer's step(), zero_grad() and clipping after that "
    "loop has ended"
)
LEFT = (
    "the loop over a step was left before its end, and gradients of a part of it are there: call "
    "the optimizer's zero_grad() on all ranks and go over the steps anew, which begin with this one"
)
OUTSIDE = (
    "loss.backward() was called inside a step whose ranks have unequal work: its gradient would "
    "count without a weight; call step.backward(loss) once for each micro-batch, with all terms in "
    "that loss; optimizer.zero_grad() on all ranks begins the step anew"
)


# [Note: one reduction] Collectives over all ranks have to be issued in one order everywhere, and a
# backward of stages 2 and 3 issues some. So inside such a step nothing is sent: gradients are added
# up where they are made, whatever the stage, and travel once, with each rank's last backward. A
# rank without any sends zeros. Of stage 3 all parameters are gathered when the step begins and
# given back when it ends; so inside it takes the memory of stage 1, and between steps that of its
# own stage.
#
# Under a memory limit they are gathered into copies that may leave (`copies.py`), and what is
# sent waits until these have gone.
#
# The obvious other way, empty passes for ranks without work, keeps stage 3's memory, but makes all
# ranks wait for the longest at every micro-batch; steps are balanced as wholes.
class UnevenStep:
    """One step's backwards on this rank."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer, self.sent = optimizer, False
        self._reducer = optimizer.shards.reducer
        # Under a limit gradients are sent when the copies of parameters have left their room.
        self.waits = optimizer.shards.manager is not None

    @property
    def _scale(self) -> float:
        scaler = self._optimizer.scaler
        return 1.0 if scaler is None else scaler.scale

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backward of a loss; the last one of the step sends what was added up."""
        if self.sent:
            raise GulliverError("a backward follows the last one of a step: call it once for each")
        last, scale = last and not self.waits, self._scale
        with guard(), self._reducer.backward(last, scale), self._passes():
            (loss if scale == 1.0 else loss * scale).backward()
        self.sent = last

    @contextmanager
    def several(self) -> Iterator[float]:
        """Wraps backwards that something else calls, such as the schedule of a pipeline.

        Yields the factor of their losses. What they add up is sent when the step ends.
        """
        with guard(), self._reducer.backward(reduce=False, scale=self._scale):
            yield self._scale

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Gathers and releases parameters in a backward, where they are not whole."""
        if self._optimizer.shards.manager is None:
            yield
            return
        gatherer = self._optimizer.gatherer
        gatherer.enter_backward()
        try:
            with self._optimizer.saving():
                yield
        finally:
            gatherer.leave_backward()

    def finish(self) -> None:
        """Sends what was added up, if no backward did: zeros where there was none."""
        self._reducer.check_stray()
        if self.waits:
            return
        if not self.sent:
            self._optimizer.join_copies()
            with guard(), self._reducer.backward(reduce=True, scale=self._scale):
                pass
        self.sent = True

    def finish_waiting(self) -> None:
        """Sends what had to wait for room."""
        self.waits = False
        self.finish()


@contextmanager
def uneven_step(optimizer: ZeroOptimizer) -> Iterator[UnevenStep]:
    """Wraps all forwards and backwards of a step; every rank of the optimizer enters and leaves it.

    Args:
        optimizer: optimizer that steps afterwards.

    Raises:
        GulliverError: the optimizer does something in every backward that ranks do together.
    """
    check_uneven(optimizer)
    if optimizer.unfinished:  # what was added up before would count in this step, too
        raise GulliverError(optimizer.unfinished)
    shards = optimizer.shards
    train_unfrozen(shards)
    with optimizer.suspended(UNFINISHED, LEFT), shards.reducer.refusing(OUTSIDE):
        step = UnevenStep(optimizer)
        with shards.gatherer.whole():
            yield step
            step.finish()
        step.finish_waiting()


def check_uneven(optimizer: ZeroOptimizer) -> None:
    """Refuses what needs backwards that are alike on all ranks."""
    limited = optimizer.shards.manager is not None
    found = {
        "step_in_backward": optimizer.options.step_in_backward,
        "a memory limit that was planned for equal work: boost with "
        "DataCentricPlugin(memory_limit=...)": limited and not optimizer.shards.options.unequal,
        "the tuning of chunks (give chunk_mb a number)": optimizer.tuner is not None,
    }
    for what, there in found.items():
        if there:
            raise GulliverError(f"steps of unequal work on the ranks do not go with {what}")
