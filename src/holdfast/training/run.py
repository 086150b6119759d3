"""What a diffusion recipe does from its flags to its export, and how its data is made ready: the order of things.

A model is there only as long as it is needed: images and captions are looked at first, then captions are encoded, class images
drawn, latents encoded, and only then what is trained is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from holdfast.engine.memory import imports_set_aside
from holdfast.errors import UsageError
from holdfast.training.adapters import Adapter
from holdfast.training.config import DiffusionConfig
from holdfast.training.continuation import continuation, fingerprints
from holdfast.training.data import TrainingData, class_samples
from holdfast.training.hub import fetch_pipeline
from holdfast.training.loop import Training, train
from holdfast.training.parts import Autoencoder, Parts, give_back_memory
from holdfast.training.prior import Draw, make_class_images
from holdfast.training.publish import repository_for
from holdfast.training.samples import instance_samples
from holdfast.training.setup import configure_logging, make_accelerator

ConfigT = TypeVar("ConfigT", bound=DiffusionConfig)
Adapters = dict[str, Adapter]


class Text(Protocol):
    """What has captions encoded."""

    def encode(self, captions: Iterable[str]) -> int: ...


@imports_set_aside()
def run(
    config: ConfigT,
    recipe: str,
    parts: dict[str, str | None],
    problems: Callable[[ConfigT, Path], Iterator[str]],
    prepare: Callable[[Parts[ConfigT]], tuple[Training, Adapters]],
    export: Callable[[ConfigT, Path, Path, Training, Adapters, str | None], None],
) -> None:
    """Trains, and has the final checkpoint exported by rank 0, for which nobody waits.

    `parts` are those of the base pipeline; `problems` says what is wrong with it, before anything is loaded. `export` is
    given the config, the base's folder, the checkpoint, what was trained, and the repository to upload to.
    """
    configure_logging()
    accelerator = make_accelerator(config)
    base = fetch_pipeline(config.pretrained_model_name_or_path, parts, config.revision, config.variant, config.cache_dir)
    if found := list(problems(config, base)):
        raise UsageError("\n".join(found))
    prints = fingerprints(base, parts, config.variant)
    this = continuation(config, recipe, prints)
    repository = repository_for(config)

    training, adapters = prepare(Parts(config, accelerator, base, prints))
    checkpoint = train(config, accelerator, this, training)
    if checkpoint is not None and accelerator.is_main_process:
        export(config, base, checkpoint, training, adapters, repository)
    accelerator.state.destroy_process_group()


def encoded_data(
    parts: Parts[ConfigT], text: Text, vae: Autoencoder, base: Callable[[torch.dtype], Draw], captions: Iterable[str] = ()
) -> TrainingData:
    """The training data, with the captions encoded and, as the flags say, class images made and latents cached.

    `base(dtype)` draws pictures with the model as it was; `captions` are needed beside those of data and pictures.
    """
    config = parts.config
    instances = instance_samples(config, config.cache_dir)
    named = [config.validation_prompt, config.last_prompt, config.class_prompt if config.with_prior_preservation else None]
    text.encode([*(sample.caption for sample in instances), *(prompt for prompt in named if prompt is not None), *captions])
    if config.with_prior_preservation:
        make_class_images(config, parts.accelerator, base)
        give_back_memory()
    data = TrainingData(config, instances, class_samples(config), vae.side)
    text.encode(data.prompts)  # class images may have captions of their own
    if config.cache_latents:
        vae.cache(data)
    return data
