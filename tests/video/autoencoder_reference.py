"""The public autoencoders once more, as functions of their state dicts: an oracle for the modules.

Everything is written out from the description of the published networks: convolutions in time as
sums over taps, norms by mean and variance, attention by its matrix of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
GROUPS = 2
"""Groups of all norms of the small networks here."""


def group_norm(w: State, name: str, x: Tensor, eps: float) -> Tensor:
    """Statistics of all positions of a group of channels, of one sample."""
    grouped = x.reshape(len(x), GROUPS, -1)
    mean = grouped.mean(2, keepdim=True)
    variance = (grouped - mean).square().mean(2, keepdim=True)
    normal = ((grouped - mean) / (variance + eps).sqrt()).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    return normal * w[f"{name}.weight"].view(shape) + w[f"{name}.bias"].view(shape)


def swish(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def conv2d(w: State, name: str, x: Tensor, stride: int = 1, pad: int = 1) -> Tensor:
    return F.conv2d(x, w[f"{name}.weight"], w.get(f"{name}.bias"), stride, pad)


def causal(
    w: State, name: str, x: Tensor, step: int = 1, space: int = 1, before: int | None = None
) -> Tensor:
    """A causal convolution as a sum over its taps in time, of convolutions of single frames."""
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    taps, around = weight.shape[2], weight.shape[3] // 2
    before = taps - 1 if before is None else before
    padded = torch.cat([torch.zeros_like(x[:, :, :1])] * before + [x], 2) if before else x
    made = []
    for start in range(0, padded.shape[2] - taps + 1, step):
        frame = sum(
            F.conv2d(padded[:, :, start + tap], weight[:, :, tap], None, space, around)
            for tap in range(taps)
        )
        made.append(frame)
    out = torch.stack(made, 2)
    return out if bias is None else out + bias.view(1, -1, 1, 1, 1)


def attended(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Attention of one head; tokens ``[B, N, C]``."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


# Pictures: diffusers' AutoencoderKL.


def _picture_residual(w: State, name: str, x: Tensor) -> Tensor:
    h = conv2d(w, f"{name}.conv1", swish(group_norm(w, f"{name}.norm1", x, 1e-6)))
    h = conv2d(w, f"{name}.conv2", swish(group_norm(w, f"{name}.norm2", h, 1e-6)))
    if f"{name}.conv_shortcut.weight" in w:
        x = conv2d(w, f"{name}.conv_shortcut", x, pad=0)
    return x + h


def _picture_middle(w: State, name: str, x: Tensor) -> Tensor:
    x = _picture_residual(w, f"{name}.resnets.0", x)
    at = f"{name}.attentions.0"
    tokens = group_norm(w, f"{at}.group_norm", x, 1e-6).flatten(2).mT
    q, k, v = (tokens @ w[f"{at}.to_{n}.weight"].mT + w[f"{at}.to_{n}.bias"] for n in "qkv")
    made = attended(q, k, v) @ w[f"{at}.to_out.0.weight"].mT + w[f"{at}.to_out.0.bias"]
    return _picture_residual(w, f"{name}.resnets.1", x + made.mT.reshape(x.shape))


def _numbered(w: State, name: str) -> list[str]:
    count = 1 + max((int(n[len(name) + 1 :].split(".")[0]) for n in w if n.startswith(f"{name}.")),
                    default=-1)  # fmt: skip
    return [f"{name}.{n}" for n in range(count)]


def _picture_encoder(w: State, x: Tensor) -> Tensor:
    x = conv2d(w, "encoder.conv_in", x)
    for level in _numbered(w, "encoder.down_blocks"):
        for block in _numbered(w, f"{level}.resnets"):
            x = _picture_residual(w, block, x)
        if f"{level}.downsamplers.0.conv.weight" in w:
            x = conv2d(w, f"{level}.downsamplers.0.conv", F.pad(x, (0, 1, 0, 1)), 2, 0)
    x = _picture_middle(w, "encoder.mid_block", x)
    x = conv2d(w, "encoder.conv_out", swish(group_norm(w, "encoder.conv_norm_out", x, 1e-6)))
    return conv2d(w, "quant_conv", x, pad=0) if "quant_conv.weight" in w else x


def _picture_decoder(w: State, x: Tensor) -> Tensor:
    if "post_quant_conv.weight" in w:
        x = conv2d(w, "post_quant_conv", x, pad=0)
    x = _picture_middle(w, "decoder.mid_block", conv2d(w, "decoder.conv_in", x))
    for level in _numbered(w, "decoder.up_blocks"):
        for block in _numbered(w, f"{level}.resnets"):
            x = _picture_residual(w, block, x)
        if f"{level}.upsamplers.0.conv.weight" in w:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = conv2d(w, f"{level}.upsamplers.0.conv", x)
    return conv2d(w, "decoder.conv_out", swish(group_norm(w, "decoder.conv_norm_out", x, 1e-6)))


def each_frame(call: Callable[[State, Tensor], Tensor], w: State, clip: Tensor) -> Tensor:
    return torch.stack([call(w, frame) for frame in clip.unbind(2)], 2)


def frames_encoded(w: State, clip: Tensor, scale: float = 0.18215, shift: float = 0.0) -> Tensor:
    moments = each_frame(_picture_encoder, w, clip)
    return (moments[:, : moments.shape[1] // 2] - shift) * scale


def frames_decoded(w: State, z: Tensor, scale: float = 0.18215, shift: float = 0.0) -> Tensor:
    return each_frame(_picture_decoder, w, z / scale + shift)


# Open-Sora 1.2.


def _under(w: State, prefix: str) -> State:
    return {name[len(prefix) :]: value for name, value in w.items() if name.startswith(prefix)}


def _temporal_residual(w: State, name: str, x: Tensor) -> Tensor:
    h = causal(w, f"{name}.conv1.conv", swish(group_norm(w, f"{name}.norm1", x, 1e-5)))
    h = causal(w, f"{name}.conv2.conv", swish(group_norm(w, f"{name}.norm2", h, 1e-5)))
    if f"{name}.conv3.conv.weight" in w:
        x = causal(w, f"{name}.conv3.conv", x)
    return x + h


def _temporal_encoder(w: State, x: Tensor, padding: int) -> Tensor:
    x = torch.cat([torch.zeros_like(x[:, :, :1])] * padding + [x], 2)
    x = causal(w, "encoder.conv_in.conv", x)
    for number, level in enumerate(_numbered(w, "encoder.block_res_blocks")):
        for block in _numbered(w, level):
            x = _temporal_residual(w, block, x)
        halved = f"encoder.conv_blocks.{number}.conv"
        if f"{halved}.weight" in w:
            x = causal(w, halved, x, step=2, before=1)
    for block in _numbered(w, "encoder.res_blocks"):
        x = _temporal_residual(w, block, x)
    x = causal(w, "encoder.conv2.conv", swish(group_norm(w, "encoder.norm1", x, 1e-5)))
    return causal(w, "quant_conv.conv", x)


def _temporal_decoder(w: State, z: Tensor, padding: int) -> Tensor:
    x = causal(w, "decoder.conv1.conv", causal(w, "post_quant_conv.conv", z))
    for block in _numbered(w, "decoder.res_blocks"):
        x = _temporal_residual(w, block, x)
    levels = _numbered(w, "decoder.block_res_blocks")
    for number, level in reversed(list(enumerate(levels))):
        for block in _numbered(w, level):
            x = _temporal_residual(w, block, x)
        doubled = f"decoder.conv_blocks.{number - 1}.conv"
        if f"{doubled}.weight" in w:
            made = causal(w, doubled, x)
            # Channels 2 c and 2 c + 1 are the earlier and the later frame of channel c.
            x = torch.stack([made[:, 0::2], made[:, 1::2]], 3).flatten(2, 3)
    x = causal(w, "decoder.conv_out.conv", swish(group_norm(w, "decoder.norm1", x, 1e-5)))
    return x[:, :, padding:]


def pipeline_encoded(w: State, clip: Tensor, micro: int | None = 17) -> Tensor:
    features = frames_encoded(_under(w, "spatial_vae.module."), clip)
    time, found = _under(w, "temporal_vae."), []
    for part in features.split(micro or features.shape[2], 2):
        moments = _temporal_encoder(time, part, -part.shape[2] % 4)
        found.append(moments[:, : moments.shape[1] // 2])
    return (torch.cat(found, 2) - w["shift"]) / w["scale"]


def pipeline_decoded(w: State, z: Tensor, frames: int, micro: int | None = 17) -> Tensor:
    z, time, found = z * w["scale"] + w["shift"], _under(w, "temporal_vae."), []
    for part in z.split(-(-micro // 4) if micro else z.shape[2], 2):
        held = min(micro or frames, frames)
        found.append(_temporal_decoder(time, part, -held % 4))
        frames -= held
    return frames_decoded(_under(w, "spatial_vae.module."), torch.cat(found, 2))


# Open-Sora 1.3.


def _causal_residual(w: State, name: str, x: Tensor) -> Tensor:
    h = causal(w, f"{name}.conv1.conv", swish(group_norm(w, f"{name}.norm1", x, 1e-6)))
    h = causal(w, f"{name}.conv2.conv", swish(group_norm(w, f"{name}.norm2", h, 1e-6)))
    if f"{name}.nin_shortcut.conv.weight" in w:
        x = causal(w, f"{name}.nin_shortcut.conv", x)
    return x + h


def _causal_middle(w: State, name: str, x: Tensor, raster: bool) -> Tensor:
    x = _causal_residual(w, f"{name}.block_1", x)
    h = group_norm(w, f"{name}.attn_1.norm", x, 1e-6)
    q, k, v = (causal(w, f"{name}.attn_1.{n}.conv", h).flatten(2).mT for n in "qkv")
    place = torch.arange(q.shape[1])
    when = place if raster else place // (x.shape[3] * x.shape[4])
    made = attended(q, k, v, when[None, :] > when[:, None]).mT.reshape(x.shape)
    x = x + causal(w, f"{name}.attn_1.proj_out.conv", made)
    return _causal_residual(w, f"{name}.block_2", x)


def _causal_encoder(w: State, x: Tensor, raster: bool) -> Tensor:
    x = causal(w, "encoder.conv_in.conv", x)
    for level in _numbered(w, "encoder.down"):
        for block in _numbered(w, f"{level}.block"):
            x = _causal_residual(w, block, x)
        down = f"{level}.downsample.conv"
        if f"{down}.conv.weight" in w:
            x = causal(w, f"{down}.conv", x, step=2, space=2)
        elif f"{down}.weight" in w:
            frames = (F.pad(frame, (0, 1, 0, 1)) for frame in x.unbind(2))
            x = torch.stack([conv2d(w, down, frame, 2, 0) for frame in frames], 2)
    x = _causal_middle(w, "encoder.mid", x, raster)
    return causal(w, "encoder.conv_out.conv", swish(group_norm(w, "encoder.norm_out", x, 1e-6)))


def _causal_decoder(w: State, z: Tensor, raster: bool) -> Tensor:
    x = _causal_middle(w, "decoder.mid", causal(w, "decoder.conv_in.conv", z), raster)
    for level in reversed(_numbered(w, "decoder.up")):
        for block in _numbered(w, f"{level}.block"):
            x = _causal_residual(w, block, x)
        up = f"{level}.upsample.conv"
        if f"{up}3d.conv1.conv.weight" in w:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3).repeat_interleave(2, 4)
            h = swish(group_norm(w, f"{up}3d.norm1", causal(w, f"{up}3d.conv1.conv", x), 1e-5))
            h = group_norm(w, f"{up}3d.norm2", causal(w, f"{up}3d.conv2.conv", h), 1e-5)
            x = swish(h + x) + x
        elif f"{up}.weight" in w:
            x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
            x = torch.stack([conv2d(w, up, frame) for frame in x.unbind(2)], 2)
    x = causal(w, "decoder.conv_out", swish(group_norm(w, "decoder.norm_out", x, 1e-6)))
    return x[:, :, 3:]


def causal_encoded(w: State, clip: Tensor, raster: bool = True, micro: int | None = 17) -> Tensor:
    """Latents without normalising."""
    starts = range(0, max(1, clip.shape[2] - 1), micro - 1) if micro else [0]
    moments = [
        _causal_encoder(w, clip[:, :, at : at + micro if micro else None], raster) for at in starts
    ]
    return torch.cat([part[:, : part.shape[1] // 2] for part in moments], 2)


def causal_decoded(w: State, z: Tensor, raster: bool = True, micro: int | None = 17) -> Tensor:
    found: list[Tensor] = []
    for part in z.split(5 if micro else z.shape[2], 2):
        made = _causal_decoder(w, part, raster)
        if found:
            shared = (found[-1][:, :, -1:] + made[:, :, :1]) / 2
            found[-1] = torch.cat([found[-1][:, :, :-1], shared], 2)
            made = made[:, :, 1:]
        found.append(made)
    return torch.cat(found, 2)
