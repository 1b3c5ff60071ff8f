"""Options of the commands: frozen dataclasses that also define the command line.

Nothing here may import torch: ``--help`` reads this module. Packages define the options of their
own commands, such as `gulliver.video.config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gulliver.errors import GulliverError
from gulliver.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    GUIDANCE,
    POSITIVE,
    RANKS,
    SEED,
    SHARE,
    Options,
    Range,
    Size,
)
from gulliver.video.config import SamplingConfig


@dataclass(frozen=True)
class PlanData(Options):
    """Plans the steps of data-centric training: which ranks share samples, and which wait."""

    costs: Path
    """JSON file of costs: seconds by shape, degree and batch, or a file written by gulliver train
    or save_samples."""
    ranks: Annotated[int, Range(1, 4096)] = 8
    """Data ranks."""
    cluster: str = "here"
    """Machines whose links are used with a run's costs: h100x8, a described name, a file written by
    gulliver probe, or here."""
    memory_limit: Annotated[str | None, Size(share=True)] = None
    """Memory of each rank, such as 60GiB, used with a run's costs; by default 90% of a GPU, or 10%
    of the machine's memory."""
    stages: Annotated[int, Range(1, 4096)] = 1
    """Pipeline stages of each data rank."""
    samples: Annotated[int | None, Range(1, 2**24)] = None
    """Budget of a step: samples over all ranks."""
    tokens: Annotated[int | None, Range(1, 2**40)] = None
    """Budget of a step: approximate number of tokens."""
    seconds: Annotated[float | None, POSITIVE] = None
    """Budget of a step: maximum predicted seconds."""
    shapes: Path | None = None
    """Text file with a sample's shape on each line; with a run's costs, a line may instead be a
    number of tokens or latent frames x rows x columns. By default, --count shapes are drawn."""
    distribution: Literal["short", "balanced", "long"] = "balanced"
    """Dominant sample length of drawn shapes."""
    count: Annotated[int, Range(1, 2**24)] = 5000
    """Number of shapes to draw."""
    window: Annotated[int | None, Range(1, 2**24)] = None
    """Samples to look ahead; by default 16 steps' worth."""
    intra: bool = True
    """Let groups choose their own degrees; with --no-intra all have --degree."""
    inter: bool = True
    """Let groups run several micro-batches per step; with --no-inter one each."""
    degree: Annotated[int | None, Range(1, 4096)] = None
    """Degree of all groups with --no-intra."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """Whether to reject or skip samples that fit at no degree."""
    seed: Annotated[int, AT_LEAST_0] = 0
    """Seed of all orders."""
    steps: Annotated[int, Range(0, 1000)] = 2
    """Number of steps to print."""
    json: bool = False
    """Print JSON, in seconds."""


@dataclass(frozen=True)
class PublicModel(Options):
    """A public transformer to use instead of a run, and the models it was trained with."""

    model: Path | None = None
    """Public transformer to use instead of a run: a folder, a safetensors file or an index of
    several. Steps, guidance, batch size and fps default to the published ones."""
    autoencoder: Path | None = None
    """Folder or file of the autoencoder for --model."""
    text_encoder: Path | None = None
    """Folder of the T5 encoder for --model."""
    clip: Path | None = None
    """Folder of the CLIP encoder that Open-Sora 2.0 models need in addition."""

    def refuse_parts(self, *others: str) -> None:
        """Rejects parts of a public model if no public model is used."""
        for name in ("autoencoder", "text_encoder", "clip", *others):
            if (path := getattr(self, name)) is not None:
                option = name.replace("_", "-")
                raise GulliverError(f"--{option} {path} needs --model")


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig, PublicModel):
    """Generates clips with a trained run."""

    run: Path = Path("out/demo/run")
    """Folder of the training run."""
    texts: Path | None = None
    """Folder that caches text embeddings, so that each caption is encoded once."""
    adapter: Path | None = None
    """Result folder of `gulliver dreambooth`, to apply to --run."""
    prompt: tuple[str, ...] = ()
    """Prompt of a clip; pass several prompts for several clips."""
    prompt_file: Path | None = None
    """Text file with a prompt on each line."""
    out: Path = Path("clip.gif")
    """File to write (.mp4, .gif, .png); with several clips, a number is added before the suffix."""
    frames: Annotated[int, Range(1, 65535)] = 13
    """Number of frames (4 k + 1); 1 makes an image."""
    aspect_ratio: str = "1:1"
    """Ratio of width to height, such as 1:1, 5:3 or 3:5."""
    resolution: Annotated[int, Range(8, 65535)] = 32
    """Resolution: side in pixels of a square with as many pixels as the clip."""
    image: Path | None = None
    """Image to use as the first frame."""
    extend: Path | None = None
    """Clip to continue; --frames counts the conditioning frames too."""
    condition_frames: Annotated[int | None, Range(1, 65535)] = None
    """Number of frames (4 k + 1) at the end of a clip from which --extend (by default 5) or the
    next loop continues."""
    seed: Annotated[int, SEED] = 0
    """Seed of the first clip's noise; the following clips use the next seeds."""
    cache_check: bool = False
    """Also generate the clips without the cache, and print the PSNR between both."""
    negative_prompt: str = ""
    """Negative prompt; by default empty."""
    reference: tuple[Path, ...] = ()
    """Image or clip that --mask-strategy places; several are numbered from 0."""
    mask_strategy: str = ""
    """i2v_head, i2v_tail, i2v_loop, v2v_head, v2v_tail, or loop,reference,start in it,start in the
    clip,length,edit ratio;... in latent frames."""
    align: Annotated[int | None, Range(1, 65535)] = None
    """Align the mask strategy's frames to multiples of this many latent frames."""
    loops: Annotated[int, Range(1, 10_000)] = 1
    """Number of consecutive pieces of --frames; each continues the previous one."""
    condition_edit: Annotated[float, SHARE] = 0.0
    """Edit ratio of the frames that a loop reuses: 0 keeps them unchanged."""
    scale: Annotated[int, Range(1, 64)] = 4
    """Integer factor by which the output is upscaled."""
    fps: Annotated[float, Range(0, 1000, open_below=True)] = 8.0
    """Frame rate of the file."""
    sp_size: Annotated[int, RANKS] = 0
    """Ranks that share each clip's tokens; 0 uses all ranks not used by guidance."""
    guidance_ranks: Annotated[int, Range(0, 2)] = 0
    """Number of ranks for guidance: 2 runs the model with and without the prompt on separate ranks;
    0: 2 where possible."""
    share_autoencoder: Literal["auto", "samples", "height", "width", "time", "off"] = "auto"
    """Dim of clips along which the ranks share decoding; off: every rank decodes everything."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: --sp-size x --guidance-ranks. Ignored under torchrun."""


