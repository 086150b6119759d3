"""Fine-tuning under FSDP whose checkpoints hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.engine.checkpointer import Checkpointer as Checkpointer
    from holdfast.engine.dataloader import DataLoader as DataLoader
    from holdfast.engine.pretrained import load_pretrained as load_pretrained
    from holdfast.engine.shard import shard as shard

# Public names and where they live; imported at first use, so that `holdfast --help` needs no torch.
_PUBLIC = {
    "Checkpointer": "holdfast.engine.checkpointer",
    "DataLoader": "holdfast.engine.dataloader",
    "load_pretrained": "holdfast.engine.pretrained",
    "shard": "holdfast.engine.shard",
}
__all__ = ["Checkpointer", "DataLoader", "__version__", "load_pretrained", "shard"]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
