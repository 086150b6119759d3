"""The model card, and the upload to the Hugging Face Hub (`--push_to_hub`).

The repository is made before the training, so that a wrong token is told then and not at the end. Only what was exported
is uploaded: no checkpoints, caches and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, UsageError
from holdfast.training.hub import without_token
from holdfast.training.once import once

if TYPE_CHECKING:
    from holdfast.training.adapters import Adapter
    from holdfast.training.config import DiffusionConfig
    from holdfast.training.loop import Training

logger = logging.getLogger(__name__)

CARD = "README.md"
HUB_DEADLINE_S = 300.0


def repository_for(config: DiffusionConfig) -> str | None:
    """The full name of the repository, which exists after this; None without `--push_to_hub`. Every rank calls this.

    Raises:
        UsageError: the Hub does not let us.
    """
    if not config.push_to_hub:
        return None
    return once(lambda: _make_repository(config), "run", HUB_DEADLINE_S)


def _make_repository(config: DiffusionConfig) -> str:
    from huggingface_hub import create_repo

    wanted = config.hub_model_id or Path(config.output_dir).absolute().name
    try:
        return str(create_repo(wanted, exist_ok=True, token=config.hub_token).repo_id)
    except Exception as error:  # the client has many
        raise UsageError(
            f"--push_to_hub: the repository {wanted} cannot be made: {_hidden(config, error)}\nLog in with a token that may write "
            "(`hf auth login`, HF_TOKEN or --hub_token), give another --hub_model_id, or leave the flag out."
        ) from None


def export_lora(
    config: DiffusionConfig,
    checkpoint: Path,
    training: Training,
    adapters: Mapping[str, Adapter],
    repository: str | None,
    pipeline: str,
    tags: Iterable[str],
) -> None:
    """Writes the LoRA of the final checkpoint, for diffusers' class `pipeline`, and its card; uploads both to `repository`, if any."""
    from holdfast.training.adapters import export_adapters

    output, name = Path(config.output_dir), config.pretrained_model_name_or_path
    parts = {part: (training.key(part), adapter) for part, adapter in adapters.items()}
    written = export_adapters(checkpoint, output, parts, config.adapter_dtype, "transformer" if config.use_ema else None)
    use = (
        f'from diffusers import {pipeline}\n\npipeline = {pipeline}.from_pretrained("{name}")\n'
        f'pipeline.load_lora_weights("{repository or output}")'
    )
    write_card(config, name, "A LoRA", use, (*tags, "diffusers-training", "lora"))
    if repository is not None:
        upload(config, repository, [written.name])


def write_card(config: DiffusionConfig, base_model: str, what: str, use: str, tags: Iterable[str]) -> None:
    """Writes `README.md` into the output folder: what was trained (`what`), the lines that `use` it, the last pictures."""
    from huggingface_hub import ModelCard, ModelCardData

    output_dir = Path(config.output_dir)
    name = output_dir.absolute().name
    data = ModelCardData(license="other", base_model=base_model, library_name="diffusers", tags=list(tags))
    shown = [path.relative_to(output_dir).as_posix() for path in last_pictures(output_dir)]
    pictures = "".join(f"![{config.last_prompt}](./{path})\n" for path in shown)
    subject = config.instance_prompt or f"{config.dataset_name} (captions: {config.caption_column})"
    text = (
        f"# {name}\n\n{what} of {base_model}, trained with Holdfast on: {subject}\n\n"
        f"```python\n{use}\n```\n\n{pictures}\nThe licence is that of {base_model}.\n"
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(output_dir / CARD)


def last_pictures(output_dir: Path) -> list[Path]:
    """The pictures of the end of the training, if some were made."""
    steps = sorted((output_dir / "final").glob("step-*"))
    return sorted(steps[-1].glob("*.png")) if steps else []


def upload(config: DiffusionConfig, repository: str, files: Iterable[str]) -> None:
    """Uploads the `files` (patterns relative to the output folder), card and last pictures. To be called by one process.

    Raises:
        HoldfastError: it failed; what was trained is on disk, and the message says how to upload it by hand.
    """
    from huggingface_hub import upload_folder

    pictures = [path.relative_to(config.output_dir).as_posix() for path in last_pictures(Path(config.output_dir))]
    try:
        upload_folder(
            repo_id=repository,
            folder_path=config.output_dir,
            commit_message="End of training",
            allow_patterns=[*files, CARD, *pictures],
            token=config.hub_token,
        )
    except Exception as error:
        raise HoldfastError(
            f"{config.output_dir} is whole, and could not be uploaded to {repository}: {_hidden(config, error)}\n"
            f"Upload it by hand: hf upload {repository} {config.output_dir} . --exclude 'checkpoint-*' --exclude '.holdfast/*'"
        ) from None
    logger.info("uploaded to %s", repository)


def _hidden(config: DiffusionConfig, error: Exception) -> str:
    text = without_token(str(error))
    return text.replace(config.hub_token, "***") if config.hub_token else text
