"""The base pipeline from a Hub: a real client and a real server, on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.recipes.flux_dreambooth import PARTS
from holdfast.training.pipeline_folder import choose_files, pipeline_problems, weight_variant, without_variant

spec = importlib.util.spec_from_file_location("hub_server", Path(__file__).with_name("hub_server.py"))
assert spec is not None
assert spec.loader is not None
hub_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub_server)

# One rank: fetches each [name, revision, variant] of its arguments, says what came of it.
RANK = """
import json, os, sys
import torch.distributed as dist
from holdfast.errors import HoldfastError
from holdfast.recipes.flux_dreambooth import PARTS
from holdfast.training.hub import fetch_pipeline
if "RANK" in os.environ:
    dist.init_process_group("gloo")
for arguments in json.loads(sys.argv[1]):
    try:
        outcome = [str(fetch_pipeline(arguments[0], PARTS, *arguments[1:])), 0]
    except HoldfastError as error:
        outcome = [str(error), error.exit_code]
    print("OUTCOME", json.dumps(outcome), flush=True)
if "RANK" in os.environ:
    dist.barrier()  # rank 0 has the store
os._exit(0)
"""


@pytest.fixture
def hub(flux_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """The tiny pipeline as a repository that also holds what nobody should download."""
    folder = shutil.copytree(flux_folder, tmp_path / "repository")
    (folder / "flux1-dev.safetensors").write_bytes(b"the whole model in one file, for other programs")
    (folder / "transformer/diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    shutil.copy(
        folder / "vae/diffusion_pytorch_model.safetensors", folder / "vae/diffusion_pytorch_model.fp16.safetensors"
    )
    with hub_server.serve(folder) as server:
        yield server


def fetch(cases: list[list[str | None]], cache: Path, address: str, ranks: int = 1, **variables: str) -> list[Any]:
    """The outcomes of `cases`, by rank."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-c", RANK, json.dumps(cases)]
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment | own, **pipes))
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    lines = [[line for line in output.splitlines() if line.startswith("OUTCOME")] for output in outputs]
    assert all(len(found) == len(cases) for found in lines), outputs
    assert hub_server.TOKEN not in "".join(outputs)
    return [[json.loads(line.removeprefix("OUTCOME ")) for line in found] for found in lines]


def test_one_process_of_a_node_downloads_what_counts_and_nothing_else(hub, tmp_path):
    outcomes = fetch([[hub_server.REPOSITORY, None, None]], tmp_path / "cache", hub.address, ranks=2)
    ((folder, status),) = outcomes[0]
    assert outcomes[1] == [[folder, status]]
    assert status == 0
    assert not list(pipeline_problems(Path(folder), PARTS, None))
    unwanted = {"flux1-dev.safetensors", "transformer/diffusion_pytorch_model.bin"}
    unwanted.add("vae/diffusion_pytorch_model.fp16.safetensors")
    assert sorted(hub.served) == sorted(set(hub.files) - unwanted)  # each file once


def test_variant_then_offline_from_the_cache(hub, tmp_path):
    ((outcome,),) = fetch([[hub_server.REPOSITORY, "main", "fp16"]], tmp_path / "cache", hub.address)
    assert outcome[1] == 0
    assert "vae/diffusion_pytorch_model.fp16.safetensors" in hub.served
    assert "vae/diffusion_pytorch_model.safetensors" not in hub.served
    assert "transformer/diffusion_pytorch_model.safetensors" in hub.served  # a part without the variant
    hub.requests.clear()
    offline = fetch([[hub_server.REPOSITORY, "main", "fp16"]], tmp_path / "cache", hub.address, HF_HUB_OFFLINE="1")
    assert offline == [[outcome]]
    assert not hub.requests


def test_what_cannot_be_had_is_said_in_one_message(hub, tmp_path):
    cases = [["owner/nothing", None, None], [hub_server.GATED, None, None], [hub_server.REPOSITORY, "v9", None]]
    (outcomes,) = fetch(cases, tmp_path / "cache", hub.address)
    for (text, status), part in zip(
        outcomes,
        (
            "neither a folder nor a repository owner/nothing",
            "owner/gated is gated. Accept its terms at",
            "no revision v9",
        ),
        strict=True,
    ):
        assert status == 2
        assert part in text
        assert "Traceback" not in text
    assert not hub.served


def test_a_token_opens_a_gated_repository_and_is_never_shown(hub, tmp_path):
    case = [[hub_server.GATED, None, None]]
    ((outcome,),) = fetch(case, tmp_path / "cache", hub.address, HF_TOKEN=hub_server.TOKEN)
    assert outcome[1] == 0
    cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [path for path in cached if hub_server.TOKEN.encode() in path.read_bytes()]


