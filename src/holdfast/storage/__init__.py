"""Where checkpoints lie: a small protocol, and the local folder that fulfils it."""

from holdfast.storage.base import FileWriter, Storage
from holdfast.storage.local import LocalFolder

__all__ = ["FileWriter", "LocalFolder", "Storage"]
