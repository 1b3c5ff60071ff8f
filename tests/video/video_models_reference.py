"""The public video models written out once more in plain functions, for comparison.

Takes state dicts and computes in their dtype: loops over clips, heads and windows, angles as
complex numbers, windows padded and their padding left out as keys. Shares no code with the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

State = dict[str, Tensor]
Turn = Callable[[Tensor], Tensor]


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


def exact(values: Sequence) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def turned(places: Sequence[Sequence[float]], frequencies: Sequence[Sequence[float]]) -> Turn:
    """Turns pairs of heads [n, H, d]: of each axis as many as it has frequencies, by its place."""
    rows = []
    for place in places:
        axes = zip(place, frequencies, strict=True)
        rows.append([value * frequency for value, axis in axes for frequency in axis])
    angles = exact(rows)
    factor = torch.polar(torch.ones_like(angles), angles)

    def turn(heads: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads.reshape(*heads.shape[:2], -1, 2).contiguous())
        return torch.view_as_real(pairs * factor[:, None]).reshape(heads.shape)

    return turn


def attended(
    s: State, name: str, x: Tensor, heads: int, turn: Turn | None = None, first: bool = False
) -> Tensor:
    """Self-attention of tokens [n, C]; `first`: rotated before the norm."""
    width = x.shape[1] // heads
    q, k, v = (
        part.reshape(len(x), heads, width) for part in linear(s, f"{name}.qkv", x).chunk(3, 1)
    )
    steps = [turn] if turn else []
    if f"{name}.q_norm.weight" in s:

        def norm(which: str) -> Turn:
            weight = s[f"{name}.{which}.weight"]
            return lambda h: h / torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-6) * weight

        norms = norm("q_norm"), norm("k_norm")
        order = [*steps, None] if first else [None, *steps]
        for step in order:
            q = (step or norms[0])(q)
            k = (step or norms[1])(k)
    else:
        for step in steps:
            q, k = step(q), step(k)
    return linear(s, f"{name}.proj", attention(q, k, v, None))


def read(s: State, name: str, x: Tensor, words: Sequence[Tensor], heads: int) -> Tensor:
    """Cross-attention of tokens [B, n, C] to each clip's words [l, C]."""
    rows = []
    for tokens, own in zip(x, words, strict=True):
        q = linear(s, f"{name}.q_linear", tokens).view(len(tokens), heads, -1)
        k, v = linear(s, f"{name}.kv_linear", own).view(len(own), 2, heads, -1).unbind(1)
        rows.append(linear(s, f"{name}.proj", attention(q, k, v, None)))
    return torch.stack(rows)


