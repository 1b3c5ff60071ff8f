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
)
from gulliver.video.config import SamplingConfig


@dataclass(frozen=True)
class PlanData(Options):
    """Draws the steps of data-centric training: which ranks share which samples, and who waits."""

    costs: Path
    """JSON file of costs: seconds by shape, degree and batch, or what gulliver train or
    save_samples has kept."""
    ranks: Annotated[int, Range(1, 4096)] = 8
    """Data ranks."""
    cluster: str = "here"
    """Machines whose links kept costs are planned with: h100x8, a described name, a file of
    gulliver probe's form, or here."""
    memory_limit: str | None = None
    """Memory of each rank, such as 60GiB, with kept costs; by default 90% of a GPU, or 10% of the
    machine's memory."""
    stages: Annotated[int, Range(1, 4096)] = 1
    """Stages of a pipeline that each of these ranks is."""
    samples: Annotated[int | None, Range(1, 2**24)] = None
    """Budget of a step: samples of all ranks."""
    tokens: Annotated[int | None, Range(1, 2**40)] = None
    """Budget of a step: about so many tokens."""
    seconds: Annotated[float | None, POSITIVE] = None
    """Budget of a step: at most so many predicted seconds."""
    shapes: Path | None = None
    """Text file with the shape of a sample on each line, with kept costs also a number of tokens or
    latent frames x rows x columns; by default --count are drawn."""
    distribution: Literal["short", "balanced", "long"] = "balanced"
    """Samples that dominate among those drawn."""
    count: Annotated[int, Range(1, 2**24)] = 5000
    """Number of samples that are drawn."""
    window: Annotated[int | None, Range(1, 2**24)] = None
    """Samples that are looked at ahead; by default 16 steps' worth."""
    intra: bool = True
    """Groups choose their own degrees; with --no-intra all have --degree."""
    inter: bool = True
    """Groups run several micro-batches in a step; with --no-inter one each."""
    degree: Annotated[int | None, Range(1, 4096)] = None
    """Degree of all groups, with --no-intra."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """What becomes of samples that fit at no degree."""
    seed: Annotated[int, AT_LEAST_0] = 0
    """Seed of all orders."""
    steps: Annotated[int, Range(0, 1000)] = 2
    """Number of steps to draw."""
    json: bool = False
    """Print JSON, in seconds."""


@dataclass(frozen=True)
class PublicModel(Options):
    """A public transformer in place of a run, and what it was trained with."""

    model: Path | None = None
    """Public transformer in place of a run: a folder, a safetensors file or an index of several.
    Steps, guidance, batch size and fps are then those that it was published with."""
    autoencoder: Path | None = None
    """Folder or file of the autoencoder of --model."""
    text_encoder: Path | None = None
    """Folder of the T5 of --model."""
    clip: Path | None = None
    """Folder of the CLIP that models of Open-Sora 2.0 read besides."""

    def refuse_parts(self, *others: str) -> None:
        """Rejects parts of a public model if no public model is used."""
        for name in ("autoencoder", "text_encoder", "clip", *others):
            if (path := getattr(self, name)) is not None:
                option = name.replace("_", "-")
                raise GulliverError(f"--{option} {path} is for a --model: name that, too")


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig, PublicModel):
    """Makes clips with a trained run."""

    run: Path = Path("out/demo/run")
    """Folder of the training run."""
    texts: Path | None = None
    """Folder that keeps what captions say, so that each is encoded once."""
    adapter: Path | None = None
    """Folder of what `gulliver dreambooth` has taught --run: its result."""
    prompt: tuple[str, ...] = ()
    """Sentence to show; several make several clips."""
    prompt_file: Path | None = None
    """Text file with a prompt on each line."""
    out: Path = Path("clip.gif")
    """File to write (.mp4, .gif, .png); for several clips a number is put before the suffix."""
    frames: Annotated[int, Range(1, 65535)] = 13
    """Length (4 k + 1); 1 makes a picture."""
    aspect_ratio: str = "1:1"
    """Width to height, such as 1:1, 5:3 or 3:5."""
    resolution: Annotated[int, Range(8, 65535)] = 32
    """Side in pixels of the square with as many pixels as the clip."""
    image: Path | None = None
    """Picture that becomes the first frame."""
    extend: Path | None = None
    """Clip to continue; --frames counts the conditioning frames too."""
    condition_frames: Annotated[int | None, Range(1, 65535)] = None
    """Number of last frames (4 k + 1) that --extend, with 5 by default, or the next loop begins
    with."""
    seed: Annotated[int, SEED] = 0
    """Noise of the first clip; the next clips take the next seeds."""
    cache_check: bool = False
    """Make the clips without the cache, too, and print the PSNR to them."""
    negative_prompt: str = ""
    """Sentence to lead away from, in place of no sentence."""
    reference: tuple[Path, ...] = ()
    """Picture or clip that --mask-strategy places; several are numbered from 0."""
    mask_strategy: str = ""
    """i2v_head, i2v_tail, i2v_loop, v2v_head, v2v_tail, or loop,reference,start in it,start in the
    clip,length,edit ratio;... in latent frames."""
    align: Annotated[int | None, Range(1, 65535)] = None
    """Latent frames at whose multiples the mask strategy's frames begin."""
    loops: Annotated[int, Range(1, 10_000)] = 1
    """Pieces of --frames each, every one going on where the one before ended."""
    condition_edit: Annotated[float, SHARE] = 0.0
    """Edit ratio of the frames that a loop takes over: 0 keeps them as they are."""
    scale: Annotated[int, Range(1, 64)] = 4
    """Times that every pixel is repeated in the file."""
    fps: Annotated[float, Range(0, 1000, open_below=True)] = 8.0
    """Frames per second of the file."""
    sp_size: Annotated[int, RANKS] = 0
    """Ranks that share each clip's tokens; 0 takes all that guidance leaves."""
    guidance_ranks: Annotated[int, Range(0, 2)] = 0
    """2 runs the model with and without the sentence on separate ranks; 0: 2 where possible."""
    share_autoencoder: Literal["auto", "samples", "height", "width", "time", "off"] = "auto"
    """Dim of clips that the ranks cut to decode them together; off: every rank decodes all."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: --sp-size x --guidance-ranks. Ignored under torchrun."""


