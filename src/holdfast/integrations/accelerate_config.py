"""Reads an accelerate config (YAML): every problem in it at once, with lines and remedies, and its environment.

Accelerate's own reader stops at the first unknown key, never looks at types, and starts the ranks before a wrong value
shows. Here the file is checked as a whole against the tables below, which hold for each key what it may be and, where
`accelerate launch` hands it to the ranks, in which variable and with which default. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from holdfast.errors import UsageError

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Kind:
    """What a value may be: in words, and as a test."""

    words: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Key:
    """One key of a block; `variable` and `default` as `accelerate launch` has them, None where it sets none."""

    kind: Kind
    variable: str | None = None
    default: str | None = None


def _word(value: Any) -> str:
    """YAML reads a bare `no`, of `mixed_precision: no` or `distributed_type: NO`, as false."""
    return "no" if value is False else str(value)


def one_of(*words: str) -> Kind:
    known = [word.upper() for word in words]
    return Kind(
        "one of " + ", ".join(words), lambda value: not {str(value).upper(), _word(value).upper()}.isdisjoint(known)
    )


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and str(value).lstrip("-").isdigit()


BOOL = Kind("true or false", lambda value: isinstance(value, bool) or str(value).lower() in (*TRUE_WORDS, *FALSE_WORDS))
WHOLE = Kind("a whole number", _is_whole)
TEXT = Kind("text", lambda value: isinstance(value, str | int | float) and not isinstance(value, bool))
BACKEND = Kind("the name of a backend, or no", lambda value: value is False or isinstance(value, str))
BLOCK = Kind("a block of indented keys", lambda value: isinstance(value, dict))
ANY = Kind("anything", lambda value: True)
STRATEGY = one_of("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", *"12345")

LAUNCHED_TYPES = ("NO", "FSDP", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU")
OTHER_TYPES = ("DEEPSPEED", "MEGATRON_LM", "XLA", "TPU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_NEURON")

TOP = {
    "compute_environment": Key(one_of("LOCAL_MACHINE", "AMAZON_SAGEMAKER")),
    "distributed_type": Key(one_of(*LAUNCHED_TYPES, *OTHER_TYPES)),
    "mixed_precision": Key(one_of("no", "fp16", "bf16", "fp8")),
    "use_cpu": Key(BOOL),
    "debug": Key(BOOL),
    "num_processes": Key(WHOLE),
    "num_machines": Key(WHOLE),
    "machine_rank": Key(WHOLE),
    "gpu_ids": Key(TEXT),
    "main_process_ip": Key(TEXT),
    "main_process_port": Key(WHOLE),
    "rdzv_backend": Key(TEXT),
    "same_network": Key(BOOL),
    "main_training_function": Key(TEXT),
    "enable_cpu_affinity": Key(BOOL),
    "fsdp_config": Key(BLOCK),
    "dynamo_config": Key(BLOCK),
    "parallelism_config": Key(BLOCK),
    "dynamo_backend": Key(BACKEND),
    "fp16": Key(BOOL),
    # Written by `accelerate config` into every file, of no meaning for the runs that are started here.
    **dict.fromkeys(
        ("deepspeed_config", "megatron_lm_config", "fp8_config", "mpirun_config", "downcast_bf16"), Key(ANY)
    ),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), Key(ANY)),
    **dict.fromkeys(("command_file", "commands"), Key(ANY)),
}

FSDP = {
    "fsdp_version": Key(one_of("1", "2"), "FSDP_VERSION", "1"),
    "fsdp_sharding_strategy": Key(STRATEGY, "FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
    "fsdp_reshard_after_forward": Key(
        one_of(*TRUE_WORDS[:1], *FALSE_WORDS[:1], "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"),
        "FSDP_RESHARD_AFTER_FORWARD",
        "true",
    ),
    "fsdp_offload_params": Key(BOOL, "FSDP_OFFLOAD_PARAMS", "false"),
    "fsdp_min_num_params": Key(WHOLE, "FSDP_MIN_NUM_PARAMS", "100000000"),
    "fsdp_auto_wrap_policy": Key(
        one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), "FSDP_AUTO_WRAP_POLICY"
    ),
    "fsdp_transformer_layer_cls_to_wrap": Key(TEXT, "FSDP_TRANSFORMER_CLS_TO_WRAP"),
    "fsdp_backward_prefetch": Key(one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), "FSDP_BACKWARD_PREFETCH"),
    "fsdp_state_dict_type": Key(
        one_of("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", *"123"), "FSDP_STATE_DICT_TYPE"
    ),
    "fsdp_forward_prefetch": Key(BOOL, "FSDP_FORWARD_PREFETCH", "false"),
    "fsdp_use_orig_params": Key(BOOL, "FSDP_USE_ORIG_PARAMS", "true"),
    "fsdp_cpu_ram_efficient_loading": Key(BOOL, "FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
    "fsdp_sync_module_states": Key(BOOL, "FSDP_SYNC_MODULE_STATES", "true"),
    "fsdp_activation_checkpointing": Key(BOOL, "FSDP_ACTIVATION_CHECKPOINTING", "false"),
    "fsdp_activation_checkpointing_offload": Key(BOOL, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
    "fsdp_ignored_modules": Key(TEXT, "FSDP_IGNORED_MODULES"),
}
# What FSDP2 has no use for; Accelerate passes over it.
FSDP1_ONLY = (
    "fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params",
    "fsdp_sync_module_states",
)  # fmt: skip

DYNAMO = {
    "dynamo_backend": Key(BACKEND, "ACCELERATE_DYNAMO_BACKEND", "NO"),
    "dynamo_mode": Key(TEXT, "ACCELERATE_DYNAMO_MODE", "default"),
    "dynamo_use_fullgraph": Key(BOOL, "ACCELERATE_DYNAMO_USE_FULLGRAPH", "False"),
    "dynamo_use_dynamic": Key(BOOL, "ACCELERATE_DYNAMO_USE_DYNAMIC", "False"),
    "dynamo_use_regional_compilation": Key(BOOL, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False"),
}

_SIZES = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")
PARALLELISM = {
    **{f"parallelism_config_{size.lower()}": Key(WHOLE, f"PARALLELISM_CONFIG_{size}", "1") for size in _SIZES},
    "parallelism_config_cp_backend": Key(TEXT, "PARALLELISM_CONFIG_CP_BACKEND", "torch"),
    "parallelism_config_sp_backend": Key(TEXT, "PARALLELISM_CONFIG_SP_BACKEND", "deepspeed"),
    "parallelism_config_cp_comm_strategy": Key(TEXT, "PARALLELISM_CONFIG_CP_COMM_STRATEGY"),
    "parallelism_config_sp_seq_length": Key(WHOLE, "PARALLELISM_CONFIG_SP_SEQ_LENGTH"),
    "parallelism_config_sp_seq_length_is_variable": Key(BOOL, "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"),
    "parallelism_config_sp_attn_implementation": Key(TEXT, "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"),
}

# Block -> the prefix that its keys may leave out, and the keys.
BLOCKS = {
    "fsdp_config": ("fsdp_", FSDP),
    "dynamo_config": ("dynamo_", DYNAMO),
    "parallelism_config": ("parallelism_config_", PARALLELISM),
}


def is_true(value: Any) -> bool:
    return str(value).lower() in TRUE_WORDS


@dataclass
class AccelerateConfig:
    """A config file that was read; `problems` and `warnings` are lines for its owner, and may be added to."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in BLOCKS})
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def distributed_type(self) -> str:
        value = self.values.get("distributed_type")
        return "" if value is None else _word(value).upper()

    @property
    def use_cpu(self) -> bool:
        return is_true(self.values.get("use_cpu"))

    def whole(self, key: str, default: int) -> int:
        value = self.values.get(key)
        return int(value) if value is not None and _is_whole(value) else default

    def where(self, key: str) -> str:
        """`line 7: `, for messages; nothing for what is not in the file."""
        return f"line {self.lines[key]}: " if key in self.lines else ""

    def raise_problems(self) -> None:
        """Raise one UsageError with all problems, if there are any."""
        if self.problems:
            listed = "\n".join(f"  - {problem}" for problem in self.problems)
            raise UsageError(
                f"The accelerate config {self.path} cannot be used as it stands, {len(self.problems)} thing(s) to "
                f"correct:\n{listed}"
            )

    def environment(self) -> dict[str, str]:
        """The variables that `accelerate launch` sets on each rank for this file."""
        precision = self.values.get("mixed_precision") or ("fp16" if is_true(self.values.get("fp16")) else "no")
        environment = {"ACCELERATE_MIXED_PRECISION": _word(precision).lower()}
        dynamo = {"dynamo_backend": self.values.get("dynamo_backend"), **self.blocks["dynamo_config"]}
        dynamo["dynamo_backend"] = _word(dynamo["dynamo_backend"] or "no").upper()
        environment |= _variables(DYNAMO, dynamo)
        if is_true(self.values.get("debug")):
            environment["ACCELERATE_DEBUG_MODE"] = "true"
        if self.use_cpu:
            environment["ACCELERATE_USE_CPU"] = "true"
        if self.distributed_type == "FSDP":
            fsdp = _variables(FSDP, self.blocks["fsdp_config"])
            environment |= {"ACCELERATE_USE_FSDP": "true"}
            environment |= {
                name: value.lower() if value in ("True", "False") else value for name, value in fsdp.items()
            }
        if self.blocks["parallelism_config"]:
            environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
            environment |= _variables(PARALLELISM, self.blocks["parallelism_config"])
        return environment


