"""Small models whose operators are shared one by one, and one process beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gulliver.memory.symbolic import StorageCounter

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 8, 16, 4, 32


class Layer(nn.Module):
    """Two products and what lies between, beside what passes them by."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class RMSNorm(nn.Module):
    """As models of the Llama kind have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.promote_types(kind, torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(kind)


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.repeat = heads // groups

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.size)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
        if self.repeat > 1:
            k, v = (_repeated(t, self.repeat) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape))


def _repeated(x: Tensor, count: int) -> Tensor:
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, count, t, d).reshape(b, h * count, t, d)


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.before, self.after = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads, groups), Gated(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        return x + self.mlp(self.after(x))


class Llama(nn.Module):
    """Embedding, blocks of the Llama kind, head, and the loss of the next tokens."""

    def __init__(
        self,
        blocks: int = 2,
        width: int = WIDTH,
        heads: int = HEADS,
        groups: int = 2,
        inner: int = 24,
        words: int = WORDS,
    ) -> None:
        super().__init__()
        self.embed, self.size = nn.Embedding(words, width), width // heads
        self.blocks = nn.ModuleList(Block(width, heads, groups, inner) for _ in range(blocks))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)
        angles = 1.0 / 1000 ** (torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("angles", angles.double())

    angles: Tensor

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], dtype=self.angles.dtype)
        grid = places[:, None] * self.angles[None]
        turns = torch.cat((grid, grid), dim=-1)
        cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class GPT2Block(nn.Module):
    """Queries, keys and values of one product, as GPT-2 has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.ln_1(x)).split(c, dim=2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Tokens and positions, blocks, and a head that shares the weights of the embedding."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(GPT2Block(WIDTH, HEADS) for _ in range(blocks))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


class LocalBytes(StorageCounter):
    """Counts what this rank has of DTensors: their operations come again with the parts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def hugging_face() -> nn.Module:
    """A Llama of transformers, as it is written there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=1, use_cache=False))


def build(kind: str) -> tuple[nn.Module, Any]:
    """A model in float64 and the batch of a step."""
    torch.manual_seed(7)
    if kind == "mlp":
        layers = (Layer(WIDTH, 3 * WIDTH) for _ in range(3))
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        return model.double(), torch.randn(2 * BATCH, WIDTH, dtype=torch.float64)
    if kind == "hf_llama":
        ids = torch.randint(0, WORDS, (BATCH, LENGTH))
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
        batch = {"input_ids": ids, "labels": ids, "attention_mask": mask.repeat(BATCH, 1, 1, 1)}
        return hugging_face().double(), batch
    model = {"llama": Llama, "gpt2": GPT2}[kind]().double()
    ids = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
    labels = ids[:, 1:].clone()
    labels[0, :3] = -100
    return model, {"ids": ids[:, :-1].clone(), "labels": labels}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    out = getattr(out, "loss", out)
    return out if out.ndim == 0 else out.square().mean()


def one_process(kind: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    model, batch = build(kind)
    loss = loss_of(model, batch)
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }
