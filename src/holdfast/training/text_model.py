"""A causal language model and its tokenizer: from a folder or the Hub, or new, and on FSDP ranks never whole on any of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import holdfast
from holdfast.engine.meta import parameters_on_meta
from holdfast.errors import CheckpointError, UsageError
from holdfast.formats.huggingface import stored_tensors
from holdfast.storage import LocalFolder
from holdfast.training.models import is_fsdp1, wrapped_by_fsdp1
from holdfast.training.once import once
from holdfast.training.text_flags import ModelFlags

logger = logging.getLogger(__name__)

DOWNLOAD_DEADLINE_S = 6 * 3600.0
_DTYPES = {None: torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pretrained:
    """Config and tokenizer, read; the weights are still to be.

    Raises:
        UsageError: something of it is not there or cannot be read.
    """

    def __init__(self, flags: ModelFlags) -> None:
        self.flags = flags
        self.folder = _folder(flags)
        where: dict[str, Any] = {"cache_dir": flags.cache_dir, "token": flags.token, "trust_remote_code": flags.trust_remote_code}
        try:
            self.config = _config(flags, self.folder, where)
            source = flags.tokenizer_name or self.folder
            self.tokenizer = AutoTokenizer.from_pretrained(source, use_fast=flags.use_fast_tokenizer, **where)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"config or tokenizer cannot be read: {error}") from error

    def on_meta(self) -> nn.Module | None:
        """The model without memory, where `fill` can read its weights; None where transformers has to build it whole."""
        if self.folder is None or len(self.tokenizer) > self.config.get_text_config().vocab_size:
            return None
        with parameters_on_meta():
            model: Any = AutoModelForCausalLM.from_config(self.config, trust_remote_code=self.flags.trust_remote_code)
        try:
            stored = stored_tensors(LocalFolder(self.folder, follow_links=True))
        except CheckpointError as error:
            logger.warning("every rank reads the whole model first: %s", error.args[0])
            return None
        odd = [n for n, p in model.named_parameters() if n not in stored or stored[n].entry.shape != tuple(p.shape)]
        if odd:
            logger.warning("every rank reads the whole model first: its files name %s and %d more otherwise", odd[0], len(odd) - 1)
            return None
        if (self.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        dtype = self.config.dtype or torch.float32 if self.flags.dtype == "auto" else _DTYPES[self.flags.dtype]
        result: nn.Module = model.to(dtype)
        return result

    def whole(self) -> nn.Module:
        """The model as transformers builds it, whole on every rank."""
        trust = self.flags.trust_remote_code
        if self.folder is None:
            model: Any = AutoModelForCausalLM.from_config(self.config, trust_remote_code=trust)
            logger.info("a new model of %.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
        else:
            dtype: Any = "auto" if self.flags.dtype == "auto" else _DTYPES[self.flags.dtype]
            model = AutoModelForCausalLM.from_pretrained(self.folder, config=self.config, dtype=dtype, trust_remote_code=trust)
        if len(self.tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(self.tokenizer))
        built: nn.Module = model
        return built

    def fill(self, model: nn.Module) -> nn.Module:
        """The weights into a model of `on_meta`, as it is or as it was cut."""
        assert self.folder is not None
        return holdfast.load_pretrained(model, self.folder)


def cut(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """A model without memory under FSDP, as the accelerator's plugin says."""
    if is_fsdp1(accelerator):
        return wrapped_by_fsdp1(accelerator, model)
    # Accelerate wants an optimizer beside it, whose parameters it would take for each other: on the meta device all have one address.
    prepared, _ = accelerator.prepare(model, torch.optim.SGD([{"params": []}], lr=0.0))
    accelerator._optimizers.clear()
    result: nn.Module = prepared
    return result


def _config(flags: ModelFlags, folder: Path | None, where: dict[str, Any]) -> Any:
    if flags.config_name or folder is not None:
        return AutoConfig.from_pretrained(flags.config_name or folder, **where)
    if flags.model_type not in CONFIG_MAPPING:
        raise UsageError(f"--model_type {flags.model_type}: transformers has no such type")
    config = CONFIG_MAPPING[flags.model_type]()
    if flags.config_overrides:
        config.update_from_string(flags.config_overrides)
    return config


def _folder(flags: ModelFlags) -> Path | None:
    """Where the model lies on this node; a repository is downloaded by one process of the node."""
    name = flags.model_name_or_path
    if name is None or Path(name).is_dir():
        return Path(name) if name is not None else None

    def download() -> str:
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
        try:
            return str(snapshot_download(name, revision=flags.model_revision, cache_dir=flags.cache_dir, token=flags.token, allow_patterns=wanted))
        except Exception as error:  # of the hub's client, whose classes differ between releases
            raise UsageError(f"{name} is no folder, and cannot be had from the Hub: {error}") from error

    return Path(once(download, "node", DOWNLOAD_DEADLINE_S))