@dataclass(frozen=True)
class AppConfig(PublicModel):
    """Opens a page in the browser to generate clips and to watch a training run."""

    run: tyro.conf.Positional[Path | None] = None
    """Folder of the training run; by default out/demo/run or runs/video."""
    host: str = "127.0.0.1"
    """Address to listen on; by default, only this machine can connect."""
    port: Annotated[int, Range(0, 65535)] = 7860
    """Port to listen on; 0 chooses a free port."""
    out: Path = Path("out/app")
    """Folder that stores the clips, each with its settings."""
    keep: bool = False
    """Keep all networks of --model in memory: faster, and shows previews during generation."""


@dataclass(frozen=True)
class EvaluateConfig(Options):
    """Measures how well a run trained on the moving digits generates them."""

    run: tyro.conf.Positional[Path] = Path("out/demo/run")
    """Folder of the training run."""
    samples: Annotated[int, Range(1, 1_000_000)] = 200
    """Number of prompts."""
    steps: Annotated[int, Range(1, 100_000)] = 24
    """Sampling steps."""
    guidance: Annotated[float, GUIDANCE] = 2.0
    """Guidance scale."""
    out: Path | None = None
    """JSON file to write the results to."""


@dataclass(frozen=True)
class ProbeConfig(Options):
    """Measures this machine's performance; under torchrun also the links between the ranks."""

    out: Path | None = None
    """File to write; by default a file in the cache, one per machine."""
    folder: Path | None = None
    """Folder on the disk to measure, by default the current one; the test file is removed."""
    mib: Annotated[int, Range(1, 2**20)] = 256
    """Maximum size of the test file in MiB."""
    again: bool = False
    """Measure again, even if results for this machine and disk exist."""
    json: bool = False
    """Print JSON, in seconds, bytes and operations per second."""


@dataclass(frozen=True)
class DoctorConfig(Options):
    """Shows what this machine supports: I/O engine, versions, memory, and disk speed."""

    folder: Path = Path(".")
    """Folder on the disk to measure; the test file is removed."""
    mib: Annotated[int, Range(1, 2**20)] = 512
    """Maximum MiB to write and read; takes a few seconds at most."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ModelsConfig(Options):
    """Lists the public video models and autoencoders, and the memory they need."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of models; all by default."""
    frames: Annotated[int | None, Range(1, 65535)] = None
    """Number of frames of the clip; by default the model's usual number."""
    height: Annotated[int | None, Range(8, 65535)] = None
    """Height of the clip in pixels."""
    width: Annotated[int | None, Range(8, 65535)] = None
    """Width of the clip in pixels."""
    batch_size: Annotated[int, Range(1, 2**20)] = 1
    """Batch size per rank: clips per training step."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of the parameters; training in 16 bits adds float32 master weights."""
    json: bool = False
    """Print JSON, with sizes in bytes."""


