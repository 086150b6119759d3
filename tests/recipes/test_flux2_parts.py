"""What the Flux2 recipe is made of, against the models as they are: one step's loss, the text, the flags and what they refuse."""

from __future__ import annotations

import io
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from datasets import load_dataset
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from PIL import Image
from recipe_jobs import FLUX2, FSDP, Job, run
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from holdfast.errors import UsageError
from holdfast.recipes import flux2_lora as recipe
from holdfast.testing import RankPool

LENGTH = 48
CAPTIONS = ["mirror the picture", "paint it in oil", "turn day into night", "make it black and white", ""]


def flags(base: Path, data: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": str(base), "dataset_name": str(data), "output_dir": str(out), "image_column": "output",
        "caption_column": "instruction", "resolution": 16, "train_batch_size": 1, "rank": 2, "max_sequence_length": LENGTH,
        "report_to": "none", **more,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ one step's loss


def latents(vae: Any, image: Image.Image) -> torch.Tensor:
    """An image of 16 x 16 as the model sees it, of shape (4 channels, rows, columns), by the formulas."""
    pixels = torch.from_numpy(np.asarray(image.convert("RGB").resize((16, 16)), dtype=np.float32))
    mode = vae.encode(pixels.permute(2, 0, 1)[None] / 127.5 - 1).latent_dist.mean[0]
    channels, height, width = mode.shape
    patches = torch.empty(4 * channels, height // 2, width // 2)
    for channel in range(4 * channels):
        down, right = channel % 4 // 2, channel % 2
        patches[channel] = mode[channel // 4, down::2, right::2]
    mean, variance = vae.bn.running_mean[:, None, None], vae.bn.running_var[:, None, None]
    return (patches - mean) / torch.sqrt(variance + vae.config.batch_norm_eps)


def tokens(x: torch.Tensor, time: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, with their ids (time, row, column, 0)."""
    places = [(row, column) for row in range(x.shape[1]) for column in range(x.shape[2])]
    ids = torch.tensor([[time, row, column, 0] for row, column in places])
    return torch.stack([x[:, row, column] for row, column in places]), ids


def text(base: Path, caption: str, klein: bool) -> torch.Tensor:
    """The caption's hidden states by the whole text encoder, side by side."""
    kind: Any = Qwen3ForCausalLM if klein else Mistral3ForConditionalGeneration
    pipeline: Any = Flux2KleinPipeline if klein else Flux2Pipeline
    embed = pipeline._get_qwen3_prompt_embeds if klein else pipeline._get_mistral_3_small_prompt_embeds
    encoder = kind.from_pretrained(base / "text_encoder", dtype=torch.float32).eval()
    with torch.no_grad():
        return embed(encoder, AutoTokenizer.from_pretrained(base / "tokenizer"), caption, max_sequence_length=LENGTH)  # type: ignore[no-any-return]


def recomputed(base: Path, pairs: Path, klein: bool, conditioned: bool, seed: int) -> float:
    """The loss of one micro step of three samples, in one process, of the formulas in `docs/recipes/flux2-lora.md`."""
    vae: Any = AutoencoderKLFlux2.from_pretrained(base / "vae").eval()
    transformer: Any = Flux2Transformer2DModel.from_pretrained(base / "transformer").eval()
    rows = [load_dataset(str(pairs), split="train")[number] for number in range(3)]
    with torch.no_grad():
        clean = torch.stack([latents(vae, row["output"]) for row in rows])
        torch.manual_seed(seed)
        noise, u = torch.randn(clean.shape), torch.rand(3)
        losses = []
        for x, epsilon, drawn, row in zip(clean, noise, u, rows, strict=True):
            sigma = (1000 - math.floor(1000 * float(drawn))) / 1000
            seen, ids = tokens((1 - sigma) * x + sigma * epsilon, 0)
            count = len(seen)
            if conditioned:
                condition, condition_ids = tokens(latents(vae, row["file_name"]), 10)
                seen, ids = torch.cat([seen, condition]), torch.cat([ids, condition_ids])
            sequence = text(base, row["instruction"], klein)
            prediction = transformer(
                hidden_states=seen[None],
                timestep=torch.tensor([sigma]),
                guidance=None if klein else torch.tensor([2.5]),
                encoder_hidden_states=sequence,
                txt_ids=torch.tensor([[[0, 0, 0, place] for place in range(LENGTH)]]),
                img_ids=ids[None],
            ).sample[0, :count]
            losses.append((prediction - tokens(epsilon - x, 0)[0]).square().mean())
    return float(sum(losses) / 3)


def by_the_recipe(flags: dict[str, Any], seed: int) -> float:
    """What the recipe makes of the first three samples, with the adapter as it begins: without effect."""
    found: list[float] = []

    class Seen(Exception):
        pass

    make_loss = recipe.make_loss

    def watched(*args: Any) -> Any:
        loss = make_loss(*args)

        def once(_: Any) -> Any:
            data = loaders[0].dataset
            torch.manual_seed(seed)
            found.append(float(loss(data.collate([data[0], data[1], data[2]]))))
            raise Seen

        return once

    from holdfast.training import data as data_module

    loaders: list[Any] = []
    make_loader = data_module.make_loader

    def kept(*args: Any) -> Any:
        loaders.append(make_loader(*args))
        return loaders[-1]

    data_module.make_loader = kept
    recipe.make_loss = watched
    with pytest.raises(Seen):
        recipe.main(recipe.Config(**flags))
    return found[0]


@pytest.mark.parametrize(("klein", "conditioned"), [(False, True), (False, False), (True, True)])
def test_a_steps_loss_is_that_of_the_formulas(pool: RankPool, flux2_folder, klein_folder, pair_folder, tmp_path, klein, conditioned):
    base = klein_folder if klein else flux2_folder
    more = {"guidance_scale": 2.5, "mixed_precision": "no", "cache_latents": True, "image_interpolation_mode": "bicubic", "center_crop": True}
    more |= {"cond_image_column": "file_name"} if conditioned else {}
    (ours,) = pool.run(by_the_recipe, 1, flags(base, square(pair_folder, tmp_path), tmp_path / "out", **more), 5)
    assert ours == pytest.approx(recomputed(base, square(pair_folder, tmp_path), klein, conditioned, 5), rel=1e-4)
    assert ours > 0.1


def square(pairs: Path, folder: Path) -> Path:
    """The pairs at 16 x 16, so that nothing is cut or scaled."""
    import datasets

    target = folder / "square"
    if not target.is_dir():
        target.mkdir()
        rows = load_dataset(str(pairs), split="train")
        sized = {name: [row[name].convert("RGB").resize((16, 16)) for row in rows] for name in ("output", "file_name")}
        kinds = datasets.Features({"output": datasets.Image(), "file_name": datasets.Image(), "instruction": datasets.Value("string")})
        datasets.Dataset.from_dict({**sized, "instruction": rows["instruction"]}, features=kinds).to_parquet(target / "train.parquet")
    return target


# ------------------------------------------------------------------------------------------------------------------- the text


def encoded(flags: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """On one rank: the captions through the recipe's encoder, how many it was asked for, and how much of it this rank held."""
    import os

    from holdfast.training import encoders, flux2_text
    from holdfast.training.continuation import fingerprints
    from holdfast.training.flux2 import family_of
    from holdfast.training.parts import Parts
    from holdfast.training.setup import make_accelerator

    os.environ.update(environment)
    config = recipe.Config(**flags)
    base = Path(config.pretrained_model_name_or_path)
    family = family_of(base)
    parts = Parts(config, make_accelerator(config), base, fingerprints(base, family.parts, None))
    held: list[tuple[int, int]] = []
    open_encoder = encoders.open_encoder

    def opened(*args: Any) -> Any:
        model = open_encoder(*args)
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        held.append((sum(p.numel() for p in local), sum(p.numel() for p in model.parameters())))
        return model

    flux2_text.open_encoder = opened
    captions = flux2_text.captions_of(parts, family)
    made = captions.encode(CAPTIONS)
    again = flux2_text.captions_of(parts, family).encode(CAPTIONS)
    return {"made": made, "again": again, "held": held, "text": captions(CAPTIONS)["sequence"]}


@pytest.mark.parametrize("klein", [False, True])
def test_text_is_that_of_the_whole_encoder_sharded_or_not(pool: RankPool, flux2_folder, klein_folder, tmp_path, klein):
    """Five captions on two ranks: each once, bit for bit those of one process and those of the model with all its layers and parts."""
    base = klein_folder if klein else flux2_folder
    given = flags(base, tmp_path, tmp_path / "one", mixed_precision="no")
    (one,) = pool.run(encoded, 1, given, {})
    sharded = {**given, "output_dir": str(tmp_path / "two"), "fsdp_text_encoder": True, "offload": True, "cpu_fsdp": True}
    ranks = pool.run(encoded, 2, sharded, FSDP)
    expected = torch.cat([text(base, caption, klein) for caption in CAPTIONS])
    assert len({row.numpy().tobytes() for row in expected}) == 5
    assert torch.equal(one["text"], expected)
    ((local, whole),) = one["held"]
    assert local == whole
    for result in ranks:
        assert torch.equal(result["text"], expected)
        assert (result["made"], result["again"]) == (5, 0)
        assert len(result["held"]) == 1  # opened once, and not again for what is there
        assert result["held"][0][0] <= 0.51 * whole
    files = [{path.name: path.read_bytes() for path in (tmp_path / out / "cache").rglob("*.safetensors")} for out in ("one", "two")]
    assert len(files[0]) == 5
    assert files[0] == files[1]


def test_both_ways_to_name_the_tensors_of_mistral3_are_known(pool: RankPool, flux2_folder, tmp_path):
    """Transformers saves them under the names that they had before 4.52; a folder with those of the classes gives the same text."""
    import shutil

    from safetensors.torch import load_file, save_file

    base = shutil.copytree(flux2_folder, tmp_path / "base")
    weights = load_file(base / "text_encoder/model.safetensors")
    assert "language_model.model.layers.0.mlp.up_proj.weight" in weights
    starts = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    renamed = {
        next((new + name.removeprefix(old) for old, new in starts.items() if name.startswith(old)), f"model.{name}"): tensor
        for name, tensor in weights.items()
    }
    classes = Mistral3ForConditionalGeneration.from_pretrained(flux2_folder / "text_encoder").state_dict().keys()
    assert classes - renamed.keys() == {"lm_head.weight"}  # which is that of the embeddings
    assert renamed.keys() < classes
    save_file(renamed, base / "text_encoder/model.safetensors", {"format": "pt"})
    (result,) = pool.run(encoded, 1, flags(base, tmp_path, tmp_path / "out", mixed_precision="no"), {})
    assert torch.equal(result["text"], torch.cat([text(flux2_folder, caption, False) for caption in CAPTIONS]))


@contextmanager
def server(answer: bytes, code: int = 200) -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((body["prompt"], self.headers["Authorization"]))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/predict", asked
        listening.shutdown()
        thread.join(10)


def test_captions_go_to_a_server_and_what_it_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.training import flux2_text

    parts: Any = SimpleNamespace(config=SimpleNamespace(hub_token="hf_secret"), dtype=torch.bfloat16)
    answer = io.BytesIO()
    torch.save(torch.arange(12.0).view(1, 3, 4), answer)
    with server(answer.getvalue()) as (url, asked):
        monkeypatch.setattr(flux2_text, "SERVER", url)
        found = flux2_text.remote_encoder(parts)("a dog")["sequence"]
    assert torch.equal(found, torch.arange(12.0).view(3, 4).bfloat16())
    assert asked == [("a dog", "Bearer hf_secret")]
    with server(b"no", 401) as (url, _):
        monkeypatch.setattr(flux2_text, "SERVER", url)
        with pytest.raises(UsageError, match=r"(?s)did not encode 'a dog': 401.*Leave the flag out") as raised:
            flux2_text.remote_encoder(parts)("a dog")
    assert "hf_secret" not in str(raised.value)


# ------------------------------------------------------------------------------------------------------------------ the flags

COMMAND = """--image_column=output --cond_image_column=file_name --caption_column=instruction --resolution=512 --train_batch_size=1
 --guidance_scale=1 --mixed_precision=bf16 --max_grad_norm=1 --dataloader_num_workers=0 --gradient_accumulation_steps=4
 --learning_rate=1e-05 --lr_scheduler=constant --lr_warmup_steps=0 --gradient_checkpointing --max_train_steps=1000
 --checkpointing_steps=5000 --rank=16 --seed=0 --skip_final_inference --cache_latents --offload --fsdp_text_encoder"""
# Of diffusers' two training scripts, beside those that the command has.
NAMES = """adam_beta1 adam_beta2 adam_epsilon adam_weight_decay adam_weight_decay_text_encoder allow_tf32 aspect_ratio_buckets
 bnb_quantization_config_path cache_dir center_crop checkpoints_total_limit class_data_dir class_prompt dataset_config_name do_fp8_training
 enable_npu_flash_attention final_validation_prompt hub_model_id hub_token instance_data_dir instance_prompt local_rank logging_dir
 logit_mean logit_std lora_alpha lora_dropout lora_layers lr_num_cycles lr_power max_sequence_length mode_scale num_class_images
 num_train_epochs num_validation_images optimizer prior_generation_precision prior_loss_weight prodigy_beta3 prodigy_decouple
 prodigy_safeguard_warmup prodigy_use_bias_correction push_to_hub random_flip remote_text_encoder repeats report_to resume_from_checkpoint
 revision sample_batch_size scale_lr text_encoder_lr text_encoder_out_layers upcast_before_saving use_8bit_adam use_aspect_ratio_buckets
 validation_epochs validation_image validation_prompt variant weighting_scheme with_prior_preservation"""


def test_the_published_command_and_all_names_of_the_scripts_are_flags(flux2_folder, pair_folder, tmp_path):
    places = ["--pretrained_model_name_or_path", str(flux2_folder), "--dataset_name", str(pair_folder), "--output_dir", str(tmp_path)]
    config = tyro.cli(recipe.Config, args=[*places, *COMMAND.split(), "--text_encoder_out_layers", "1", "2", "3"], use_underscores=True)
    config.validate()
    assert (config.rank, config.cond_image_column, config.text_encoder_out_layers) == (16, "file_name", (1, 2, 3))
    assert config.fsdp_text_encoder
    assert [name for name in NAMES.split() if not hasattr(config, name)] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "--rank is 0; it has to be at least 1"),
        ({"rank": None}, "--rank is None; a LoRA is what is trained here"),
        ({"enable_npu_flash_attention": True}, "torch_npu, which is not installed"),
        ({"bnb_quantization_config_path": "bnb.json"}, "--bnb_quantization_config_path: a base that bitsandbytes has quantised"),
        ({"do_fp8_training": True}, "--do_fp8_training needs torchao, which is not installed"),
        ({"max_sequence_length": 0}, "--max_sequence_length is 0"),
        ({"resolution": 18}, "--resolution is 18; this model needs a multiple of 4"),
        ({"aspect_ratio_buckets": "16,18"}, "--aspect_ratio_buckets: 16,18: this model needs multiples of 4"),
        ({"text_encoder_out_layers": (1, 2, 40)}, "--text_encoder_out_layers 40: the text encoder has the layers 1 to 32"),
        ({"text_encoder_out_layers": (1, 2)}, "2 layers of width 16 make a text of 32 channels; the transformer reads 48: 3 layers"),
        ({"cond_image_column": "file_name", "validation_prompt": "a dog"}, "needs --validation_image"),
        ({"cond_image_column": "file_name", "with_prior_preservation": True, "class_prompt": "x", "class_data_dir": "x"}, "does not go with"),
        ({"remote_text_encoder": True, "hub_token": "hf_x", "max_sequence_length": 512, "fsdp_text_encoder": True}, "does not go with --remote"),
        ({"dataset_name": None, "instance_data_dir": "{photos}", "caption_column": None, "instance_prompt": "a dog",
          "cond_image_column": "given"}, "--cond_image_column is a column of a dataset"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_loaded(flux2_folder, pair_folder, photo_folder, tmp_path, changes, message):
    changes = {name: str(photo_folder) if value == "{photos}" else value for name, value in changes.items()}
    with pytest.raises(UsageError) as caught:
        recipe.Config(**{**flags(flux2_folder, pair_folder, tmp_path / "out"), **changes}).validate()
    assert message in str(caught.value)
    assert "1 thing(s)" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("size", "message"), [((32, 64), "is 32 x 64; each side needs 64"), (None, "cannot be read as an image")])
def test_a_condition_image_for_pictures_is_looked_at_first(flux2_folder, pair_folder, tmp_path, size, message):
    path = tmp_path / "given.png"
    path.write_bytes(b"no image") if size is None else Image.new("RGB", size).save(path)
    more = {"cond_image_column": "file_name", "validation_prompt": "x", "validation_image": str(path)}
    with pytest.raises(UsageError, match=message):
        recipe.Config(**flags(flux2_folder, pair_folder, tmp_path / "out", **more)).validate()


def refused(flags: dict[str, Any]) -> tuple[int, str]:
    try:
        recipe.main(recipe.Config(**flags))
    except UsageError as error:
        return error.exit_code, str(error)
    return 0, ""


def test_bad_data_and_unknown_layers_are_told(pool: RankPool, flux2_folder, flux_folder, pair_folder, tmp_path):
    """On two ranks, so that both say the same; nothing is trained."""
    cases = [
        ({"cond_image_column": "given"}, "--cond_image_column given: ", "It has: output, file_name, instruction"),
        ({"image_column": "a", "caption_column": "b"}, "--image_column a, --caption_column b: ", "It has: output, file_name, instruction"),
        ({"lora_layers": "attn.toq"}, "no layer of Flux2Transformer2DModel ends in 'attn.toq'", "nearest: attn.to_q"),
        ({"dataset_name": str(damaged(pair_folder, tmp_path))}, "2 of 6 image(s) cannot be read", "row 1 cannot be read"),
        ({"dataset_name": str(tmp_path / "few")}, "1 sample(s) for 2 ranks", "--repeats 2"),
        ({"dataset_name": str(tmp_path / "mute")}, "1 caption(s) are empty", "row 0"),
    ]  # fmt: skip
    for changes, *messages in cases:
        for code, said in pool.run(refused, 2, {**flags(flux2_folder, pair_folder, tmp_path / "out"), **changes}):
            assert code == 2
            assert all(message in said for message in messages), said
    assert not list((tmp_path / "out").glob("*.jsonl"))
    (code, said) = pool.run(refused, 1, flags(flux_folder, pair_folder, tmp_path / "out"))[0]
    assert code == 2
    assert "Flux2Pipeline and Flux2KleinPipeline can be trained here" in said


def damaged(pairs: Path, folder: Path) -> Path:
    """Six pairs of which two targets are none; beside it one pair alone, and two with an empty caption."""
    import datasets

    rows = load_dataset(str(pairs), split="train")
    rows = rows.cast_column("output", datasets.Image(decode=False)).cast_column("file_name", datasets.Image(decode=False))
    content = {name: list(rows[name]) for name in rows.column_names}
    broken = {**content, "output": [content["output"][0], {"bytes": b"no image", "path": None}, {"bytes": b"", "path": None}, *content["output"][3:]]}
    few = {name: values[:1] for name, values in content.items()}
    mute = {name: values[:2] for name, values in content.items()} | {"instruction": [" ", "mirror"]}
    for name, each in {"damaged": broken, "few": few, "mute": mute}.items():
        (folder / name).mkdir()
        datasets.Dataset.from_dict(each, features=rows.features).to_parquet(folder / name / "train.parquet")
    return folder / "damaged"


def test_samples_that_cannot_be_read_are_left_out_on_request(pool: RankPool, flux2_folder, pair_folder, tmp_path):
    more = {"cond_image_column": "file_name", "skip_unreadable_images": True, "max_train_steps": 1, "train_batch_size": 4}
    job = flags(flux2_folder, damaged(pair_folder, tmp_path), tmp_path / "out", **more)
    (seen,) = pool.run(run, 1, Job(job, recipe=FLUX2))
    assert len(set(seen["samples"])) == 4