def _variables(table: dict[str, Key], block: dict[str, Any]) -> dict[str, str]:
    values = {key.variable: block.get(name, key.default) for name, key in table.items() if key.variable}
    return {variable: str(value) for variable, value in values.items() if value is not None}


def read(path: Path) -> AccelerateConfig:
    """Read and check the file. Only a file that is no YAML mapping raises (UsageError); see `problems` for the rest."""
    config = AccelerateConfig(path)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The accelerate config {path} cannot be read: {error}. Give its path: --config_file PATH"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(
            f"The accelerate config {path} is no YAML: {where}{getattr(error, 'problem', error)}"
        ) from error
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(
            f"The accelerate config {path} holds no keys. `accelerate config --config_file {path}` makes one."
        )
    _collect(config, root, loaded, text.splitlines())
    _check_values(config)
    _check_relations(config)
    return config


def _collect(config: AccelerateConfig, root: yaml.MappingNode, loaded: dict[str, Any], text: list[str]) -> None:
    """Sort the keys into the top level and the blocks, with their lines."""
    strays: dict[str, list[str]] = {}
    for key, line in _keys(config, root):
        config.lines[key] = line
        value = loaded.get(key)
        block = next((block for block in BLOCKS if key not in TOP and _canonical(block, key)), None)
        if block is not None:
            strays.setdefault(block, []).append(key)
            config.blocks[block][_canonical(block, key) or key] = value
        else:
            config.values[key] = value
    for node_key, node in root.value:
        block = node_key.value
        if block not in BLOCKS or not isinstance(node, yaml.MappingNode):
            continue
        for key, line in _keys(config, node):
            config.lines[f"{block}.{key}"] = line
            name = _canonical(block, key)
            if name is None:
                config.problems.append(
                    f"line {line}: unknown key `{key}` in `{block}`{_nearest(key, BLOCKS[block][1])}"
                )
            elif loaded[block][key] is not None:
                config.blocks[block][name] = loaded[block][key]
                config.lines[name] = line
    for block, keys in strays.items():
        config.problems.append(_unindented(config, block, keys, text))


