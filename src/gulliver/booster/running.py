"""Metrics of a boosted model, and `execute_pipeline` for models without a pipeline."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.limited import LimitedManager
from gulliver.errors import GulliverError
from gulliver.parallel.optimizer import BoostedOptimizer
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.parallel.zero.tuner import TuningStage
from gulliver.plan.plan import Plan
from gulliver.plan.results import Comparison, ComparisonRow, MemoryPlan
from gulliver.plan.tree import ChunkPlan

Criterion = Callable[[Any, Any], Tensor]


def own_loss(outputs: Any, batch: Any) -> Tensor:
    """Returns a model's own loss: its ``loss`` output, or its only output if that is a scalar."""
    if isinstance(outputs, Tensor) and not outputs.ndim:
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise GulliverError(
            "the model's outputs have no loss: pass criterion(outputs, batch), or batches with "
            "labels"
        )
    return loss


def call(model: nn.Module, batch: Any) -> Any:
    """Calls a model with a batch: a dict of keyword arguments, a tuple, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def run_whole(
    batch: Any,
    model: nn.Module,
    criterion: Criterion | None,
    optimizer: BoostedOptimizer | None,
    return_outputs: bool,
) -> dict[str, Any]:
    """Runs forward, and backward if there is an optimizer, like `Booster.execute_pipeline`."""
    with torch.set_grad_enabled(optimizer is not None):
        outputs = call(model, batch)
        wanted = optimizer is not None or criterion is not None
        loss = (criterion or own_loss)(outputs, batch) if wanted else None
        # As with a pipeline: the model's own loss, even if it was not requested.
        if loss is None and isinstance(getattr(outputs, "loss", None), Tensor):
            loss = outputs.loss
    if optimizer is not None and loss is not None:
        optimizer.backward(loss)
    return {
        "loss": None if loss is None else loss.detach(),
        "outputs": outputs if return_outputs else None,
    }


# The plan as it runs now, including tuning, and the measured time and memory of its steps.


EXTRA = "all steps so far were used to tune chunks or compare packed gradients: run more steps"
KINDS = ("parameters", "gradients", "optimizer_state")


class Running:
    """A boosted model's plan and its optimizer."""

    def __init__(self, planned: Plan, optimizer: BoostedOptimizer, model: nn.Module) -> None:
        self.planned, self.optimizer, self.model = planned, optimizer, model

    @property
    def plan(self) -> Plan:
        """The running plan, with tuned chunks."""
        plan, zero, optimizer = self.planned, self.planned.zero, self.optimizer
        # Pipeline ranks have different chunks, which are not tuned.
        if zero is None or not isinstance(optimizer, ZeroOptimizer) or optimizer.pipeline:
            return plan
        chunks = tuple(
            ChunkPlan(
                tensors=tuple(slot.name for slot in c.chunk.layout.slots),
                bytes=c.chunk.nbytes,
                padding_bytes=c.chunk.layout.padding * c.chunk.dtype.itemsize,
                dtype=str(c.chunk.dtype).removeprefix("torch."),
            )
            for c in optimizer.all_chunks
        )
        tuner = optimizer.tuner
        found = tuner.result if tuner is not None and tuner.stage is TuningStage.DONE else None
        # Sizes are those of the first rank; if tensors are sharded, other ranks' differ a little.
        if found is None and [c.tensors for c in chunks] == [c.tensors for c in zero.chunks]:
            return plan
        tuned = replace(zero, chunks=chunks, chunk_bytes=optimizer.shards.chunk_bytes)
        reasons = dict(plan.reasons)
        if found is not None:
            # The tuned value becomes a choice: the plan can be run without tuning.
            tuned = replace(tuned, tuning="off")
            reasons["zero.chunk_bytes"] = found.summary()
        memory = replace(plan.memory, **self._memory(plan.memory))
        predicted = replace(plan.predicted, bytes=memory)
        return replace(plan, zero=tuned, predicted=predicted, reasons=reasons)

    def _memory(self, planned: MemoryPlan) -> dict[str, int]:
        optimizer = self.optimizer
        assert isinstance(optimizer, ZeroOptimizer)
        assert self.planned.zero is not None
        found = optimizer.memory()
        if optimizer.stage < 3:
            # Frozen parameters are stored in addition to the chunks.
            whole = sum(chunk.bytes for chunk in self.planned.zero.chunks)
            found["parameters"] += planned.parameters - whole
        # The first rank's bytes, as in all ranks' plans: other ranks' shards may be smaller.
        found["optimizer_state"] = max(planned.optimizer_state, found["optimizer_state"])
        return found

    @property
    def moved(self) -> tuple[int, int] | None:
        """Bytes that the last step read from and wrote to slower tiers; None without a limit."""
        return None if self._manager is None else self._manager.step_moved

    @property
    def disk_moved(self) -> tuple[int, int] | None:
        """Bytes the last step moved between host memory and disk; None without a disk."""
        return None if self._manager is None else self._manager.disk_moved

    @property
    def _manager(self) -> LimitedManager | None:
        manager = getattr(getattr(self.optimizer, "shards", None), "manager", None)
        return manager if isinstance(manager, LimitedManager) else None

    def compare(self) -> Comparison:
        """Compares predicted and measured step time, and bytes sent and held by this rank."""
        predicted, rows = self.plan.predicted, list[ComparisonRow]()
        between = [b - a for a, b in itertools.pairwise(self.optimizer.taken.stepped_at)]
        if between:
            rows += self._phases(statistics.median(between))
        # torch's DDP communicates itself, and does not count bytes.
        if between and self.planned.ddp is None:
            rows.append(self._sent(predicted.sent))
        held = self._held()
        rows += [ComparisonRow(k, "bytes", getattr(predicted.bytes, k), held[k]) for k in KINDS]
        rows.append(ComparisonRow("total", "bytes", predicted.bytes.total, sum(held.values())))
        if self.moved is not None and predicted.moved is not None:
            read, written = self.moved
            rows.append(ComparisonRow("read", "bytes", predicted.moved.read, read))
            rows.append(ComparisonRow("written", "bytes", predicted.moved.written, written))
            if self.disk_moved is not None:
                read, written = self.disk_moved
                rows.append(ComparisonRow("disk read", "bytes", predicted.moved.disk_read, read))
                more = predicted.moved.disk_written
                rows.append(ComparisonRow("disk written", "bytes", more, written))
        return Comparison(tuple(rows))

    def _sent(self, predicted: int) -> ComparisonRow:
        """Bytes sent in a step, excluding chunk tuning and gradient comparisons."""
        steps, alone = self.optimizer.taken.sent()
        # Messages posted at the end of a step may count for the next one, which would distort the
        # mean of a few steps: so the most frequent number is used, if there is one.
        usual, times = Counter(steps).most_common(1)[0]
        sent = usual if 2 * times >= len(steps) else statistics.fmean(steps)
        return ComparisonRow("sent", "sent bytes", predicted, sent, "" if alone else EXTRA)

    def _phases(self, step: float) -> list[ComparisonRow]:
        """Seconds of a step, of forward and backward, and of the optimizer's step."""
        # On a GPU, the CPU runs ahead: the phases are then the times that it waits in each.
        predicted, cluster = self.plan.predicted.seconds, self.plan.predicted.cluster
        update = statistics.median(self.optimizer.taken.updated_in)
        links = f"gulliver probe measures the links of {cluster or 'the cluster'}"
        passes = f"make_plan(..., sample=batch) measures the operators, {links}"
        if predicted.exposed > predicted.compute:
            passes = f"most of it is spent waiting for messages: {links}"
        wait = "includes waiting for the last gradients" if self.plan.mesh.replicas > 1 else ""
        updates = "; ".join(filter(None, ("gulliver probe measures the memory's rate", wait)))
        return [
            ComparisonRow("step", "s", predicted.step, step),
            ComparisonRow("passes", "s", predicted.step - predicted.update, step - update, passes),
            ComparisonRow("update", "s", predicted.update, update, updates),
        ]

    def _held(self) -> dict[str, int]:
        """Peak bytes of model state on this rank."""
        optimizer = self.optimizer
        if isinstance(optimizer, ZeroOptimizer):
            inside = optimizer.names | optimizer.shards.frozen_names
            found = dict(optimizer.held_bytes.fullest)
            found["parameters"] += sum(p.nbytes for p in self.model.parameters() if p not in inside)
            return found
        state = sum(
            _own(value).nbytes
            for entry in optimizer.state.values()
            for value in entry.values()
            if isinstance(value, Tensor) and value.ndim
        )
        parameters = optimizer.parameter_bytes(self.model)
        gradients = optimizer.taken.most_gradients
        return {"parameters": parameters, "gradients": gradients, "optimizer_state": state}


def _own(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
