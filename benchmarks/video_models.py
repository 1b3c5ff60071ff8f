"""Blocks of the public video models beside those of diffusers of equal size, forward and backward.

A spatial XL/2 block on a picture beside diffusers' PixArt block: the same work. A pair of blocks
(spatial and temporal) on a clip beside two of diffusers' arranged as its Latte arranges them, which
repeats the caption for every row of attention; diffusers has neither norms of queries and keys nor
rotary codes there, so the pair runs without them and with them. A double and a single block of the
2.0 model beside diffusers' FLUX blocks. All have the same weights, and their outputs must agree but
for the pair with norms. diffusers has to be importable, such as from a folder in PYTHONPATH.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from benchmarks._harness import Report, alternate, at_most, finish
from gulliver.errors import GulliverError
from gulliver.models import STDiT3, places_of
from gulliver.models.mmdit import MMDiT
from gulliver.models.stdit import Grid, STDiTBlock

NOT_SLOWER = 1.03
"""Most of the peer's time, up to what clocks show."""
XL: dict[str, Any] = {"hidden_size": 1152, "num_heads": 16}


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    rounds: int = 7
    """Turns of each contestant."""
    threads: int = 0
    """Threads of torch; 0: as it finds them."""
    frames: int = 8
    """Frames of the STDiT clip, in tokens."""
    side: int = 16
    """Rows and columns of the STDiT clip, in tokens."""
    words: int = 120
    """Caption tokens of the STDiT clip."""
    joint: int = 512
    """Video tokens of the 2.0 blocks, beside 128 of text; 0 leaves them out."""
    keep: bool = False
    """Write the result file."""


Step = Callable[[], Tensor]


def parameters(*modules: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for module in modules for p in module.parameters())


class Pair(nn.Module):
    """A spatial and a temporal block of this library."""

    def __init__(self, qk_norm: bool, rotary: bool) -> None:
        super().__init__()
        sizes = (XL["hidden_size"], XL["num_heads"], 4.0, qk_norm)
        self.spatial, self.temporal = STDiTBlock(*sizes, False), STDiTBlock(*sizes, True)
        self.rope = STDiT3(**XL, depth=0, caption_channels=8).rope if rotary else None

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """Computes both on tokens [B, T, S, C], with t [6, B, 1, 1, C]."""
        grid = Grid(x.shape[1], x.shape[2], 1, x.shape[2])
        x = self.spatial(x, y, None, t, None, grid)
        rotation = None if self.rope is None else self.rope(x.shape[1])
        return self.temporal(x, y, None, t, rotation, grid)


class Picture(nn.Module):
    """The spatial block of a pair, of this library or of diffusers."""

    def __init__(self, pair: Any) -> None:
        super().__init__()
        self.spatial = pair.spatial

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """Computes it on one frame, [B, 1, S, C]."""
        if isinstance(self.spatial, STDiTBlock):
            return self.spatial(x, y, None, t, None, Grid(1, x.shape[2], 1, x.shape[2]))
        time_ = t[:, :, 0, 0].transpose(0, 1).flatten(1)
        return self.spatial(x[:, 0], encoder_hidden_states=y, timestep=time_)[:, None]


class PeerPair(nn.Module):
    """Two of diffusers' blocks, over space and over time."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.attention import BasicTransformerBlock  # type: ignore

        width, heads = XL["hidden_size"], XL["num_heads"]

        def block() -> nn.Module:
            return BasicTransformerBlock(
                width,
                heads,
                width // heads,
                cross_attention_dim=width,
                activation_fn="gelu-approximate",
                attention_bias=True,
                norm_type="ada_norm_single",
                norm_elementwise_affine=False,
                norm_eps=1e-6,
            )

        self.spatial, self.temporal = block(), block()

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """Computes both on tokens [B, T, S, C], with t [6, B, 1, 1, C]."""
        time_ = t[:, :, 0, 0].transpose(0, 1).flatten(1)
        for block, dim in ((self.spatial, 1), (self.temporal, 2)):
            rows = x if dim == 1 else x.transpose(1, 2)
            count = rows.shape[1]
            out = block(
                rows.flatten(0, 1),
                encoder_hidden_states=y.repeat_interleave(count, dim=0),
                timestep=time_.repeat_interleave(count, dim=0),
            )
            rows = out.view(rows.shape)
            x = rows if dim == 1 else rows.transpose(1, 2)
        return x


def copy_pair(peer: PeerPair, own: Pair) -> None:
    """Gives the peer this library's weights."""
    with torch.no_grad():
        for name in ("spatial", "temporal"):
            mine: Any = getattr(own, name)
            theirs: Any = getattr(peer, name)
            theirs.scale_shift_table.copy_(mine.scale_shift_table)
            both = ((theirs.attn1, mine.attn.qkv, 3), (theirs.attn2, mine.cross_attn.kv_linear, 2))
            for attn, packed, parts in both:
                targets = (attn.to_q, attn.to_k, attn.to_v)[3 - parts :]
                for kind in ("weight", "bias"):
                    for target, part in zip(
                        targets, getattr(packed, kind).chunk(parts), strict=True
                    ):
                        getattr(target, kind).copy_(part)
            theirs.attn2.to_q.load_state_dict(mine.cross_attn.q_linear.state_dict())
            theirs.attn1.to_out[0].load_state_dict(mine.attn.proj.state_dict())
            theirs.attn2.to_out[0].load_state_dict(mine.cross_attn.proj.state_dict())
            theirs.ff.net[0].proj.load_state_dict(mine.mlp.fc1.state_dict())
            theirs.ff.net[2].load_state_dict(mine.mlp.fc2.state_dict())