def tokens_of(s: State, name: str, x: Tensor, patch: Sequence[int]) -> Tensor:
    """Latents [B, c, T, H, W], zero-padded at the end, to tokens [B, T', H', W', C]."""
    counts = [-(-n // p) for n, p in zip(x.shape[2:], patch, strict=True)]
    padded = torch.zeros(
        *x.shape[:2], *(n * p for n, p in zip(counts, patch, strict=True))
    ).double()
    padded[:, :, : x.shape[2], : x.shape[3], : x.shape[4]] = x
    weight = s[f"{name}.proj.weight"]
    cells = torch.zeros(len(x), *counts, len(weight)).double()
    for t in range(counts[0]):
        for r in range(counts[1]):
            for c in range(counts[2]):
                box = padded[
                    :, :, t * patch[0] : (t + 1) * patch[0], r * patch[1] : (r + 1) * patch[1],
                    c * patch[2] : (c + 1) * patch[2],
                ]  # fmt: skip
                cells[:, t, r, c] = torch.einsum("bctrq,octrq->bo", box, weight)
    return cells + s[f"{name}.proj.bias"]


def latents_of(out: Tensor, patch: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Patches [B, T', H', W', pt * ph * pw * c] to [B, c, *sizes]."""
    split = out.view(*out.shape[:4], *patch, -1)
    whole = torch.einsum("bthwijkc->bctihjwk", split)
    shape = [n * p for n, p in zip(out.shape[1:4], patch, strict=True)]
    whole = whole.reshape(len(out), -1, *shape)
    return whole[:, :, : sizes[0], : sizes[1], : sizes[2]]


def words_of(s: State, y: Tensor, mask: Tensor) -> list[Tensor]:
    """Caption vectors [B, 1, L, c] to each clip's projected words, without those masked out."""
    name = "y_embedder.y_proj"
    inner = gelu(linear(s, f"{name}.fc1", y[:, 0]))
    return [row[keep] for row, keep in zip(linear(s, f"{name}.fc2", inner), mask, strict=True)]


def parts_of(s: State, name: str, table: str, t: Tensor) -> list[Tensor]:
    """Shifts, scales and gates, each [B, 1, 1, 1, C]."""
    return [
        (row + part)[:, None, None, None]
        for row, part in zip(s[f"{name}.{table}"], t.unbind(1), strict=True)
    ]


def by_frame(live: Tensor, still: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep[:, :, None, None, None], live, still)


def over_space(x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention among the tokens of each frame of [B, T, H, W, C]."""
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for t in range(x.shape[1]):
            out[b, t] = attend(x[b, t].flatten(0, 1)).view(x[b, t].shape)
    return out


def over_time(x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention among the frames at each spatial position of [B, T, H, W, C]."""
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for r in range(x.shape[2]):
            for c in range(x.shape[3]):
                out[b, :, r, c] = attend(x[b, :, r, c])
    return out


def mlp(s: State, name: str, x: Tensor) -> Tensor:
    return linear(s, f"{name}.mlp.fc2", gelu(linear(s, f"{name}.mlp.fc1", x)))


def final(s: State, h: Tensor, t: Tensor, t0: Tensor, keep: Tensor, twice: bool) -> Tensor:
    table = s["final_layer.scale_shift_table"]

    def changed(x: Tensor, source: Tensor) -> Tensor:
        shift, factor = ((table[i] + source)[:, None, None, None] for i in (0, 1))
        return normed(x) * (1 + factor) + shift

    live = changed(h, t)
    out = by_frame(live, changed(live if twice else h, t0), keep)
    return linear(s, "final_layer.linear", out)


def projected(s: State, name: str, t: Tensor, parts: int) -> Tensor:
    return linear(s, f"{name}.1", silu(t)).view(len(t), parts, -1)


def stdit(
    s: State, x: Tensor, timestep: Tensor, y: Tensor, mask: Tensor, *, heads: int, depth: int,
    patch: Sequence[int], space_scale: float, time_scale: float,
) -> Tensor:  # fmt: skip
    """The first form."""
    h = tokens_of(s, "x_embedder", x, patch)
    frames, rows, columns, channels = h.shape[1:]
    quarter = channels // 4
    for r in range(rows):
        for c in range(columns):
            code = []
            for place in (c, r):
                angles = [place / space_scale * 10000 ** (-i / quarter) for i in range(quarter)]
                code += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            h[:, :, r, c] = h[:, :, r, c] + exact(code)
    half = channels // 2
    times = torch.zeros(frames, 1, 1, channels).double()
    for f in range(frames):
        angles = [f / time_scale * 10000 ** (-i / half) for i in range(half)]
        code = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        times[f, 0, 0] = exact(code)
    t = scalar_code(s, "t_embedder", timestep)
    t6, words = projected(s, "t_block", t, 6), words_of(s, y, mask)
    for n in range(depth):
        name = f"blocks.{n}"
        shift, factor, gate, shift2, factor2, gate2 = parts_of(s, name, "scale_shift_table", t6)
        m = normed(h) * (1 + factor) + shift
        h = h + gate * over_space(m, lambda z, name=name: attended(s, f"{name}.attn", z, heads))
        seen = h + times if n == 0 else h
        h = h + gate * over_time(
            seen, lambda z, name=name: attended(s, f"{name}.attn_temp", z, heads)
        )
        h = h + read(s, f"{name}.cross_attn", h.flatten(1, 3), words, heads).view(h.shape)
        h = h + gate2 * mlp(s, name, normed(h) * (1 + factor2) + shift2)
    keep = torch.ones(len(x), frames, dtype=torch.bool)
    return latents_of(final(s, h, t, t, keep, True), patch, x.shape[2:])


def stdit2(
    s: State, x: Tensor, timestep: Tensor, y: Tensor, mask: Tensor, x_mask: Tensor,
    num_frames: Tensor, height: Tensor, width: Tensor, ar: Tensor, fps: Tensor, *, heads: int,
    depth: int, patch: Sequence[int], input_sq_size: int, quirks: bool = True,
) -> Tensor:  # fmt: skip
    """The second form; without quirks as one would build it."""
    h = tokens_of(s, "x_embedder", x, patch)
    frames, rows, columns, channels = h.shape[1:]
    codes = []
    for b in range(len(x)):
        side = math.sqrt(float(height[0 if quirks else b]) * float(width[0 if quirks else b]))
        codes.append(positions(rows, columns, channels, side / input_sq_size, x.dtype))
    h = h + torch.stack(codes)[:, None]
    size = [scalar_code(s, "csize_embedder", v) for v in (height, width)]
    size = torch.cat([*size, scalar_code(s, "ar_embedder", ar)], 1)
    length = scalar_code(s, "fl_embedder", num_frames) + scalar_code(s, "fps_embedder", fps)
    t = scalar_code(s, "t_embedder", timestep)
    t0 = scalar_code(s, "t_embedder", torch.zeros_like(timestep))
    space = [projected(s, "t_block", v + size, 6) for v in (t, t0)]
    time = [projected(s, "t_block_temp", v + length, 3) for v in (t, t0)]
    words = words_of(s, y, mask)
    turn = turned([[f] for f in range(frames)], [s["rope.freqs"].tolist()])
    for n in range(depth):
        name = f"blocks.{n}"

        def parts(table: str, both: list[Tensor], name: str = name) -> list[Tensor]:
            live, still = (parts_of(s, name, table, v) for v in both)
            return [by_frame(*pair, x_mask) for pair in zip(live, still, strict=True)]

        shift, factor, gate, shift2, factor2, gate2 = parts("scale_shift_table", space)
        shift_t, factor_t, gate_t = parts("scale_shift_table_temporal", time)

        def over(z: Tensor, name: str = name) -> Tensor:
            return attended(s, f"{name}.attn_temp", z, heads, turn, first=quirks)

        m = normed(h) * (1 + factor) + shift
        h = h + gate * over_space(m, lambda z, name=name: attended(s, f"{name}.attn", z, heads))
        h = h + gate_t * over_time(normed(h) * (1 + factor_t) + shift_t, over)
        h = h + read(s, f"{name}.cross_attn", h.flatten(1, 3), words, heads).view(h.shape)
        h = h + gate2 * mlp(s, name, normed(h) * (1 + factor2) + shift2)
    still = t0 + size if quirks else t0
    return latents_of(final(s, h, t, still, x_mask, quirks), patch, x.shape[2:])


def in_windows(
    s: State, name: str, x: Tensor, heads: int, window: Sequence[int], scale: float
) -> Tensor:
    """Attention in windows of rows, columns and frames of [B, T, H, W, C]; padding is no key."""
    sizes = [x.shape[2], x.shape[3], x.shape[1]]
    rows, columns, frames = (n if w < 0 else w for n, w in zip(sizes, window, strict=True))
    third = s["rope.freqs"].tolist()
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for r0 in range(0, sizes[0], rows):
            for c0 in range(0, sizes[1], columns):
                for t0 in range(0, sizes[2], frames):
                    cells = [
                        (t, r, c)
                        for r in range(r0, r0 + rows)
                        for c in range(c0, c0 + columns)
                        for t in range(t0, t0 + frames)
                        if r < sizes[0] and c < sizes[1] and t < sizes[2]
                    ]
                    places = [(t - t0, (r - r0) / scale, (c - c0) / scale) for t, r, c in cells]
                    inside = torch.stack([x[b, t, r, c] for t, r, c in cells])
                    found = attended(s, name, inside, heads, turned(places, [third] * 3))
                    for cell, row in zip(cells, found, strict=True):
                        out[(b, *cell)] = row
    return out


def stdit3(
    s: State, x: Tensor, timestep: Tensor, y: Tensor, mask: Tensor, x_mask: Tensor, fps: Tensor,
    height: float, width: float, cond: Tensor | None, cond_mask: Tensor | None,
    given: Sequence[int], y_null: Tensor | None, *, heads: int, depth: int, patch: Sequence[int],
    input_sq_size: int, window: Sequence[int] | None, spatial_rope: bool, quirks: bool = True,
) -> Tensor:  # fmt: skip
    """The third form; with windows, rotary codes of three axes and image conditioning."""
    h = tokens_of(s, "x_embedder", x, patch)
    if cond is not None and cond_mask is not None:
        h = h + tokens_of(s, "x_embedder_cond", cond, patch)
        h = h + tokens_of(s, "x_embedder_cond_mask", cond_mask, patch)
    frames, rows, columns, channels = h.shape[1:]
    scale = math.sqrt(height * width) / input_sq_size
    h = h + positions(rows, columns, channels, scale, x.dtype)
    speed = scalar_code(s, "fps_embedder", fps)
    t = scalar_code(s, "t_embedder", timestep) + speed
    t0 = scalar_code(s, "t_embedder", torch.zeros_like(timestep)) + speed
    both = [projected(s, "t_block", v, 6) for v in (t, t0)]
    words = words_of(s, y, mask)
    null = words
    if given:
        nothing = s["y_embedder.y_embedding"][: y.shape[2]]
        told = nothing.expand_as(y) if y_null is None else y_null
        null = words_of(s, told, mask if quirks else torch.ones_like(mask))
    third = s["rope.freqs"].tolist()
    places = [(0, r / scale, c / scale) for r in range(rows) for c in range(columns)]
    turn = turned(places, [third] * 3) if spatial_rope else None
    along = turned([[frame] for frame in range(frames)], [third]) if window is None else None
    others = [f for f in range(frames) if f not in given]
    for n in range(depth):
        for kind in ("spatial", "temporal"):
            name = f"{kind}_blocks.{n}"
            live, still = (parts_of(s, name, "scale_shift_table", v) for v in both)
            shift, factor, gate, shift2, factor2, gate2 = (
                by_frame(*pair, x_mask) for pair in zip(live, still, strict=True)
            )
            m = normed(h) * (1 + factor) + shift
            if kind == "spatial":
                a = over_space(m, lambda z, name=name: attended(s, f"{name}.attn", z, heads, turn))
            elif window is None:
                a = over_time(m, lambda z, name=name: attended(s, f"{name}.attn", z, heads, along))
            else:
                a = in_windows(s, f"{name}.attn", m, heads, window, scale)
            h = h + gate * a
            told_h = torch.zeros_like(h)
            for which, own in ((others, words), (list(given), null)):
                if which:
                    z = h[:, which]
                    crossed = read(s, f"{name}.cross_attn", z.flatten(1, 3), own, heads)
                    told_h[:, which] = crossed.view(z.shape)
            h = h + told_h
            h = h + gate2 * mlp(s, name, normed(h) * (1 + factor2) + shift2)
    return latents_of(final(s, h, t, t0, x_mask, quirks), patch, x.shape[2:])


def vector_code(s: State, name: str, x: Tensor) -> Tensor:
    return linear(s, f"{name}.out_layer", silu(linear(s, f"{name}.in_layer", x)))


def thousandths(values: Tensor) -> Tensor:
    frequencies = [math.exp(-math.log(10000) * k / 128) for k in range(128)]
    angles = 1000 * values[:, None] * exact(frequencies)
    return torch.cat([torch.cos(angles), torch.sin(angles)], 1)


def heads_of(s: State, names: Sequence[str], norm: str, x: Tensor, heads: int) -> list[Tensor]:
    """Queries, keys and values [n, H, d] of tokens [n, C]; one name: fused."""
    if len(names) == 1:
        weight, bias = s[f"{names[0]}.weight"], s.get(f"{names[0]}.bias")
        whole = x @ weight.T + (bias if bias is not None else 0)
        parts = whole[:, : 3 * x.shape[1]].chunk(3, 1)
    else:
        parts = [linear(s, name, x)[:, : x.shape[1]] for name in names]
    q, k, v = (part.reshape(len(x), heads, -1) for part in parts)

    def scaled(h: Tensor, which: str) -> Tensor:
        root = torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-6)
        return h / root * s[f"{norm}.{which}.scale"]

    return [scaled(q, "query_norm"), scaled(k, "key_norm"), v]


def mmdit(
    s: State, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, timesteps: Tensor,
    y_vec: Tensor, cond: Tensor | None, guidance: Tensor | None, *, heads: int, depth: int,
    singles: int, axes: Sequence[int], fused: bool, halves: bool,
) -> Tensor:  # fmt: skip
    """The joint model, one clip after the other."""
    vec = vector_code(s, "time_in", thousandths(timesteps)) + vector_code(s, "vector_in", y_vec)
    if guidance is not None:
        vec = vec + vector_code(s, "guidance_in", thousandths(guidance))
    outs = []
    for b in range(len(img)):
        own = silu(vec[b : b + 1])
        places = torch.cat([txt_ids[b], img_ids[b]]).tolist()
        frequencies = [[10000 ** (-2 * i / d) for i in range(d // 2)] for d in axes]
        turn_pairs = turned(places, frequencies)

        def turn(h: Tensor, turn_pairs: Turn = turn_pairs) -> Tensor:
            if not halves:
                return turn_pairs(h)
            d = h.shape[-1]
            order = [i for k in range(d // 2) for i in (k, k + d // 2)]
            back = torch.empty(d, dtype=torch.long)
            back[order] = torch.arange(d)
            return turn_pairs(h[..., order])[..., back]

        video, text = linear(s, "img_in", img[b]), linear(s, "txt_in", txt[b])
        if cond is not None:
            video = video + linear(s, "cond_in", cond[b])
        words = len(text)
        for n in range(depth):
            name, streams, held = f"double_blocks.{n}", {"txt": text, "img": video}, []
            mods = {k: linear(s, f"{name}.{k}_mod.lin", own).chunk(6, 1) for k in streams}
            for k, z in streams.items():
                seen = normed(z) * (1 + mods[k][1]) + mods[k][0]
                attn = f"{name}.{k}_attn"
                projections = ["qkv"] if fused else ["q_proj", "k_proj", "v_proj"]
                held.append(
                    heads_of(s, [f"{attn}.{p}" for p in projections], f"{attn}.norm", seen, heads)
                )
            q, k_, v = (torch.cat(pair) for pair in zip(*held, strict=True))
            mixed = attention(turn(q), turn(k_), v, None)
            for k, part in (("txt", mixed[:words]), ("img", mixed[words:])):
                z = streams[k] + mods[k][2] * linear(s, f"{name}.{k}_attn.proj", part)
                seen = normed(z) * (1 + mods[k][4]) + mods[k][3]
                inner = gelu(linear(s, f"{name}.{k}_mlp.0", seen))
                streams[k] = z + mods[k][5] * linear(s, f"{name}.{k}_mlp.2", inner)
            text, video = streams["txt"], streams["img"]
        z = torch.cat([text, video])
        width = z.shape[1]
        for n in range(singles):
            name = f"single_blocks.{n}"
            shift, factor, gate = linear(s, f"{name}.modulation.lin", own).chunk(3, 1)
            seen = normed(z) * (1 + factor) + shift
            names = ["linear1"] if fused else ["q_proj", "k_proj", "v_mlp"]
            q, k_, v = heads_of(s, [f"{name}.{p}" for p in names], f"{name}.norm", seen, heads)
            last = linear(s, f"{name}.{names[-1]}", seen)[:, (3 if fused else 1) * width :]
            mixed = attention(turn(q), turn(k_), v, None)
            z = z + gate * linear(s, f"{name}.linear2", torch.cat([mixed, gelu(last)], 1))
        shift, factor = linear(s, "final_layer.adaLN_modulation.1", own).chunk(2, 1)
        outs.append(linear(s, "final_layer.linear", normed(z[words:]) * (1 + factor) + shift))
    return torch.stack(outs)
