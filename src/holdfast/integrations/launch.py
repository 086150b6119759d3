"""Starts the ranks that an accelerate config describes: `holdfast launch`.

Everything that can be known to be wrong is found before any rank exists and reported at once. Then
`torch.distributed.run` starts `python -m holdfast ...` per rank with the variables that `accelerate launch` would set,
and ACCELERATE_USE_CPU, which that one forgets beside FSDP: without it the ranks of a machine without accelerators are
runs of their own. SIGTERM, SIGINT, SIGHUP and SIGQUIT go on to the ranks; the exit code is the first failed rank's.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.integrations import accelerate_config, cpu_ranks
from holdfast.integrations.accelerate_config import AccelerateConfig

logger = logging.getLogger(__name__)

VISIBILITY = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
# As shells report a process that a signal ended.
SIGNAL_EXIT_BASE = 128


@dataclass(frozen=True)
class Launch:
    """What is to be started on this machine: the options of `torch.distributed.run`, and the ranks' environment."""

    options: tuple[str, ...]
    environment: dict[str, str]


def plan(
    config_file: Path, num_processes: int | None = None, nproc_per_node: int | None = None, cpu_fsdp: bool = False
) -> Launch:
    """Check the config file, the flags and this machine; raises one UsageError with everything that is wrong.

    `num_processes` counts the ranks of all machines, as in the file, which it overrides; `nproc_per_node` those of each.
    """
    config = accelerate_config.read(config_file)
    machines = max(1, config.whole("num_machines", 1))
    if num_processes is not None and nproc_per_node is not None:
        config.problems.append("--num_processes and --nproc_per_node say the same; give one of them.")
    total = nproc_per_node * machines if nproc_per_node else num_processes or config.whole("num_processes", 0)
    if config.distributed_type == "NO" and "num_processes" not in config.values and not total:
        total = 1
    _check_counts(config, total, machines)
    _check_devices(config, total // machines, cpu_ranks.requested(cpu_fsdp))
    config.raise_problems()
    for line in config.warnings:
        logger.warning(line)
    return Launch(_options(config, total // machines, machines), _environment(config, total // machines))


def _check_counts(config: AccelerateConfig, total: int, machines: int) -> None:
    where = config.where("num_processes")
    if total < 1:
        config.problems.append(
            f"{where}the number of ranks is {total}; give `num_processes` or --num_processes, 1 or more."
        )
    elif total % machines:
        config.problems.append(f"{where}{total} ranks cannot be split evenly over {machines} machines.")
    if config.distributed_type == "NO" and total > 1:
        config.problems.append(
            f"{config.where('distributed_type')}`distributed_type: NO` means one process, but there are {total} ranks; "
            "set FSDP (sharded), MULTI_GPU or MULTI_CPU (replicated)."
        )
    if machines > 1:
        for key in ("main_process_ip", "main_process_port"):
            if config.values.get(key) is None:
                config.problems.append(
                    f"`{key}` is missing; with {machines} machines the ranks need it to find rank 0."
                )
        if not 0 <= config.whole("machine_rank", 0) < machines:
            config.problems.append(f"{config.where('machine_rank')}`machine_rank` has to be from 0 to {machines - 1}.")


def _check_devices(config: AccelerateConfig, local: int, cpu_fsdp: bool) -> None:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if device is not None else 0
    fsdp = config.distributed_type == "FSDP"
    if device is not None and config.use_cpu:
        hide = VISIBILITY.get(device.type)
        config.problems.append(
            f"{config.where('use_cpu')}`use_cpu: true` is a mistake on this machine, which has {count} {device.type} "
            f"device(s). Set `use_cpu: false`"
            + (f', or hide them to train on the CPU: {hide}="" holdfast launch ...' if hide else ".")
        )
    elif device is None and not config.use_cpu and (fsdp or config.distributed_type.startswith("MULTI_")):
        config.problems.append(
            f"{config.where('use_cpu')}no accelerator is visible on this machine. Set `use_cpu: true` for CPU ranks, or "
            "check the driver and variables such as CUDA_VISIBLE_DEVICES."
        )
    elif device is None and fsdp and not cpu_fsdp:
        config.problems.append(
            f"{config.where('distributed_type')}Accelerate ignores FSDP on CPU ranks and would train a whole copy of the "
            f"model in each. Add --cpu_fsdp (or set {cpu_ranks.VARIABLE}=1) to shard over CPU ranks."
        )
    elif device is not None and cpu_fsdp:
        config.problems.append(
            f"--cpu_fsdp (or {cpu_ranks.VARIABLE}) is for machines without accelerators; this one has {count} "
            f"{device.type} device(s). Leave it out."
        )
    elif device is not None and local > count:
        config.problems.append(
            f"{config.where('num_processes')}{local} ranks on this machine, but {count} {device.type} device(s) are "
            f"visible; give --nproc_per_node {count} or less."
        )


def _options(config: AccelerateConfig, local: int, machines: int) -> tuple[str, ...]:
    options = [f"--nproc_per_node={local}", f"--nnodes={machines}"]
    port = config.values.get("main_process_port")
    if machines > 1:
        address = config.values["main_process_ip"]
        options.append(f"--node_rank={config.whole('machine_rank', 0)}")
        if accelerate_config.is_true(config.values.get("same_network")):
            options += [f"--master_addr={address}", f"--master_port={port}"]
        else:
            options.append(f"--rdzv_endpoint={address}:{port}")
        options.append(f"--rdzv_backend={config.values.get('rdzv_backend') or 'static'}")
    elif port:
        options += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    else:
        # A free port, so that two runs on one machine never meet; by address, since a host's name may not resolve.
        options += ["--standalone", "--local_addr=127.0.0.1"]
    return tuple(options)


def _environment(config: AccelerateConfig, local: int) -> dict[str, str]:
    environment = config.environment()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // local) if config.use_cpu else 1
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    devices = str(config.values.get("gpu_ids") or "all")
    if devices != "all" and not config.use_cpu:
        import torch

        device = torch.accelerator.current_accelerator()
        environment[VISIBILITY.get(device.type if device else "cuda", "CUDA_VISIBLE_DEVICES")] = devices
    return environment


def start(launch: Launch, arguments: list[str]) -> int:
    """Run `python -m holdfast ARGUMENTS` on the ranks until all have ended; returns their exit code.

    That is 0, or the first failed rank's: 128 + n where signal n ended it, or ended the launch.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    run: Any = import_module("torch.distributed.run")  # untyped
    os.environ.update(launch.environment)
    try:
        run.run(run.parse_args([*launch.options, "--module", "holdfast", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else SIGNAL_EXIT_BASE - failure.exitcode
        logger.error("rank %d ended first, with exit code %d; its own message stands above", rank, code)
        return int(code)
    except SignalException as error:
        return SIGNAL_EXIT_BASE + int(error.sigval)
    return 0
