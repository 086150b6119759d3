"""The random number generators of one rank: Python's, NumPy's, torch's on the CPU and on the current device."""

from __future__ import annotations

import random
import sys
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.documents import Json, digest
from holdfast.engine import statetree
from holdfast.errors import CorruptCheckpoint


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


@dataclass(frozen=True, slots=True)
class Generators:
    """States of generators, as those take them; None stands for one that was not saved. `seed` is what torch's began with."""

    python: tuple[Any, ...]
    cpu: torch.Tensor
    numpy: Any
    device: torch.Tensor | None
    seed: object


def parse(document: Json, what: str) -> Generators:
    """What `capture` gave. Each state is tried on a generator of its own: nothing is put back that is none.

    Raises:
        CorruptCheckpoint: it is no such document.
    """
    state = statetree.decode(document, what, _no_tensors)
    try:
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
        version, internal, gauss = state["python"]
        if not (gauss is None or type(gauss) is float):
            raise TypeError(f"{gauss!r:.60} for the pending number")
        words = array("I")
        words.frombytes(internal)
        python = (version, tuple(words), gauss)
        random.Random().setstate(python)
        cpu = _as_bytes(state["torch"])
        torch.Generator().set_state(cpu)
        device = _as_bytes(state["device"]) if "device" in state else None
        return Generators(python, cpu, _numpy_state(state.get("numpy")), device, state.get("seed", 0))
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CorruptCheckpoint(f"{what} cannot be put back ({type(error).__name__}: {str(error).splitlines()[0]:.200})") from error


def restore(document: Json, what: str) -> None:
    """Put the generators back that `capture` gave; errors as with `parse`."""
    put(parse(document, what))


def put(state: Generators) -> None:
    """Those of a device type that is not here stay as they are."""
    random.setstate(state.python)
    torch.set_rng_state(state.cpu)
    if state.numpy is not None and _has_numpy():
        import numpy as np

        np.random.set_state(state.numpy)
    device = accelerator()
    if state.device is not None and device is not None:
        torch.get_device_module(device).set_rng_state(state.device)


def seed_for(document: Json, step: int, rank: int, what: str) -> int:
    """A seed for a rank that the saved run did not have, from the seed that another rank had begun with.

    The step is in it, too, so that the rank does not draw again what one of its number drew at an earlier step.
    """
    return int(digest(f"{parse(document, what).seed} {step} {rank}".encode())[:15], 16)


def _as_bytes(value: object) -> torch.Tensor:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r:.60} for bytes")
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _numpy_state(value: Any) -> Any:
    """NumPy does not look where in its numbers the generator is said to stand."""
    if value is None or not _has_numpy():
        return value
    import numpy as np

    if isinstance(value, dict):  # a generator that the user has put in place of NumPy's own, whose name alone can be checked
        if value.get("bit_generator") != np.random.get_state(legacy=False)["bit_generator"] or value["bit_generator"] == "MT19937":
            raise ValueError(f"NumPy's generator is no {value.get('bit_generator')!r:.60} here")
        return value
    name, numbers, position, pending, gauss = value
    if type(position) is not int or not 0 <= position <= len(numbers) or type(pending) is not int or type(gauss) is not float:
        raise ValueError("its generator stands nowhere")
    np.random.RandomState().set_state((name, numbers, position, pending, gauss))
    return value


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
    raise CorruptCheckpoint(f"the state of the generators speaks of a tensor {name!r:.60}")
