"""Pickles of strangers, read so that no code of theirs can run: tensors, numbers, strings, containers, NumPy arrays.

torch's `weights_only` unpickler builds what it has on a list and nothing else. Two classes are added here for the time of
one call: NumPy's arrays (accelerate and Trainer keep NumPy's generator in one) and nothing more. Tensors are mapped from
the file, so a checkpoint larger than the memory can be read tensor by tensor.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from codecs import encode
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def load_pickle(path: Path) -> Any:
    """The content of a file that `torch.save` wrote; its tensors are on the CPU and mapped where the file allows it.

    Raises:
        IncompatibleCheckpoint: it holds an object of a class that is not on the list; the message names file and class.
        CorruptCheckpoint: it is no such file, or it is cut short.
    """
    return _load(path, str(path), mmap=zipfile.is_zipfile(path))


def load_pickle_from(stream: io.RawIOBase, what: str) -> Any:
    """The same from an open stream."""
    return _load(io.BufferedReader(stream), what, mmap=False)


def _load(source: Any, what: str, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_arrays()):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        found = _REFUSED.search(str(error))
        if found is None:
            raise CorruptCheckpoint(f"{what} cannot be read: {str(error).splitlines()[0]}") from error
        raise IncompatibleCheckpoint(
            f"{what} is refused: it is a pickle with an object of {found[1]}, and unpickling a class means running its code; "
            "only tensors, numbers, strings, containers and NumPy arrays are read"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise CorruptCheckpoint(f"{what} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}") from error


def _arrays() -> list[Any]:
    try:
        import numpy as np
    except ImportError:
        return []
    core = np._core if hasattr(np, "_core") else np.core
    kinds = [np.dtypes.UInt32DType, np.dtypes.Int64DType, np.dtypes.Float64DType, np.dtypes.Float32DType]
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, encode, *kinds]
