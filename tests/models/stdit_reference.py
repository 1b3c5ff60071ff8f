"""STDiT3 written out once more in plain functions, for comparison.

Takes a state dict and computes in its dtype: attention with explicit scores, masks dense, captions
packed into one row with a block-diagonal mask, positions from their definition. Shares no code with
the library.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


def linear(s: State, name: str, x: Tensor) -> Tensor:
    return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def normed(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6)


def scalar_code(s: State, name: str, values: Tensor) -> Tensor:
    frequencies = [math.exp(-math.log(10000) * k / 128) for k in range(128)]
    angles = values[:, None] * torch.tensor(frequencies, dtype=values.dtype)
    code = torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)
    return linear(s, f"{name}.mlp.2", silu(linear(s, f"{name}.mlp.0", code)))


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """q [n, H, d], k and v [m, H, d], allowed [n, m]; gives [n, H * d]."""
    outputs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[2])
        if allowed is not None:
            scores = torch.where(allowed, scores, torch.tensor(-math.inf, dtype=scores.dtype))
        weights = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        outputs.append(weights / weights.sum(dim=1, keepdim=True) @ v[:, head])
    return torch.cat(outputs, dim=1)


def rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """x [T, H, d], pair (2 i, 2 i + 1) of frame t turned by t * frequencies[i]."""
    out = x.clone()
    for frame in range(x.shape[0]):
        for pair in range(x.shape[2] // 2):
            angle = frame * float(frequencies[pair].detach())
            c, n = math.cos(angle), math.sin(angle)
            a, b = x[frame, :, 2 * pair], x[frame, :, 2 * pair + 1]
            out[frame, :, 2 * pair] = a * c - b * n
            out[frame, :, 2 * pair + 1] = b * c + a * n
    return out


def self_attention(s: State, name: str, x: Tensor, heads: int, temporal: bool) -> Tensor:
    """x [n, C]."""
    width = x.shape[1] // heads
    q, k, v = (part.view(len(x), heads, width) for part in linear(s, f"{name}.qkv", x).chunk(3, 1))
    if f"{name}.q_norm.weight" in s:
        q = q / torch.sqrt((q**2).mean(-1, keepdim=True) + 1e-6) * s[f"{name}.q_norm.weight"]
        k = k / torch.sqrt((k**2).mean(-1, keepdim=True) + 1e-6) * s[f"{name}.k_norm.weight"]
    if temporal:
        q, k = (rotated(part, s["rope.freqs"]) for part in (q, k))
    return linear(s, f"{name}.proj", attention(q, k, v, None))


def block(
    s: State,
    name: str,
    x: Tensor,
    y: Tensor,
    owner: Tensor,
    t: Tensor,
    t0: Tensor,
    keep: Tensor,
    heads: int,
    temporal: bool,
) -> Tensor:
    """x [B, T, S, C]; y [words, C] with the clip that owns each; t, t0 [B, 6, C]; keep [B, T]."""
    b_, t_, s_, c_ = x.shape

    def select(live: Tensor, still: Tensor) -> Tensor:
        return torch.where(keep[:, :, None, None], live, still)

    def part(source: Tensor, index: int) -> Tensor:
        return (s[f"{name}.scale_shift_table"][index] + source[:, index])[:, None, None]

    def modulated(value: Tensor, first: int) -> Tensor:
        return select(
            value * (1 + part(t, first + 1)) + part(t, first),
            value * (1 + part(t0, first + 1)) + part(t0, first),
        )

    m = modulated(normed(x), 0)
    a = torch.zeros_like(m)
    for b in range(b_):
        if temporal:
            for place in range(s_):
                a[b, :, place] = self_attention(s, f"{name}.attn", m[b, :, place], heads, True)
        else:
            for frame in range(t_):
                a[b, frame] = self_attention(s, f"{name}.attn", m[b, frame], heads, False)
    x = x + select(part(t, 2) * a, part(t0, 2) * a)
    tokens = x.reshape(b_ * t_ * s_, c_)
    rows = torch.arange(b_).repeat_interleave(t_ * s_)
    q = linear(s, f"{name}.cross_attn.q_linear", tokens).view(len(tokens), heads, -1)
    k, v = linear(s, f"{name}.cross_attn.kv_linear", y).view(len(y), 2, heads, -1).unbind(1)
    crossed = attention(q, k, v, rows[:, None] == owner[None, :])
    x = x + linear(s, f"{name}.cross_attn.proj", crossed).view(x.shape)
    m = modulated(normed(x), 3)
    m = linear(s, f"{name}.mlp.fc2", gelu(linear(s, f"{name}.mlp.fc1", m)))
    return x + select(part(t, 5) * m, part(t0, 5) * m)


def positions(rows: int, columns: int, channels: int, scale: float, dtype: torch.dtype) -> Tensor:
    base = round((rows * columns) ** 0.5)
    table = torch.zeros(rows, columns, channels, dtype=dtype)
    quarter = channels // 4
    for r in range(rows):
        for c in range(columns):
            for i in range(quarter):
                f = 10000 ** (-2 * i / (channels // 2))
                across = c / scale * base / columns * f
                down = r / scale * base / rows * f
                table[r, c, i], table[r, c, quarter + i] = math.sin(across), math.cos(across)
                table[r, c, 2 * quarter + i] = math.sin(down)
                table[r, c, 3 * quarter + i] = math.cos(down)
    return table


def stdit3(
    s: State, x: Tensor, timestep: Tensor, y: Tensor, mask: Tensor, x_mask: Tensor, fps: Tensor,
    height: float, width: float, *, heads: int, depth: int, patch: tuple[int, int, int],
    input_sq_size: int,
) -> Tensor:  # fmt: skip
    """The whole forward; `mask` [B, L] and `x_mask` [B, T] are dense."""
    b_, _, *sizes = x.shape
    grid = [-(-n // p) for n, p in zip(sizes, patch, strict=True)]
    padded = torch.zeros(
        b_, x.shape[1], *(g * p for g, p in zip(grid, patch, strict=True)), dtype=x.dtype
    )
    padded[:, :, : sizes[0], : sizes[1], : sizes[2]] = x
    channels = s["x_embedder.proj.weight"].shape[0]
    weight = s["x_embedder.proj.weight"].reshape(channels, -1)
    tokens = torch.zeros(b_, *grid, channels, dtype=x.dtype)
    for t in range(grid[0]):
        for r in range(grid[1]):
            for c in range(grid[2]):
                cut = padded[
                    :, :, t * patch[0] : (t + 1) * patch[0], r * patch[1] : (r + 1) * patch[1],
                    c * patch[2] : (c + 1) * patch[2],
                ]  # fmt: skip
                tokens[:, t, r, c] = cut.reshape(b_, -1) @ weight.T + s["x_embedder.proj.bias"]
    scale = math.sqrt(height * width) / input_sq_size
    tokens = tokens + positions(grid[1], grid[2], channels, scale, x.dtype)
    h = tokens.reshape(b_, grid[0], grid[1] * grid[2], channels)
    speed = scalar_code(s, "fps_embedder", fps)
    live = scalar_code(s, "t_embedder", timestep) + speed
    still = scalar_code(s, "t_embedder", torch.zeros_like(timestep)) + speed
    t6, t6_still = (linear(s, "t_block.1", silu(v)).view(b_, 6, channels) for v in (live, still))
    words = y[:, 0]
    words = linear(s, "y_embedder.y_proj.fc2", gelu(linear(s, "y_embedder.y_proj.fc1", words)))
    x_mask = x_mask[:, : grid[0]]  # time is patched only where no frame is given
    owner, places = mask.nonzero(as_tuple=True)
    packed = words[owner, places]
    for layer in range(depth):
        for kind in ("spatial", "temporal"):
            h = block(
                s, f"{kind}_blocks.{layer}", h, packed, owner, t6, t6_still, x_mask, heads,
                kind == "temporal",
            )  # fmt: skip
    table = s["final_layer.scale_shift_table"]

    def final(value: Tensor, source: Tensor) -> Tensor:
        shift, factor = ((table[i] + source)[:, None, None] for i in (0, 1))
        return normed(value) * (1 + factor) + shift

    out = final(h, live)
    out = torch.where(x_mask[:, :, None, None], out, final(out, still))
    out = linear(s, "final_layer.linear", out)
    outputs = out.shape[-1] // math.prod(patch)
    whole = torch.zeros(b_, outputs, *padded.shape[2:], dtype=x.dtype)
    out = out.view(b_, *grid, *patch, outputs)
    for i in range(patch[0]):
        for j in range(patch[1]):
            for k in range(patch[2]):
                part = out[:, :, :, :, i, j, k].permute(0, 4, 1, 2, 3)
                whole[:, :, i :: patch[0], j :: patch[1], k :: patch[2]] = part
    return whole[:, :, : sizes[0], : sizes[1], : sizes[2]]
