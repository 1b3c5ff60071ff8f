"""Models with a batch, and what their real steps save, compute and take: for `test_analysis.py`.

Each count is taken by something that the analysis does not use: hooks on saved tensors, torch's own
counter of FLOPs, and the storages of a real step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gulliver.memory.symbolic import stand_in_loss

Case = tuple[nn.Module, dict[str, Any]]
LAYERS = 4


class Block(nn.Module):
    """Attention by `scaled_dot_product_attention` and two linear layers.

    Args:
        width: size of a hidden state.
        again: None, or whether a checkpoint is reentrant.
        dropout: share that is dropped.
    """

    def __init__(self, width: int, again: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.again = nn.Linear(width, width), again
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.again is None:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.again)

    def run(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(rows, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return F.dropout(x + self.mlp(x), self.dropout, self.training)


class Stack(nn.Module):
    """Blocks of one kind between two linear layers."""

    def __init__(self, width: int = 32, layers: int = LAYERS, **options: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(layers))
        self.leave = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Residual(nn.Module):
    """Two convolutions, a norm that is written over, and what went in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.act = nn.BatchNorm2d(width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.two(self.act(self.one(x)))) + x)


class ConvNet(nn.Module):
    """Convolutions, five equal blocks of them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(LAYERS)))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.max_pool2d(self.blocks(self.enter(x)), 4).flatten(1))


def _x() -> dict[str, Any]:
    return {"x": torch.randn(2, 16, 8)}


def _mlp() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    return model, {"input": torch.randn(3, 8)}


def _hugging_face(kind: str, again: bool = False, **options: Any) -> Case:
    import transformers as hf

    size: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": 32, "vocab_size": 64}
    size |= {"num_attention_heads": 4, "intermediate_size": 64}
    tokens = torch.randint(1, 64, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    few = {**size, "num_key_value_heads": 2}
    if kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**few | options))
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train(), batch
    if kind == "mixtral":
        config = hf.MixtralConfig(**few, num_local_experts=4, num_experts_per_tok=2, **options)
        return hf.MixtralForCausalLM(config), batch
    if kind == "gpt2":
        config = hf.GPT2Config(n_layer=LAYERS, n_embd=32, n_head=4, vocab_size=64, n_positions=16)
        return hf.GPT2LMHeadModel(config), batch
    if kind == "vit":
        model = hf.ViTForImageClassification(hf.ViTConfig(**size, image_size=16, patch_size=8))
        return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
    config = hf.T5Config(
        num_layers=LAYERS, d_model=32, num_heads=4, d_kv=8, vocab_size=64, d_ff=64, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config), batch


def _stdit() -> Case:
    from gulliver.models import STDiT3
    from tests.video.test_video_models import SMALL, _smoke_inputs

    return STDiT3(**{**SMALL, "depth": LAYERS}).double(), _smoke_inputs(STDiT3)


def _unet() -> Case:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=4,
        layers_per_block=2,
    )
    return model, {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 6, 16),
    }


CASES: dict[str, Callable[[], Case]] = {
    "mlp": _mlp,
    "convolutions": lambda: (ConvNet(), {"x": torch.randn(2, 3, 16, 16)}),
    "attention": lambda: (Stack(), _x()),
    "attention with dropout": lambda: (Stack(dropout=0.2), _x()),
    "recomputed": lambda: (Stack(again=False), _x()),
    "recomputed, reentrant": lambda: (Stack(again=True), _x()),
    "llama": lambda: _hugging_face("llama"),
    "llama, eager": lambda: _hugging_face("llama", attn_implementation="eager"),
    "llama, recomputed": lambda: _hugging_face("llama", again=True),
    "mixtral": lambda: _hugging_face("mixtral"),
    "gpt2": lambda: _hugging_face("gpt2"),
    "t5": lambda: _hugging_face("t5"),
    "vit": lambda: _hugging_face("vit"),
    "stdit": _stdit,
    "unet": _unet,
}


def saved_bytes(model: nn.Module, batch: dict[str, Any]) -> dict[str, int]:
    """Bytes that a real forward saves, each memory once, by whose it is."""
    own = {
        t.untyped_storage().data_ptr(): "parameters"
        for t in (*model.parameters(), *model.buffers())
    }
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            own[leaf.untyped_storage().data_ptr()] = "inputs"
    found, kept = {"activations": 0, "inputs": 0, "parameters": 0}, dict[int, Any]()

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = storage  # so that no other memory gets this address
            found[own.get(storage.data_ptr(), "activations")] += storage.nbytes()
        return value.detach()

    with saved_tensors_hooks(pack, lambda value: value):
        stand_in_loss(model(**batch))
    return found


def counted_flops(model: nn.Module, batch: dict[str, Any]) -> int:
    """FLOPs of a real step by torch's counter.

    It has no formula for the attention kernels of CPUs, and is given those that it has for GPUs;
    nor for grouped products, in place of which experts are computed one by one.
    """
    aten = torch.ops.aten
    if "Mixtral" in type(model).__name__:
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        table = counter.flop_registry
        for name in ("", "_backward"):
            kernel = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{name}")
            table[kernel] = table[getattr(aten, f"_scaled_dot_product_flash_attention{name}")]
        stand_in_loss(model(**batch)).backward()
    return counter.get_total_flops()