def step_of(module: nn.Module, *inputs: Any) -> Step:
    """A forward and backward, with gradients of inputs too."""

    def run() -> Tensor:
        module.zero_grad()
        out = module(*inputs)
        loss = sum(o.square().mean() for o in (out if isinstance(out, tuple) else (out,)))
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.detach()

    return run


def drawn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """Random tokens that want a gradient."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device).requires_grad_()


def pair_steps(options: Options, device: torch.device) -> dict[str, Step]:
    """Steps of the XL/2 pair: as 1.2 has it, plain, and diffusers'."""
    torch.manual_seed(0)
    shape = (1, options.frames, options.side**2, XL["hidden_size"])
    x = drawn(*shape, device=device)
    y = drawn(1, options.words, XL["hidden_size"], device=device, seed=1)
    t = drawn(6, 1, 1, 1, XL["hidden_size"], device=device, seed=2)
    full, plain, peer = Pair(True, True), Pair(False, False), PeerPair()
    copy_pair(peer, plain)
    modules = {"full": full.to(device), "plain": plain.to(device), "peer": peer.to(device)}
    assert parameters(plain) == parameters(peer), (parameters(plain), parameters(peer))
    with torch.no_grad():
        torch.testing.assert_close(plain(x, y, t), peer(x, y, t), rtol=1e-3, atol=1e-3)
    return {name: step_of(module, x, y, t) for name, module in modules.items()}


def picture_steps(options: Options, device: torch.device) -> dict[str, Step]:
    """Steps of one spatial block, and diffusers' of the same weights."""
    torch.manual_seed(0)
    own, peer = Pair(False, False), PeerPair()
    copy_pair(peer, own)
    modules = {"picture": Picture(own).to(device), "peer": Picture(peer).to(device)}
    x = drawn(1, 1, options.frames * options.side**2, XL["hidden_size"], device=device)
    y = drawn(1, options.words, XL["hidden_size"], device=device, seed=1)
    t = drawn(6, 1, 1, 1, XL["hidden_size"], device=device, seed=2)
    with torch.no_grad():
        found = [module(x, y, t) for module in modules.values()]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    return {name: step_of(module, x, y, t) for name, module in modules.items()}


class Joint(nn.Module):
    """A double and a single block of the 2.0 model."""

    def __init__(self) -> None:
        super().__init__()
        model = MMDiT(depth=1, depth_single_blocks=1, fused_qkv=False, context_in_dim=8)
        self.two, self.one = model.double_blocks[0], model.single_blocks[0]

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, turns: Any, _: Any) -> Tensor:
        """Computes both."""
        img, txt = self.two(img, txt, vec, turns)
        return self.one(torch.cat([txt, img], dim=1), vec, turns)


