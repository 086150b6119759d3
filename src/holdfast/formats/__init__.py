"""Foreign checkpoints in, exports out."""

from holdfast.formats.recognise import recognise

__all__ = ["recognise"]