@dataclass(frozen=True)
class AppConfig(PublicModel):
    """Shows a page in the browser: clips from prompts and pictures, and a run that trains."""

    run: tyro.conf.Positional[Path | None] = None
    """Folder of the training run; by default out/demo/run or runs/video."""
    host: str = "127.0.0.1"
    """Address to listen at; by default this machine alone reaches it."""
    port: Annotated[int, Range(0, 65535)] = 7860
    """Port to listen at; 0 takes any that is free."""
    out: Path = Path("out/app")
    """Folder that keeps the clips, each with its settings."""
    keep: bool = False
    """Keep all networks of --model in memory: faster clips, and previews while they are made."""


@dataclass(frozen=True)
class EvaluateConfig(Options):
    """Measures how well a run trained on the moving digits shows them."""

    run: tyro.conf.Positional[Path] = Path("out/demo/run")
    """Folder of the training run."""
    samples: Annotated[int, Range(1, 1_000_000)] = 200
    """Number of prompts."""
    steps: Annotated[int, Range(1, 100_000)] = 24
    """Sampling steps."""
    guidance: Annotated[float, GUIDANCE] = 2.0
    """Weight of the sentence."""
    out: Path | None = None
    """JSON file to write the figures to."""


@dataclass(frozen=True)
class ProbeConfig(Options):
    """Measures what this machine can do; under torchrun the links between the ranks too."""

    out: Path | None = None
    """File to write; by default the measurement is kept in the cache, one file per machine."""
    folder: Path | None = None
    """Folder on the disk to measure, by default this one; a file there is removed again."""
    mib: Annotated[int, Range(1, 2**20)] = 256
    """Most MiB of that file."""
    again: bool = False
    """Measure again, even if there is a measurement of this machine, and of the folder's disk."""
    json: bool = False
    """Print JSON, in seconds, bytes and operations a second."""


@dataclass(frozen=True)
class DoctorConfig(Options):
    """Says what runs here: the I/O engine and why, versions, memory, and how fast the disk is."""

    folder: Path = Path(".")
    """Folder on the disk to measure, by a file that is removed again."""
    mib: Annotated[int, Range(1, 2**20)] = 512
    """Most MiB to write and to read; it takes a few seconds at most."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ModelsConfig(Options):
    """Lists the public video models and autoencoders, and the memory that they take."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of models; all by default."""
    frames: Annotated[int | None, Range(1, 65535)] = None
    """Length of the clip; by default each model's usual one."""
    height: Annotated[int | None, Range(8, 65535)] = None
    """Rows of the clip, in pixels."""
    width: Annotated[int | None, Range(8, 65535)] = None
    """Columns of the clip, in pixels."""
    batch_size: Annotated[int, Range(1, 2**20)] = 1
    """Batch size per rank: clips of a training step."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of the parameters; 16 bits have float32 copies in training."""
    json: bool = False
    """Print JSON, with sizes in bytes."""