def _keys(config: AccelerateConfig, node: yaml.MappingNode) -> Iterator[tuple[str, int]]:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            config.problems.append(f"line {line}: `{key}` stands on line {seen[key]} already; keep one of the two.")
        seen.setdefault(key, line)
        yield key, line


def _canonical(block: str, key: str) -> str | None:
    """The name of a key of that block, whose prefix may be left out; None for a key that it does not have."""
    prefix, table = BLOCKS[block]
    return next((name for name in (key, prefix + key) if name in table), None)


def _nearest(key: str, known: dict[str, Key]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else "; remove it."


def _unindented(config: AccelerateConfig, block: str, keys: list[str], text: list[str]) -> str:
    """The file as it is often pasted: the keys of a block at the left margin, and nothing under the block's name."""
    lines = [config.lines[key] for key in keys]
    span = f"line {lines[0]}" if len(lines) == 1 else f"lines {_ranges(lines)}"
    header = f"`{block}:` (line {config.lines[block]})" if block in config.lines else f"`{block}:`, which is missing"
    shown = "\n".join(["", f"      {block}:", *(f"        {text[line - 1].strip()}" for line in lines)])
    return f"{span}: these keys belong under {header}, so they have to be indented. Write:{shown}"


def _ranges(lines: list[int]) -> str:
    """`4-8, 11` for consecutive lines."""
    runs: list[list[int]] = []
    for line in sorted(lines):
        if runs and line == runs[-1][-1] + 1:
            runs[-1].append(line)
        else:
            runs.append([line])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _check_values(config: AccelerateConfig) -> None:
    for key, value in config.values.items():
        if key not in TOP:
            config.problems.append(f"{config.where(key)}unknown key `{key}`{_nearest(key, TOP)}")
        else:
            _check_value(config, key, TOP[key].kind, value)
    for block, values in config.blocks.items():
        for key, value in values.items():
            _check_value(config, key, BLOCKS[block][1][key].kind, value)


def _check_value(config: AccelerateConfig, key: str, kind: Kind, value: Any) -> None:
    if value is not None and not kind.accepts(value):
        config.problems.append(f"{config.where(key)}`{key}` is {value!r}; it has to be {kind.words}.")


def _check_relations(config: AccelerateConfig) -> None:
    values, fsdp = config.values, config.blocks["fsdp_config"]
    kind = config.distributed_type
    instead = f"start this run with `accelerate launch --config_file {config.path} -m holdfast ...`"
    if not kind:
        config.problems.append(
            "`distributed_type` is missing; FSDP shards, MULTI_GPU and MULTI_CPU replicate, NO is one process."
        )
    elif kind in OTHER_TYPES:
        config.problems.append(f"{config.where('distributed_type')}`holdfast launch` starts no {kind} runs; {instead}.")
    if str(values.get("compute_environment", "LOCAL_MACHINE")).upper() == "AMAZON_SAGEMAKER":
        config.problems.append(
            f"{config.where('compute_environment')}`holdfast launch` starts runs on its own machine; {instead}."
        )
    if str(values.get("mixed_precision")).lower() == "fp8":
        config.problems.append(f"{config.where('mixed_precision')}fp8 needs what only accelerate sets up; {instead}.")
    if is_true(fsdp.get("fsdp_cpu_ram_efficient_loading")) and fsdp.get("fsdp_sync_module_states") in (False, "false"):
        config.problems.append(
            f"{config.where('fsdp_cpu_ram_efficient_loading')}`fsdp_cpu_ram_efficient_loading: true` leaves every rank "
            "but 0 without weights unless `fsdp_sync_module_states` is true too; set both, or neither."
        )
    if str(fsdp.get("fsdp_version", 1)) == "2":
        unused = [key for key in FSDP1_ONLY if key in fsdp]
        if unused:
            config.warnings.append(f"FSDP2 has no use for {', '.join(unused)}: no effect.")
    if is_true(values.get("enable_cpu_affinity")):
        config.warnings.append(
            "`enable_cpu_affinity` has no effect in a config file: accelerate takes it as a flag only."
        )
    if kind not in ("FSDP", "") and fsdp:
        config.warnings.append(f"`fsdp_config` has no effect beside `distributed_type: {kind}`.")