@dataclass(frozen=True)
class QuantizeConfig(Options):
    """Quantizes the weights of a language model or a diffusers pipeline for inference."""

    folder: tyro.conf.Positional[Path]
    """Hugging Face folder of the model (config.json and safetensors files), or of a pipeline."""
    out: Path = Path("quantized")
    """Folder to create."""
    mode: Literal["int8", "int8_dynamic", "int4"] = "int8_dynamic"
    """Weights in int8, weights and activations in int8, or weights in int4."""
    exclude: tuple[str, ...] = ()
    """Path patterns of layers to leave unquantized, such as lm_head."""
    embeddings: bool = False
    """Also quantize embeddings."""
    outlier_threshold: Annotated[float, POSITIVE] = 6.0
    """Magnitude above which an activation is not rounded to int8."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    """Round weights to nearest, or by GPTQ on a calibration text, which loads the full model."""
    calibration: Path | None = None
    """Text file for GPTQ calibration; needs the folder's tokenizer."""
    calibration_tokens: Annotated[int, AT_LEAST_1] = 16384
    """Number of calibration tokens."""
    report: bool = False
    """Print errors, memory, speed and perplexity; for pipelines, write images before and after."""
    text: Path | None = None
    """Text file for measuring perplexity; needs the folder's tokenizer."""
    prompt: tuple[str, ...] = ()
    """Prompts of the images to compare, for pipelines."""
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Sampling steps of each image; by default 20."""
    push_to_hub: str | None = None
    """Hub repository, org/name, to upload --out to; a new one is private."""


@dataclass(frozen=True)
class CapabilitiesConfig(Options):
    """Shows supported combinations: sequence modes, masks and dtypes by model family."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Ls(Options):
    """Lists the steps of a run, or the contents of a step, a file or a Hugging Face folder."""

    folder: tyro.conf.Positional[Path]
    """Path to a run, a step, a Hugging Face folder or a file."""
    step: Annotated[int | None, AT_LEAST_0] = None
    """Step of the run to show."""
    tensors: bool = False
    """List all tensors."""
    json: bool = False
    """Print JSON, with sizes in bytes."""


@dataclass(frozen=True)
class Verify(Options):
    """Reads every byte of a step and checks it against its checksum."""

    folder: tyro.conf.Positional[Path]
    """Path to a run or a step."""
    step: Annotated[int | None, AT_LEAST_0] = None
    """Step of the run; by default the newest."""
    all: bool = False
    """Verify every step of the run."""
    json: bool = False
    """Print JSON, with sizes in bytes."""


@dataclass(frozen=True)
class Diff(Options):
    """Compares two checkpoints; the exit code is 0 if they are equal, 1 if not, 2 for an error."""

    a: tyro.conf.Positional[Path]
    """First run, step, safetensors file or Hugging Face folder."""
    b: tyro.conf.Positional[Path]
    """Second run, step, safetensors file or Hugging Face folder."""
    entry: str = "model"
    """Entry of the steps to compare; all: every entry, including non-tensor values."""
    tolerance: Annotated[float, AT_LEAST_0] = 0.0
    """Maximum absolute difference of elements that count as equal."""
    relative: Annotated[float, AT_LEAST_0] = 0.0
    """Additional allowed difference, as a fraction of the larger element."""
    any_dtype: bool = False
    """Do not report different dtypes."""
    step_a: Annotated[int | None, AT_LEAST_0] = None
    """Step of the first run."""
    step_b: Annotated[int | None, AT_LEAST_0] = None
    """Step of the second run."""
    show: Annotated[int, AT_LEAST_0] = 20
    """Maximum number of lines for each kind of difference; 0 for all."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Convert(Options):
    """Converts a checkpoint to a Hugging Face folder or a safetensors file of full tensors."""

    source: tyro.conf.Positional[Path]
    """A run, a step, a safetensors file or a Hugging Face folder."""
    target: tyro.conf.Positional[Path]
    """Folder or .safetensors file to create."""
    step: Annotated[int | None, AT_LEAST_0] = None
    """Step of the run, by default the newest."""
    entry: str = "model"
    """Entry of the step to read."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """Dtype to convert floating-point tensors to; by default they keep theirs."""
    prefix: str = ""
    """Convert only tensors with this name prefix, and remove the prefix."""
    max_shard_gb: Annotated[float, Range(0, 1e6, open_below=True)] = 5.0
    """Maximum size of a file in GB."""
    model_config: Path | None = None
    """Path to a config.json to store with the weights."""


@dataclass(frozen=True)
class Memory(Options):
    """Predicts where a model's state is kept under a memory limit, and the time of a step."""

    model: tyro.conf.Positional[Path]
    """Hugging Face folder of the model; only config.json and the files' headers are read."""
    memory_limit: Annotated[str, Size(share=True)]
    """Memory of each rank, such as 6GiB, or 70% of this machine's."""
    host_memory: Annotated[str | None, Size()] = None
    """Page-locked host memory of each GPU, such as 64GiB."""
    disk: str | None = None
    """Folder on a disk and the bytes to use there, such as /scratch:100GiB."""
    batch_size: Annotated[int, Range(1, 2**20)] = 1
    """Batch size per rank: samples per step on each data rank."""
    seq_length: Annotated[int, Range(1, 2**24)] = 1024
    """Tokens of a sample."""
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum", "rmsprop", "adagrad"] = "adamw"
    """Optimizer from torch."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the parameters; 16 bits add float32 master weights."""
    ranks: Annotated[int, Range(1, 1024)] = 1
    """Total number of ranks; ranks not used by the axes below are data ranks that shard the
    state."""
    tp_size: Annotated[int, Range(1, 1024)] = 1
    """Ranks that share each layer's tensors."""
    sp_size: Annotated[int, Range(1, 1024)] = 1
    """Ranks that share each sequence."""
    pp_size: Annotated[int, Range(1, 1024)] = 1
    """Pipeline stages."""
    step_in_backward: bool = False
    """Step each chunk as soon as its gradient is complete; not with --tp-size, --sp-size or
    --pp-size."""
    activations: Literal["keep", "recompute", "offload", "auto"] = "keep"
    """Whether activations for backward are kept, recomputed or offloaded."""
    json: bool = False
    """Print the plan as JSON, in seconds and bytes."""


