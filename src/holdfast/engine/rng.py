"""The random number generators of one rank: Python's, NumPy's, torch's on the CPU and on the current device."""

from __future__ import annotations

import random
import sys
from array import array

import torch

from holdfast.core.documents import Json, digest
from holdfast.engine import statetree


def capture() -> Json:
    """The state of all generators of this process, as JSON. Costs about a tenth of a millisecond."""
    version, internal, gauss = random.getstate()
    state: dict[str, object] = {
        "python": (version, array("I", internal).tobytes(), gauss),
        "torch": torch.get_rng_state().numpy().tobytes() if _has_numpy() else bytes(torch.get_rng_state().tolist()),
        "seed": torch.initial_seed(),
    }
    if _has_numpy():
        import numpy as np

        state["numpy"] = np.random.get_state()
    device = accelerator()
    if device is not None:
        state["device"] = bytes(torch.get_device_module(device).get_rng_state().tolist())
    return statetree.encode(state, "rng", "rng", {})


def restore(document: Json, what: str) -> None:
    """Put the generators back; those of a device type that is not here stay as they are."""
    state = statetree.decode(document, what, _no_tensors)
    assert isinstance(state, dict)
    version, internal, gauss = state["python"]
    words = array("I")
    words.frombytes(internal)
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "numpy" in state and _has_numpy():
        import numpy as np

        np.random.set_state(state["numpy"])
    device = accelerator()
    if "device" in state and device is not None:
        restored = torch.frombuffer(bytearray(state["device"]), dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(restored)


def seed_for(document: Json, step: int, rank: int, what: str) -> int:
    """A seed for a rank that the saved run did not have, from the seed that another rank had begun with.

    The step is in it, too, so that the rank does not draw again what one of its number drew at an earlier step.
    """
    state = statetree.decode(document, what, _no_tensors)
    assert isinstance(state, dict)
    return int(digest(f"{state.get('seed', 0)} {step} {rank}".encode())[:15], 16)


def reseed(seed: int) -> None:
    """Start all generators anew: a rank that the saved run did not have."""
    random.seed(seed)
    torch.manual_seed(seed)
    if _has_numpy():
        import numpy as np

        np.random.seed(seed % (1 << 32))


def accelerator() -> torch.device | None:
    """The current accelerator, if this process has one and torch knows how to speak of it in general."""
    if not hasattr(torch, "accelerator"):
        return None
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _has_numpy() -> bool:
    # Who never imported NumPy drew no number from it; importing it here would be a cost at the first save.
    return "numpy" in sys.modules


def _no_tensors(name: str) -> torch.Tensor:
    raise KeyError(name)
