"""The flags of text recipes: model and data under the names of transformers' run_clm.py, the training under those of its Trainer.

What the Trainer takes is read off the source of the installed transformers, so that help and wrong flags are answered without
torch. Old spellings are translated, with a warning.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError

LAYER = "fsdp_transformer_layer_cls_to_wrap"
"""An old flag of the Trainer; current ones take it inside `fsdp_config`."""

RESUME = "resume_from_checkpoint"


def _flag(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass
class ModelFlags:
    """Which model and tokenizer."""

    model_name_or_path: str | None = _flag(None, "Folder or Hub repository of the pretrained model.")
    model_type: str | None = _flag(None, "Train a new model of this type (llama, gpt2, ...) instead.")
    config_name: str | None = _flag(None, "Folder or repository of the config, if not the model's. Alone: of a new model.")
    config_overrides: str | None = _flag(None, "Changes to a new model's config: n_embd=10,summary_type=cls_index")
    tokenizer_name: str | None = _flag(None, "Folder or repository of the tokenizer, if not the model's.")
    cache_dir: str | None = _flag(None, "Where downloads are kept.")
    use_fast_tokenizer: bool = _flag(True, "Use the tokenizer that is written in Rust, where there is one.")
    model_revision: str = _flag("main", "Branch, tag or commit of the model's repository.")
    token: str | None = _flag(None, "Access token of the Hub. Default: the one of `hf auth login`.")
    trust_remote_code: bool = _flag(False, "Run code that lies in the repositories. Only for those that you trust.")
    dtype: str | None = _flag(None, "Dtype of the parameters: auto is that of the files. Default: float32.", choices=["auto", "bfloat16", "float16", "float32"])


@dataclass
class DataFlags:
    """Which texts, and how they are cut."""

    dataset_name: str | None = _flag(None, "Folder or Hub repository of the dataset.")
    dataset_config_name: str | None = _flag(None, "Its configuration.")
    train_file: str | None = _flag(None, "A txt, csv, json, jsonl or parquet file instead.")
    validation_file: str | None = _flag(None, "The same for the evaluation.")
    max_train_samples: int | None = _flag(None, "At most so many blocks are trained on.")
    max_eval_samples: int | None = _flag(None, "At most so many blocks are evaluated on.")
    streaming: bool = _flag(False, "Read the data while training, instead of all of it before. Needs --max_steps.")
    shuffle_buffer_size: int = _flag(0, "With --streaming: texts that are shuffled with each other. 0 keeps the stream's order.")
    block_size: int | None = _flag(None, "Tokens of a block. Default: what tokenizer and model take, at most 1024.")
    overwrite_cache: bool = _flag(False, "Tokenise again.")
    validation_split_percentage: int = _flag(5, "Of a dataset without a validation split, this part is never trained on. 0: all is trained on.")
    preprocessing_num_workers: int | None = _flag(None, "Processes that tokenise, without --streaming.")
    keep_linebreaks: bool = _flag(True, "Keep the line breaks of txt files.")


@dataclass
class HereFlags:
    """Of Holdfast."""

    cpu_fsdp: bool = _flag(False, "Shard over CPU ranks, on a machine without accelerators. HOLDFAST_CPU_FSDP=1 says the same.")


OWN = (ModelFlags, DataFlags, HereFlags)


@dataclass(frozen=True)
class TrainerFlag:
    """A flag of the Trainer, as its source has it."""

    type: str
    default: str
    help: str


@functools.cache
def trainer_flags() -> dict[str, TrainerFlag]:
    """What the installed transformers' TrainingArguments takes. Imports nothing of it."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise UsageError("the recipe needs transformers: pip install transformers")
    tree = ast.parse(Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    flags = {}
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.target.id.startswith("_"):
            continue
        words = {k.arg: k.value for k in node.value.keywords} if isinstance(node.value, ast.Call) else {}
        if "init" in words or "ClassVar" in ast.unparse(node.annotation):
            continue
        default = ast.unparse(words["default"]) if "default" in words else "" if words else ast.unparse(node.value) if node.value else ""
        flags[node.target.id] = TrainerFlag(ast.unparse(node.annotation), default, _help_in(words.get("metadata")))
    return flags


def _help_in(metadata: ast.expr | None) -> str:
    if isinstance(metadata, ast.Dict):
        for key, value in zip(metadata.keys, metadata.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "help":
                try:
                    return str(ast.literal_eval(value))
                except ValueError:  # put together while transformers is imported
                    return ""
    return ""


def help_text(prog: str) -> str:
    lines = [f"usage: {prog} [flags] (or one JSON file with them)"]
    for group in OWN:
        lines += ["", (group.__doc__ or "").rstrip(".") + ":"]
        for f in fields(group):
            default = "" if f.default in (None, False) else f" (default: {f.default})"
            lines.append(f"  --{f.name}  {f.metadata['help']}{default}")
    lines += ["", "Of transformers' Trainer:"]
    for name, flag in trainer_flags().items():
        first = flag.help.strip().split("\n")[0].split(". ")[0].rstrip(".")
        lines.append(f"  --{name}  {first}" + (f" (default: {flag.default})" if flag.default not in ("", "None", "False") else ""))
    return "\n".join(lines)


def flags_of(arguments: list[str], prog: str) -> list[str]:
    """The arguments, those of a JSON file included, in today's spelling; unknown ones are named with the nearest known."""
    if len(arguments) == 1 and arguments[0].endswith(".json"):
        arguments = _of_file(Path(arguments[0]))
    known = {f.name for group in OWN for f in fields(group)} | trainer_flags().keys() | {LAYER}
    known |= {f"no_{name}" for name in known}
    unknown = []
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            unknown.append(f"unknown flag --{name}" + (f"; did you mean --{near[0]}?" if near else "."))
    if unknown:
        listed = "\n".join(f"  - {line}" for line in unknown)
        raise UsageError(f"{prog} was called with flags that it does not have (all of them: {prog} --help):\n{listed}")
    spelled: list[str] = []
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        spelled.append(name.replace("-", "_").replace("__", "--", 1) + equals + value if argument.startswith("--") else argument)
        if spelled[-1] == f"--{RESUME}" and (position + 1 == len(arguments) or arguments[position + 1].startswith("--")):
            spelled.append("True")  # the newest checkpoint
    return spelled


def _of_file(path: Path) -> list[str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} has to be a JSON object of flags and their values")
    words: list[str] = []
    for name, value in content.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(json.dumps(v) if isinstance(v, dict | bool) else str(v) for v in values)]
    return words


def value_of(arguments: list[str], flag: str) -> str | None:
    """What stands behind a flag, the last time that it is there; "true" where nothing does; None where it is not there."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == f"--{flag}":
            following = arguments[i + 1] if i + 1 < len(arguments) and not arguments[i + 1].startswith("--") else "true"
            found = value if equals else following
    return found


def without(arguments: list[str], flag: str) -> list[str]:
    """The arguments without a flag and what stands behind it."""
    kept, inside = [], False
    for argument in arguments:
        if argument.startswith("--"):
            inside = argument.partition("=")[0] == f"--{flag}"
        if not inside:
            kept.append(argument)
    return kept


def in_current_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags of FSDP as current Trainers read them, and what to warn of. Each rank reads its own weights, so nothing is synced."""
    layer, fsdp = value_of(arguments, LAYER), value_of(arguments, "fsdp")
    if fsdp is None or fsdp.lower() in ("false", ""):
        warnings = [f"--{LAYER} has no effect without --fsdp."] if layer else []
        return without(arguments, LAYER), warnings
    config = _fsdp_config(value_of(arguments, "fsdp_config"))
    warnings = []
    if layer is not None:
        config.setdefault("transformer_layer_cls_to_wrap", layer.split(","))
        warnings.append(
            f'--{LAYER} is an old spelling: current Trainers take --fsdp_config \'{{"transformer_layer_cls_to_wrap": ["{layer}"]}}\'.'
        )
    if fsdp.lower() != "true":
        version = config.get("version", config.get("fsdp_version", 2))
        other = ' For FSDP1 give --fsdp_config \'{"version": 1}\'.' if int(version) == 2 else ""
        warnings.append(f'--fsdp "{fsdp}" is an old spelling, read as FSDP{version}: --fsdp is enough.{other}')
    for name in ("sync_module_states", "cpu_ram_efficient_loading"):
        config.pop(f"fsdp_{name}", None)
        config[name] = False
    rest = without(without(arguments, LAYER), "fsdp_config")
    return [*rest, "--fsdp_config", json.dumps(config)], warnings


def _fsdp_config(given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        content = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--fsdp_config {given}: neither a JSON object nor a file with one ({error})") from error
    return dict(content)