@dataclass(frozen=True)
class Show(Options):
    """Summarizes a plan file."""

    file: tyro.conf.Positional[Path]
    """A plan.yaml, such as the one in a run's folder."""
    json: bool = False
    """Print the plan as JSON, in seconds and bytes."""


@dataclass(frozen=True)
class Search(Options):
    """Finds the fastest ways to run a model on a cluster, without loading the model."""

    model: tyro.conf.Positional[str]
    """Hugging Face folder or config.json, a public model's name such as llama-3-70b or STDiT3-XL/2,
    or module:function that returns a model and an example batch."""
    cluster: str = "here"
    """Machines: h100x64, a described name, a file written by gulliver probe, or here."""
    batch_size: Annotated[int, Range(1, 2**24)] = 64
    """Global batch size: samples per step over all ranks."""
    seq_length: Annotated[int | None, Range(1, 2**24)] = None
    """Tokens per sample of a language model; by default 2048."""
    frames: Annotated[int | None, Range(1, 65535)] = None
    """Frames per clip of a video model; by default the model's usual number."""
    size: str | None = None
    """Height x width of an image or clip in pixels, such as 720x1280."""
    memory_limit: Annotated[str | None, Size()] = None
    """Memory of each rank, such as 70GiB; by default the device's, minus the libraries' share."""
    host_memory: Annotated[str | None, Size()] = None
    """Page-locked host memory of each rank, such as 200GiB, for state that does not fit."""
    disk: str | None = None
    """Folder and bytes per rank for state that does not fit, such as /scratch:1TiB."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of the parameters; training in 16 bits adds float32 master weights."""
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum", "rmsprop", "adagrad"] = "adamw"
    """Optimizer from torch."""
    lora: Annotated[int | None, Range(1, 2**16)] = None
    """Rank of LoRA adapters in all linear layers; only the adapters are trained."""
    inference: bool = False
    """Plan inference instead of training."""
    why: str | None = None
    """Path of a module to explain: how it is sharded, and the alternatives with their cost."""
    what_if: tuple[str, ...] = ()
    """Changes of the cluster to compare, such as link=400Gb inner=900GB memory=141GiB
    flops=x1.5."""
    weak_scaling: bool = False
    """Also simulate the fastest grid on fewer replicas, each with as many samples."""
    json: bool = False
    """Print JSON, in seconds and bytes."""


@dataclass(frozen=True)
class PrecisionConfig(Options):
    """Predicts which linear layers of a model FP8 speeds up, before any conversion."""

    model: tyro.conf.Positional[str]
    """Hugging Face folder or config.json, a public model's name such as llama-3-8b or STDiT3-XL/2,
    or module:function that returns a model and an example batch."""
    cluster: str = "here"
    """Machines: h100x8, a described name, a file written by gulliver probe, or here."""
    tokens: Annotated[int, Range(1, 2**30)] = 8192
    """Rows of a layer's input: samples of a micro-batch x their tokens."""
    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Granularity of scales: one per tensor, or one per row."""
    exclude: tuple[str, ...] = ()
    """Path pattern of layers to keep in high precision."""
    json: bool = False
    """Print JSON, in seconds and bytes."""
