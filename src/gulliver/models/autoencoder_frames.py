"""Picture autoencoders on every frame of a clip: those of Stable Diffusion, SDXL and FLUX.

The names of the state dict are those of diffusers' `AutoencoderKL`, which is not needed for it.
Open-Sora 1.0 and 1.1 encode clips with it, 1.2 before its autoencoder in time.

Shapes: videos ``[B, 3, T, H, W]`` in [-1, 1]; latents ``[B, C, T, H / 8, W / 8]``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.models._autoencoders import check_latents, check_length, check_space
from gulliver.models._frames import FrameDecoder, FrameEncoder, OnFrames


class FrameAutoencoder(nn.Module):
    """Encodes every frame by itself.

    Args:
        latent_channels: channels of the latents.
        block_out_channels: channels of each resolution, the finest first.
        layers_per_block: residual blocks of each resolution of the encoder; the decoder has one
            more.
        norm_num_groups: groups of all norms.
        in_channels: channels of pictures.
        out_channels: channels of decoded pictures.
        use_quant_conv: whether a convolution follows the encoder.
        use_post_quant_conv: whether a convolution precedes the decoder.
        mid_block_add_attention: whether the middle blocks attend.
        scaling_factor: factor that normalises latents.
        shift_factor: number that is taken from them before that; None for 0.
        frames_at_once: number of frames that are computed together where nothing is kept for
            backward.

    Raises:
        GulliverError: the groups do not divide the channels.
    """

    def __init__(
        self,
        latent_channels: int = 4,
        block_out_channels: Sequence[int] = (128, 256, 512, 512),
        layers_per_block: int = 2,
        norm_num_groups: int = 32,
        in_channels: int = 3,
        out_channels: int = 3,
        use_quant_conv: bool = True,
        use_post_quant_conv: bool = True,
        mid_block_add_attention: bool = True,
        scaling_factor: float = 0.18215,
        shift_factor: float | None = None,
        frames_at_once: int = 4,
    ) -> None:
        super().__init__()
        if any(width % norm_num_groups for width in block_out_channels):
            raise GulliverError(
                f"norm_num_groups {norm_num_groups} does not divide block_out_channels "
                f"{tuple(block_out_channels)}: name the groups that these were trained with"
            )
        self.latent_channels = latent_channels
        side = 2 ** (len(block_out_channels) - 1)
        self.compression = (1, side, side)
        self.scaling_factor, self.shift_factor = scaling_factor, shift_factor or 0.0
        sizes = (block_out_channels, layers_per_block, norm_num_groups, mid_block_add_attention)
        self.encoder = FrameEncoder(in_channels, 2 * latent_channels, *sizes)
        self.decoder = FrameDecoder(latent_channels, out_channels, *sizes)
        both, one = 2 * latent_channels, latent_channels
        self.quant_conv = nn.Conv2d(both, both, 1) if use_quant_conv else None
        self.post_quant_conv = nn.Conv2d(one, one, 1) if use_post_quant_conv else None
        # In a dict, so that nothing has a second name in the state dict.
        self.networks = {
            "encoder": OnFrames((self.encoder, self.quant_conv), frames_at_once),
            "decoder": OnFrames((self.post_quant_conv, self.decoder), frames_at_once),
        }

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns channels, frames, rows and columns of the latents of a clip.

        Raises:
            GulliverError: height or width does not divide.
        """
        if frames < 1:
            raise GulliverError(f"a clip of {frames} frames cannot be encoded: it needs one")
        return self.latent_channels, frames, *check_space(self, height, width)

    def encode(self, video: Tensor) -> Tensor:
        """Encodes ``[B, 3, T, H, W]`` to normalised latents ``[B, C, T, H / 8, W / 8]``."""
        self.latent_shape(*video.shape[2:])
        return self.stream_encoder(video)

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalised latents; `num_frames` may say how many there are."""
        check_latents(self, latents)
        check_length(self, latents, num_frames)
        return self.stream_decoder(latents)

    def moments(self, video: Tensor) -> Tensor:
        """Returns mean and log-variance of the posterior ``[B, 2 C, ...]``, not normalised."""
        return self.networks["encoder"](video)

    def stream_encoder(self, video: Tensor) -> Tensor:
        """Encodes any stretch of a clip."""
        mean = self.moments(video).chunk(2, 1)[0]
        return (mean - self.shift_factor) * self.scaling_factor

    def stream_decoder(self, latents: Tensor) -> Tensor:
        """Decodes any stretch of a clip's latents."""
        return self.networks["decoder"](latents / self.scaling_factor + self.shift_factor)