@dataclass(frozen=True)
class QuantizeConfig(Options):
    """Quantises the weights of a language model, or of a diffusers pipeline, for inference."""

    folder: tyro.conf.Positional[Path]
    """Hugging Face folder of the model, config.json and safetensors files, or a pipeline's."""
    out: Path = Path("quantized")
    """Folder that is made."""
    mode: Literal["int8", "int8_dynamic", "int4"] = "int8_dynamic"
    """Weights in int8, weights and activations in int8, or weights in int4."""
    exclude: tuple[str, ...] = ()
    """Patterns of layers that are kept, such as lm_head."""
    embeddings: bool = False
    """Quantise embeddings, too."""
    outlier_threshold: Annotated[float, POSITIVE] = 6.0
    """Magnitude from which on an activation is not rounded to int8."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    """Round weights to the nearest, or by GPTQ for a text; the whole model is loaded for that."""
    calibration: Path | None = None
    """Text file that GPTQ rounds for; it needs the folder's tokenizer."""
    calibration_tokens: Annotated[int, AT_LEAST_1] = 16384
    """Tokens of that text that are used."""
    report: bool = False
    """Print errors, memory, speed, and perplexity; of pipelines write pictures before and after."""
    text: Path | None = None
    """Text file to measure perplexity on; it needs the folder's tokenizer."""
    prompt: tuple[str, ...] = ()
    """Prompts of the pictures that are compared; of pipelines."""
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Steps of each picture; by default 20."""
    push_to_hub: str | None = None
    """Repository of the Hub, org/name, that --out is uploaded to; a new one is private."""


@dataclass(frozen=True)
class CapabilitiesConfig(Options):
    """Shows what may be combined: sequence modes, masks and dtypes by family of models."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Ls(Options):
    """Lists the steps of a run, or what a step, a file or a Hugging Face folder holds."""

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
    """Compares two checkpoints: exit code 0 for no difference, 1 for some, 2 for an error."""

    a: tyro.conf.Positional[Path]
    """A run, a step, a safetensors file or a Hugging Face folder."""
    b: tyro.conf.Positional[Path]
    """The other one, of any of these."""
    entry: str = "model"
    """Entry of the steps to compare; all: every entry, with values that are no tensors."""
    tolerance: Annotated[float, AT_LEAST_0] = 0.0
    """Difference of elements that counts as equal."""
    relative: Annotated[float, AT_LEAST_0] = 0.0
    """Difference allowed on top, as a share of the larger element."""
    any_dtype: bool = False
    """Do not count other dtypes as a difference."""
    step_a: Annotated[int | None, AT_LEAST_0] = None
    """Step of the first, if that is a run."""
    step_b: Annotated[int | None, AT_LEAST_0] = None
    """Step of the second, if that is a run."""
    show: Annotated[int, AT_LEAST_0] = 20
    """Lines of each kind of difference; 0 for all."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Convert(Options):
    """Makes a Hugging Face folder or a safetensors file of whole tensors."""

    source: tyro.conf.Positional[Path]
    """A run, a step, a safetensors file or a Hugging Face folder."""
    target: tyro.conf.Positional[Path]
    """Folder or .safetensors file to make."""
    step: Annotated[int | None, AT_LEAST_0] = None
    """Step of the run, by default the newest."""
    entry: str = "model"
    """Entry of the step to read."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """Dtype to convert floating-point tensors to; by default they keep theirs."""
    prefix: str = ""
    """Take only tensors whose names begin with this, which is cut off."""
    max_shard_gb: Annotated[float, Range(0, 1e6, open_below=True)] = 5.0
    """Most gigabytes of tensors in one file."""
    model_config: Path | None = None
    """Path to a config.json to put next to the weights."""


@dataclass(frozen=True)
class Memory(Options):
    """Predicts where a model's state is kept under a memory limit, and how long a step takes."""

    model: tyro.conf.Positional[Path]
    """Hugging Face folder of the model; its config.json and the headers of its files are read."""
    memory_limit: str
    """Memory of each rank, such as 6GiB, or 70% of what this machine has."""
    host_memory: str | None = None
    """Page-locked host memory behind a GPU, such as 64GiB."""
    disk: str | None = None
    """Folder on a disk and its share, such as /scratch:100GiB."""
    batch_size: Annotated[int, Range(1, 2**20)] = 1
    """Batch size per rank: samples of a step on each data rank."""
    seq_length: Annotated[int, Range(1, 2**24)] = 1024
    """Tokens of a sample."""
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum", "rmsprop", "adagrad"] = "adamw"
    """Optimizer, of torch."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the parameters; 16 bits have float32 copies."""
    ranks: Annotated[int, Range(1, 1024)] = 1
    """Ranks in all; what the axes below leave of them shares the state as data ranks."""
    tp_size: Annotated[int, Range(1, 1024)] = 1
    """Ranks that share each layer's tensors."""
    sp_size: Annotated[int, Range(1, 1024)] = 1
    """Ranks that share each sequence."""
    pp_size: Annotated[int, Range(1, 1024)] = 1
    """Stages of a pipeline."""
    step_in_backward: bool = False
    """Step each chunk as soon as its gradient is complete; not with --tp-size, --sp-size or
    --pp-size."""
    activations: Literal["keep", "recompute", "offload", "auto"] = "keep"
    """Keep the activations of forward for backward, recompute or offload them."""
    json: bool = False
    """Print the plan as JSON, in seconds and bytes."""


