"""What trains in `benchmarks.tensor`: a small Llama, cut by ours, by DTensor, or not cut at all.

Every contestant is a step on the batch of a seed, the whole batch for those that cut the model, a
share of it for DDP and FSDP2. The weights are the same at the start, so the losses must agree.

DTensor's contestants are put together as torchtitan does it: attention and MLP take their input
whole once, for all their linears, the vocabulary of the embedding and of the head are cut, and
the loss is computed from logits that stay cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._models import llama
from gulliver.comm.groups import RankGroup

COMPUTE = "compute"
DTENSOR, DTENSOR_SEQUENCE = "DTensor", "DTensor + sequence"
DDP, FSDP2 = "DDP", "FSDP2"
PEERS = (DTENSOR, DTENSOR_SEQUENCE, DDP, FSDP2)
TENSOR, SPLIT_GATHER, RING = "tensor", "tensor + split_gather", "tensor + ring"
OURS = {TENSOR: None, SPLIT_GATHER: "split_gather", RING: "ring"}
"""With the way in which the sequence is cut."""
HEAD_DIM = 64
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Sizes:
    """Of the model and of the whole batch."""

    hidden: int
    wide: int
    blocks: int
    vocabulary: int
    batch: int
    length: int

    @property
    def heads(self) -> int:
        """Query heads; there are half as many of keys and values."""
        return self.hidden // HEAD_DIM

    def model(self, parts: int = 1) -> Any:
        """A Llama of equal weights everywhere, or one as large as what one of `parts` ranks has."""
        torch.manual_seed(0)
        sizes = self.vocabulary // parts, self.hidden, self.wide // parts, self.blocks
        heads = self.heads // parts, self.heads // 2 // parts
        return llama(*sizes, *heads, self.length, head_dim=HEAD_DIM, use_cache=False).train()

    def batch_of(self, seed: int, place: int = 0, places: int = 1) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow, ``[B, L]``, or the share of one of `places` ranks."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.batch, self.length + 1
        tokens = torch.randint(self.vocabulary, shape, generator=generator).sort(dim=1)[0]
        each = self.batch // places
        tokens = tokens[place * each : (place + 1) * each]
        return tokens[:, :-1], tokens[:, 1:]


@dataclass
class Contestant:
    """A model in training.

    Attributes:
        losses: of all steps.
    """

    name: str  # in the table
    loss: Callable[[int], Tensor]  # of the batch of a seed, to be differentiated
    optimizer: torch.optim.Optimizer  # that steps
    context: Callable[[], Any] = contextlib.nullcontext  # in which forward and backward run
    steps: int = 0  # done so far
    saved: int = 0  # bytes that forward has kept for backward, as counted in the first step

    def __post_init__(self) -> None:
        self.losses: list[float] = []

    def advance(self) -> None:
        """A step on the next batch."""
        with self.context():
            loss = self.loss(self.steps)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self.steps += 1

    def count_saved(self) -> None:
        """A step that counts what forward keeps for backward."""
        inner, known = self.loss, _storages(self.optimizer)

        def counted(seed: int) -> Tensor:
            with counting(known) as storages:
                loss = inner(seed)
            self.saved = sum(storages.values())
            return loss

        self.loss = counted
        self.advance()
        self.loss = inner


@contextlib.contextmanager
def counting(known: set[int]) -> Iterator[dict[int, int]]:
    """Collects the bytes of the storages that are saved for backward, each once."""
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        local = _local(tensor)
        storage = local.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            # As long as it lives, no other tensor takes its place in memory.
            kept.append(local.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages
    kept.clear()


def build(name: str, sizes: Sizes) -> Contestant:
    """The contestant of a name, one of `COMPUTE`, `PEERS` and `OURS`."""
    if name in OURS:
        return ours(name, sizes)
    if name in (DTENSOR, DTENSOR_SEQUENCE):
        return dtensor(name, sizes)
    if name in (DDP, FSDP2):
        return data_parallel(name, sizes)
    return alone(sizes)


def alone(sizes: Sizes) -> Contestant:
    """What a rank computes in tensor parallelism, with communication left out."""
    parts = dist.get_world_size()
    model, part = sizes.model(parts), replace(sizes, vocabulary=sizes.vocabulary // parts)
    return Contestant(COMPUTE, lambda seed: _plain_loss(model, *part.batch_of(seed)), _adamw(model))


def ours(name: str, sizes: Sizes) -> Contestant:
    """Our tensor parallelism."""
    from gulliver.parallel.tensor import apply_tensor, cross_entropy, plan_tensor

    model, ranks = sizes.model(), dist.get_world_size()
    rank_group = RankGroup(tuple(range(ranks)), dist.get_rank(), dist.group.WORLD)
    apply_tensor(model, plan_tensor(model, ranks), rank_group, sequence=OURS[name])
    head = model.lm_head
    head.gather_output = False

    def loss(seed: int) -> Tensor:
        tokens, labels = sizes.batch_of(seed)
        return cross_entropy(_logits(model, tokens), labels, rank_group, head.columns).mean()

    return Contestant(name, loss, _adamw(model))


def dtensor(name: str, sizes: Sizes) -> Contestant:
    """DTensor's tensor parallelism, the sequence cut or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    model = sizes.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = dtensor_styles(sizes.blocks, sequence=name == DTENSOR_SEQUENCE)
    parallelize_module(model, mesh, styles, src_data_rank=None)
    return Contestant(
        name,
        lambda seed: _plain_loss(model, *sizes.batch_of(seed)),
        _adamw(model),
        context=loss_parallel,
    )


def dtensor_styles(blocks: int, sequence: bool) -> dict[str, Any]:
    """How each module of the Llama is cut.

    Without the sequence, attention and MLP are told that their input is whole, so that the
    gradients of all their linears are summed together and reduced once.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence else Replicate()
    norms: dict[str, Any] = {}
    block: dict[str, Any] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    for linear in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        block[linear] = ColwiseParallel()
    block |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    if sequence:
        block |= {"input_layernorm": SequenceParallel()}
        block |= {"post_attention_layernorm": SequenceParallel()}
        norms = {"model.norm": SequenceParallel()}
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    styles = {f"model.layers.{i}.{name}": s for i in range(blocks) for name, s in block.items()}
    return {"model.embed_tokens": embedding, **styles, **norms, "lm_head": head}


def data_parallel(name: str, sizes: Sizes) -> Contestant:
    """DDP or FSDP2, each block a unit, on this rank's share of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model: Any = sizes.model()
    if name == FSDP2:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    place, ranks = dist.get_rank(), dist.get_world_size()
    return Contestant(
        name, lambda seed: _plain_loss(model, *sizes.batch_of(seed, place, ranks)), _adamw(model)
    )


def _plain_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(_logits(model, tokens).flatten(0, 1), labels.flatten())


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    # Positions are given, so that none are made for the piece of a sequence that a rank holds.
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    return model(input_ids=tokens, position_ids=positions).logits


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    # A fused step takes either plain tensors or DTensors, and DTensor's models have both.
    groups: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": g} for g in groups.values()], LEARNING_RATE, fused=True)


def _storages(optimizer: torch.optim.Optimizer) -> set[int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {_local(p).untyped_storage().data_ptr() for p in parameters}


def _local(tensor: Any) -> Tensor:
    """What this rank has of a DTensor, also where it has not arrived yet."""
    with torch.no_grad():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return getattr(local, "elem", local)
