"""What kind of checkpoint a folder is, by the names in it: nothing is opened."""

from __future__ import annotations

import re

from holdfast.storage import Storage

NATIVE = "a Holdfast checkpoint"
ACCELERATE = "an accelerate checkpoint"
TRAINER = "a transformers Trainer checkpoint"
DCP = "a torch.distributed.checkpoint folder"
WEIGHTS = "a folder of Hugging Face weights"

_ACCELERATE = re.compile(
    r"random_states_\d+\.pkl|pytorch_model_fsdp(_\d+)?(\.bin)?|pytorch_model_fsdp(_\d+)?_rank\d+\.bin|custom_checkpoint_\d+\.pkl"
)
_TRAINER = {"trainer_state.json", "training_args.bin"}
_WEIGHTS = re.compile(r"(model|pytorch_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?(\.[\w-]+)?\.(safetensors|bin)(\.index\.json)?")


def recognise(storage: Storage, folder: str) -> str | None:
    """One of the names above, or None for a folder that is none of these or is not there."""
    names = storage.names(folder)
    if "manifest.json" in names:
        return NATIVE
    if _TRAINER & set(names):
        return TRAINER
    if any(_ACCELERATE.fullmatch(name) for name in names):
        return ACCELERATE
    if ".metadata" in names:
        return DCP
    if any(_WEIGHTS.fullmatch(name) for name in names):
        return WEIGHTS
    return None