def test_a_refusal_reaches_every_rank(hub, tmp_path):
    outcomes = fetch([[hub_server.GATED, None, None]], tmp_path / "cache", hub.address, ranks=2)
    for ((text, status),) in outcomes:
        assert status == 2
        assert "is gated" in text


@pytest.mark.parametrize(
    ("offline", "message"),
    [("0", "cannot be downloaded"), ("1", "is not in the local cache, and offline mode is on (HF_HUB_OFFLINE)")],
)
def test_without_a_connection(tmp_path, offline, message):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        (((text, status),),) = fetch([["owner/flux", None, None]], tmp_path, address, HF_HUB_OFFLINE=offline)
    assert status == 2
    assert message in text


def train_and_push(hub: Any, flux_folder: Path, photo_folder: Path, out: Path, token: str) -> subprocess.CompletedProcess[str]:
    flags = f"""--pretrained_model_name_or_path={flux_folder} --instance_data_dir={photo_folder} --output_dir={out}
     --resolution=16 --train_batch_size=1 --max_train_steps=2 --rank=2 --no-gradient_checkpointing --report_to=none
     --validation-prompt=sks --num_validation_images=1 --push_to_hub=True --hub_token={token} --hub_model_id=owner/lora"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(out.parent / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "holdfast", "train", "flux-dreambooth", "--instance_prompt=a photo of sks girl", *flags.split()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_what_was_trained_is_uploaded_with_a_card(hub, flux_folder, photo_folder, tmp_path):
    done = train_and_push(hub, flux_folder, photo_folder, tmp_path / "out", hub_server.TOKEN)
    assert done.returncode == 0, done.stderr
    names = {name.removeprefix("owner/lora/") for name in hub.uploaded}
    assert names == {"pytorch_lora_weights.safetensors", "README.md", "final/step-000002/0.png"}
    for name in names:
        assert hub.uploaded[f"owner/lora/{name}"] == (tmp_path / "out" / name).read_bytes()
    card = hub.uploaded["owner/lora/README.md"].decode()
    for part in ("library_name: diffusers", "- lora", "load_lora_weights", "a photo of sks girl", "(./final/step-000002/0.png)"):
        assert part in card
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [path for path in written if hub_server.TOKEN.encode() in path.read_bytes()]
    assert hub_server.TOKEN not in done.stdout + done.stderr


def test_a_token_that_may_not_write_is_told_before_the_training(hub, flux_folder, photo_folder, tmp_path):
    done = train_and_push(hub, flux_folder, photo_folder, tmp_path / "out", "hf_wrongtoken")
    assert done.returncode == 2, done.stderr
    assert "--push_to_hub: the repository owner/lora cannot be made" in done.stderr
    assert "hf_wrongtoken" not in done.stderr
    assert not (tmp_path / "out/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "variant", "plain"),
    [
        ("model.safetensors", "", "model.safetensors"),
        ("model.fp16.safetensors", "fp16", "model.safetensors"),
        ("model-00001-of-00002.safetensors", "", "model-00001-of-00002.safetensors"),
        ("model.fp16-00001-of-00002.safetensors", "fp16", "model-00001-of-00002.safetensors"),
        ("model-00001-of-00002.fp16.safetensors", "fp16", "model-00001-of-00002.safetensors"),
        ("model.safetensors.index.fp16.json", "fp16", "model.safetensors.index.json"),
        ("model.safetensors.index.json", "", "model.safetensors.index.json"),
        ("config.json", None, "config.json"),
        ("tokenizer.model", None, "tokenizer.model"),
    ],
)
def test_variants_in_file_names(name, variant, plain):
    assert weight_variant(name) == variant
    assert without_variant(name) == plain


def test_files_are_chosen_part_by_part():
    names = ["model_index.json", "README.md", "vae/config.json", "vae/a.safetensors", "vae/a.fp16.safetensors"]
    names += ["transformer/a.safetensors", "unet/a.safetensors", "vae/deep/a.safetensors", "transformer/a.bin"]
    plain = choose_files(names, ["vae", "transformer"], None)
    assert plain == ["model_index.json", "transformer/a.safetensors", "vae/a.safetensors", "vae/config.json"]
    half = choose_files(names, ["vae", "transformer"], "fp16")
    assert half == ["model_index.json", "transformer/a.safetensors", "vae/a.fp16.safetensors", "vae/config.json"]
