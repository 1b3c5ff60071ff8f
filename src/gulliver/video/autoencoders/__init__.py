"""Training of video autoencoders: losses, discriminator, metrics, clips, and the loop.

Example::

    loss = AutoencoderLoss(AutoencoderLossConfig(reconstruction="l1", learnt_variance=True))
    terms = loss(video, decoded, Posterior.of(moments, channels))
    print(psnr(video, decoded), ssim(video, decoded))           # per frame
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.video.autoencoders.trainer import AutoencoderTrainer as AutoencoderTrainer

__getattr__, __dir__ = lazy_exports(__name__)
