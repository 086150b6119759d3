"""FSDP on CPU ranks under Accelerate, so that tests, demos and dry runs shard for real without a GPU.

Accelerate accepts an FSDP plugin on CPU ranks and ignores it: its list of distributed types that may become FSDP has no
MULTI_CPU, and the run silently is a DDP one. `enable` adds that one case, around two constructors:

- the plugin's: what torch refuses without an accelerator is replaced by what comes to the same on a host. Parameters
  are in host memory anyway, so offloading is done (FSDP1) or needs no pinned memory (FSDP2); FSDP1's
  `sync_module_states` wants a device, so every rank loads its weights itself;
- the state's: MULTI_CPU with a plugin becomes FSDP, and the device is `cpu` without an index, which FSDP1 insists on.

Off unless asked for: `--cpu_fsdp`, or HOLDFAST_CPU_FSDP=1.
"""

from __future__ import annotations

import functools
import logging
import os
from importlib import import_module
from typing import Any

from holdfast.errors import UsageError

logger = logging.getLogger(__name__)

VARIABLE = "HOLDFAST_CPU_FSDP"
# Releases of Accelerate with which the tests have run. The patched places are internal, so any other is a guess.
TRIED_RELEASES = ("1.15",)


def requested(flag: bool = False) -> bool:
    """Whether FSDP on CPU ranks was asked for, by the flag or by the environment."""
    return flag or os.environ.get(VARIABLE, "").lower() in ("1", "true", "yes")


def join_without_accelerator() -> None:
    """Make the processes that torchrun or `accelerate launch` started one run where there is no accelerator.

    Accelerate takes each of them for a run of its own there (no backend, one process), unless it was told to use the
    CPU. To be called before the `Accelerator` is made; does nothing beside an accelerator or in a single process.
    Raises `UsageError` in the one process that `accelerate launch` starts for a config with more of them.
    """
    import torch

    if torch.accelerator.is_available():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    elif _alone_among_many():
        raise UsageError(
            "The accelerate config asks for several CPU processes, but `accelerate launch` starts only one unless "
            "`distributed_type` is FSDP. Start them with: holdfast launch --config_file C train ... (If one process is "
            "meant: num_processes: 1, and unset MASTER_ADDR.)"
        )


def _alone_among_many() -> bool:
    """`accelerate launch` names the place of rank 0 to a single process only if the config has more, and then MPI is
    meant to have started this one."""
    started_by_mpi = any(name in os.environ for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"))
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return on_cpu and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ and not started_by_mpi


def enable() -> None:
    """Let Accelerate shard over CPU ranks. To be called on every rank before the plugin or `Accelerator` is made.

    Raises `UsageError` beside a present accelerator, where FSDP would take that one. Calling it twice is harmless.
    """
    import accelerate
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        raise UsageError(
            f"FSDP on CPU ranks (--cpu_fsdp, {VARIABLE}) was asked for on a machine with an accelerator ({device.type}), "
            f"which FSDP would use instead. Leave the flag out and set `use_cpu: false`, or hide the accelerator, as in: "
            f'CUDA_VISIBLE_DEVICES="" holdfast ...'
        )
    if not accelerate.__version__.startswith(tuple(f"{release}." for release in TRIED_RELEASES)):
        _say(
            f"FSDP on CPU ranks was never tried with accelerate {accelerate.__version__} (tried: "
            f"{', '.join(TRIED_RELEASES)}). If it fails: pip install 'accelerate~={TRIED_RELEASES[-1]}.0'"
        )
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    dataclasses: Any = import_module("accelerate.utils.dataclasses")
    state: Any = import_module("accelerate.state")
    _wrap(dataclasses.FullyShardedDataParallelPlugin, "__post_init__", _plugin_post_init)
    _wrap(state.AcceleratorState, "__init__", _state_init)


def _wrap(owner: type, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    if getattr(original, "_holdfast", False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        replacement(original, self, *args, **kwargs)

    wrapped._holdfast = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _plugin_post_init(original: Any, plugin: Any) -> None:
    """`FullyShardedDataParallelPlugin.__post_init__`, with what needs a device replaced."""
    version = plugin.fsdp_version or int(os.environ.get("FSDP_VERSION", "1"))
    replaced = []
    if version == 1 and any(_asked(plugin, field) for field in ("sync_module_states", "cpu_ram_efficient_loading")):
        # Both: efficient loading leaves all ranks but 0 empty and would switch the other one on again.
        plugin.sync_module_states = plugin.cpu_ram_efficient_loading = False
        replaced.append("every rank loads its weights itself (sync_module_states needs a device)")
    original(plugin)
    if version == 1 and plugin.cpu_offload.offload_params:
        from torch.distributed.fsdp import CPUOffload

        plugin.cpu_offload = CPUOffload(offload_params=False)
        replaced.append("parameters are in host memory already, so offloading is done")
    elif version == 2 and getattr(plugin.cpu_offload, "pin_memory", False):
        from torch.distributed.fsdp import CPUOffloadPolicy

        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        replaced.append("parameters are offloaded without pinned memory")
    if replaced:
        _say("FSDP on CPU ranks: " + "; ".join(replaced))


def _asked(plugin: Any, field: str) -> bool:
    value = getattr(plugin, field)
    if value is None:
        value = os.environ.get(f"FSDP_{field.upper()}", "")
    return str(value).lower() in ("1", "true", "yes", "y", "t", "on")  # the words that Accelerate takes for true


def _state_init(original: Any, state: Any, *args: Any, **kwargs: Any) -> None:
    """`AcceleratorState.__init__`, with FSDP where an FSDP plugin meets CPU ranks."""
    import torch

    module: Any = import_module("accelerate.state")
    first = not state._shared_state or not state.initialized  # a PartialState may be there before (the Trainer makes one)
    original(state, *args, **kwargs)
    plugin = kwargs.get("fsdp_plugin")
    if not first or state.distributed_type != module.DistributedType.MULTI_CPU:
        return
    if plugin is None:
        _say("FSDP on CPU ranks was asked for, but the accelerate config has no `distributed_type: FSDP`: no effect")
        return
    for shared in (state.__dict__, module.PartialState._shared_state):
        shared["distributed_type"] = module.DistributedType.FSDP
        shared["device"] = torch.device("cpu")
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.fsdp_plugin = plugin


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning(line)