@dataclass(frozen=True)
class Show(Options):
    """Summarizes a plan's file."""

    file: tyro.conf.Positional[Path]
    """A plan.yaml, such as a run keeps next to its checkpoints."""
    json: bool = False
    """Print the plan as JSON, in seconds and bytes."""


@dataclass(frozen=True)
class Search(Options):
    """Finds the fastest ways to run a model on a cluster, before anything is loaded or rented."""

    model: tyro.conf.Positional[str]
    """Hugging Face folder or config.json, a public model's name such as llama-3-70b or STDiT3-XL/2,
    or module:function, which returns a model and an example batch."""
    cluster: str = "here"
    """Machines: h100x64, a described name, a file of gulliver probe's form, or here."""
    batch_size: Annotated[int, Range(1, 2**24)] = 64
    """Global batch size: samples of a step, all ranks together."""
    seq_length: Annotated[int | None, Range(1, 2**24)] = None
    """Tokens of a sample, of language models; by default 2048."""
    frames: Annotated[int | None, Range(1, 65535)] = None
    """Frames of a clip, of models of video; by default the model's usual ones."""
    size: str | None = None
    """Rows x columns of a picture or clip in pixels, such as 720x1280."""
    memory_limit: str | None = None
    """Memory of each rank, such as 70GiB; by default the device's, less what libraries take."""
    host_memory: str | None = None
    """Page-locked host memory of each rank, such as 200GiB, for state that does not fit."""
    disk: str | None = None
    """Folder and bytes of each rank for it, such as /scratch:1TiB."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of the parameters; 16 bits have float32 copies in training."""
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum", "rmsprop", "adagrad"] = "adamw"
    """Optimizer, of torch."""
    lora: Annotated[int | None, Range(1, 2**16)] = None
    """Rank of LoRA adapters of all linear layers: they alone are trained."""
    inference: bool = False
    """Plan forwards alone: nothing is trained."""
    why: str | None = None
    """Path of a module: what is done with it, what else could be and at what price."""
    what_if: tuple[str, ...] = ()
    """Changes of the cluster to compare with, such as link=400Gb inner=900GB memory=141GiB
    flops=x1.5."""
    price_per_hour: Annotated[float | None, POSITIVE] = None
    """Price of a device for an hour: also prints the cost of a trillion tokens."""
    watts: Annotated[float | None, POSITIVE] = None
    """Power of a device with its share of the machine: also prints a trillion tokens' energy."""
    json: bool = False
    """Print JSON, in seconds and bytes."""


@dataclass(frozen=True)
class PrecisionConfig(Options):
    """Predicts which linear layers of a model FP8 speeds up, before anything is converted."""

    model: tyro.conf.Positional[str]
    """Hugging Face folder or config.json, a public model's name such as llama-3-8b or STDiT3-XL/2,
    or module:function, which returns a model and an example batch."""
    cluster: str = "here"
    """Machines: h100x8, a described name, a file of gulliver probe's form, or here."""
    tokens: Annotated[int, Range(1, 2**30)] = 8192
    """Rows that a layer multiplies at once: samples of a micro-batch x their tokens."""
    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scales: one for each tensor, or for each row."""
    exclude: tuple[str, ...] = ()
    """Pattern of paths of layers that are kept in high precision."""
    json: bool = False
    """Print JSON, in seconds and bytes."""
