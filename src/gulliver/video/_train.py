"""`train`: a run folder opened or continued, its data and trainer made, and the run to its end."""

from __future__ import annotations

from gulliver.checkpoint import write_json
from gulliver.comm import barrier, guard, init_world
from gulliver.data import ClipTable
from gulliver.jobs import StopRequest
from gulliver.jobs._loop import Outcome
from gulliver.options import resolved
from gulliver.video._build import check_start, describe_start
from gulliver.video._config import TrainConfig, check_config
from gulliver.video._encoded import refuse_other_autoencoder, with_encoded
from gulliver.video._planned_training import PlannedTrainer
from gulliver.video._plugins import check_ranks
from gulliver.video._public_autoencoders import load_autoencoder
from gulliver.video._run import Run
from gulliver.video._samples import make_samples
from gulliver.video._sources import make_dataset, make_held_out, ready_autoencoder
from gulliver.video._training import Trainer


def train(config: TrainConfig) -> Outcome:
    """Trains a text-to-video model as `config` says, on every rank of the present world.

    Raises:
        GulliverError: the configuration cannot run, the folder holds another run, the loss is no
            longer a number, or another rank is gone.
    """
    config = with_encoded(config)
    check_config(config)
    check_start(config)
    world = init_world()
    check_ranks(config, world.size)
    run = Run(config.out, config.keep)
    with guard():
        refuse_other_autoencoder(config, run)
        checkpoint = run.open(config, step=config.resume_step)
        barrier()  # nobody writes before everybody has looked
        if world.is_main:
            run.write(options=resolved(config))
            if checkpoint is None:
                describe_start(config, run)
        words = None if config.model.public else config.model.text_length
        path = config.autoencoder.path
        given = None if path is None else load_autoencoder(path)
        dataset = make_dataset(config.data, words, world.is_main, config.seed, given)
        held_out = make_held_out(config, dataset)
        autoencoder = ready_autoencoder(config, run, dataset, world)
        samples = make_samples(config, run, world, dataset, held_out)
        kind = PlannedTrainer if config.data_centric else Trainer
        trainer = kind(config, run, dataset, autoencoder, world, held_out, samples)
        if world.is_main and isinstance(dataset, ClipTable):
            write_json(run.clips_path, {"fps": dataset.fps})
        trainer.start(checkpoint, options=resolved(config))
        with StopRequest().listening() as stop:
            return trainer.run_to_end(stop)
