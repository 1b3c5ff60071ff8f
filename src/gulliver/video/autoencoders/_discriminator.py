"""A patch discriminator of videos: for each patch of space and time, a logit of being real.

Convolutions of 3 x 4 x 4 with stride 2 halve rows and columns, and frames in all layers but the
first (pix2pix's discriminator with a dim more; Isola et al. 2017). Norms are of single samples, so
that logits do not depend on what else is in a batch, nor on the number of ranks.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import functional_call

LAYERS = 3
GROUPS = 8


class PatchDiscriminator(nn.Module):
    """Maps clips [B, 3, T, H, W] to logits [B, 1, t, H / 8, W / 8]; T may be 1, H and W from 8 on.

    Args:
        width: channels of the first layer, a multiple of 8; they double with each.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for number in range(LAYERS):
            out = width * 2**number
            stride = (1 if number == 0 else 2, 2, 2)
            layers.append(nn.Conv3d(channels, out, (3, 4, 4), stride, padding=1))
            if number:
                layers.append(nn.GroupNorm(GROUPS, out))
            layers.append(nn.LeakyReLU(0.2))
            channels = out
        layers.append(nn.Conv3d(channels, 1, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, video: Tensor) -> Tensor:
        """Returns a logit for each patch."""
        return self.layers(video)

    def frozen(self, video: Tensor) -> Tensor:
        """Returns the same logits, with gradients to the clip alone."""
        constants = {name: value.detach() for name, value in self.named_parameters()}
        return functional_call(self, constants, (video,))