class PeerJoint(nn.Module):
    """The same of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_flux import (  # type: ignore
            FluxSingleTransformerBlock,
            FluxTransformerBlock,
        )

        self.two = FluxTransformerBlock(3072, 24, 128)
        self.one = FluxSingleTransformerBlock(3072, 24, 128)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, _: Any, turns: Any) -> Tensor:
        """Computes both."""
        txt, img = self.two(img, txt, vec, turns)
        found = self.one(img, txt, vec, turns)
        return torch.cat(found, dim=1) if isinstance(found, tuple) else found


def copy_joint(peer: PeerJoint, own: Joint) -> None:
    """Gives the peer this library's weights, by diffusers' names."""
    mine: Any = own.two
    theirs: Any = peer.two
    pairs = [
        (theirs.norm1.linear, mine.img_mod.lin),
        (theirs.norm1_context.linear, mine.txt_mod.lin),
        (theirs.attn.to_q, mine.img_attn.q_proj),
        (theirs.attn.to_k, mine.img_attn.k_proj),
        (theirs.attn.to_v, mine.img_attn.v_proj),
        (theirs.attn.add_q_proj, mine.txt_attn.q_proj),
        (theirs.attn.add_k_proj, mine.txt_attn.k_proj),
        (theirs.attn.add_v_proj, mine.txt_attn.v_proj),
        (theirs.attn.to_out[0], mine.img_attn.proj),
        (theirs.attn.to_add_out, mine.txt_attn.proj),
        (theirs.ff.net[0].proj, mine.img_mlp[0]),
        (theirs.ff.net[2], mine.img_mlp[2]),
        (theirs.ff_context.net[0].proj, mine.txt_mlp[0]),
        (theirs.ff_context.net[2], mine.txt_mlp[2]),
        (peer.one.norm.linear, own.one.get_submodule("modulation.lin")),
        (peer.one.attn.to_q, own.one.q_proj),
        (peer.one.attn.to_k, own.one.k_proj),
        (peer.one.proj_out, own.one.linear2),
    ]
    for target, source in pairs:
        target.load_state_dict(source.state_dict())
    width = 3072
    with torch.no_grad():
        for kind in ("weight", "bias"):
            value, inner = getattr(own.one.v_mlp, kind).split([width, 4 * width])
            getattr(peer.one.attn.to_v, kind).copy_(value)
            getattr(peer.one.proj_mlp, kind).copy_(inner)


def joint_steps(options: Options, device: torch.device) -> dict[str, Step]:
    """Steps of the 2.0 blocks and of diffusers' FLUX blocks."""
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed  # type: ignore

    torch.manual_seed(0)
    own, peer = Joint(), PeerJoint()
    copy_joint(peer, own)
    own, peer = own.to(device), peer.to(device)
    rows = max(1, options.joint // 32)
    places = places_of(1, (2, rows, 16), 1)[0]
    ids = torch.cat([torch.zeros(128, 3, dtype=places.dtype), places]).to(device)
    whole = MMDiT(depth=0, depth_single_blocks=0, context_in_dim=8)
    turns = whole._rotation(ids[None], torch.float32)
    theirs = FluxPosEmbed(10_000, [16, 56, 56])(ids.float())
    img, txt = (drawn(1, n, 3072, device=device, seed=s) for n, s in ((len(places), 3), (128, 4)))
    vec = drawn(1, 3072, device=device, seed=5)
    inputs = (img, txt, vec, turns, theirs)
    with torch.no_grad():
        torch.testing.assert_close(own(*inputs), peer(*inputs), rtol=1e-3, atol=1e-3)
    return {"own": step_of(own, *inputs), "peer": step_of(peer, *inputs)}


def timed(run: Step, device: torch.device) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Measures both kinds of blocks."""
    options = tyro.cli(Options, description=__doc__)
    try:
        import diffusers  # type: ignore
    except ImportError:
        raise GulliverError(
            "diffusers cannot be imported: install it beside, and name its folder in PYTHONPATH"
        ) from None
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report(
        "video_models",
        f"blocks of public video models, forward + backward, float32, {device.type}",
        ("", "ms", "quartiles", "diffusers, ms", "ratio"),
    )
    groups = {"picture": picture_steps(options, device), "pair": pair_steps(options, device)}
    names = {
        "picture": "XL/2 block on a picture, equal work",
        "full": "XL/2 pair with qk-norm and rotary codes",
        "plain": "XL/2 pair",
        "own": "2.0 double and single block",
    }
    if options.joint:
        groups["joint"] = joint_steps(options, device)
    for steps in groups.values():
        times = alternate(
            {name: lambda run=run: timed(run, device) for name, run in steps.items()},
            options.rounds,
        )
        peer = times["peer"]
        for key in (key for key in times if key != "peer"):
            own, name = times[key], names[key]
            ratio = own.median / peer.median
            quartiles = f"{1e3 * own.low:.0f} to {1e3 * own.high:.0f}"
            row = (f"{1e3 * own.median:.0f}", quartiles, f"{1e3 * peer.median:.0f}", f"{ratio:.2f}")
            report.rows.append((name, *row))
            report.figures[key] = {"step_s": own.median, "diffusers_s": peer.median}
            report.bars.append(at_most(f"{name}: to diffusers", ratio, NOT_SLOWER))
    shape = f"{options.frames} x {options.side} x {options.side}"
    report.notes = [
        f"{torch.get_num_threads()} threads; medians of {options.rounds} turns; diffusers "
        f"{diffusers.__version__}; one clip of {shape} tokens, {options.words} of caption; the "
        f"joint blocks {options.joint} of video and 128 of text. Outputs agree to 1e-3."
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
