"""What Flux2 models are made of: the families, their latents, and the pictures that they draw.

An image is, for the model,

    x = (patchified mode of the posterior - mean) / sqrt(variance + eps)        mean, variance: of the VAE's batch norm

Patches of 2 by 2 latents become channels, so that x has the shape (batch, 4 c, height / 2, width / 2); a token is one place of
it, row by row, with the 4-D id (time, row, column, layer). Ids of an image that is to be drawn have time 0, those of a condition
image time 10. The functions for all that are the pipeline's own, in diffusers.

No torch is imported at the top: what a base pipeline lacks is told before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.training.pipeline_folder import INDEX, pipeline_problems

if TYPE_CHECKING:
    from torch import nn

# The parts of a pipeline, and the class that each has to be of.
PARTS: dict[str, str | None] = {
    "transformer": "Flux2Transformer2DModel",
    "vae": "AutoencoderKLFlux2",
    "text_encoder": "Mistral3ForConditionalGeneration",
    "tokenizer": None,
    "scheduler": None,
}
FP8_SIDES = 16
"""Layers whose sides are no multiples of it are left as they are by `--do_fp8_training`."""


@dataclass(frozen=True)
class Family:
    """A pipeline class of diffusers, its text encoder's class in transformers and that of its layers, and those whose output is the text."""

    pipeline: str
    text_encoder: str
    layer: str
    layers: tuple[int, ...]

    @property
    def klein(self) -> bool:
        """Whether it guides by a second prediction without a prompt, and not by a number that the model is told."""
        return self.pipeline == "Flux2KleinPipeline"

    @property
    def kind(self) -> Any:
        """The pipeline's class."""
        import diffusers

        return getattr(diffusers, self.pipeline)

    @property
    def parts(self) -> dict[str, str | None]:
        return {**PARTS, "text_encoder": self.text_encoder}


FAMILIES = (
    Family("Flux2Pipeline", "Mistral3ForConditionalGeneration", "MistralDecoderLayer", (10, 20, 30)),
    Family("Flux2KleinPipeline", "Qwen3ForCausalLM", "Qwen3DecoderLayer", (9, 18, 27)),
)


def family_of(base: Path) -> Family:
    """Which of them the folder `base` holds; it has been looked at before (`family_problems`)."""
    return next(family for family in FAMILIES if family.pipeline == read_json(base / INDEX)["_class_name"])


def family_problems(base: Path, variant: str | None, layers: tuple[int, ...] | None) -> Iterator[str]:
    """Yields what keeps `base` from being a Flux2 pipeline whose text comes from these `layers` (None: the usual ones)."""
    found = read_json(base / INDEX).get("_class_name")
    family = next((family for family in FAMILIES if family.pipeline == found), None)
    if family is None:
        yield from pipeline_problems(base, PARTS, variant)
        yield f"{base / INDEX} is of the class {found}; {' and '.join(f.pipeline for f in FAMILIES)} can be trained here."
        return
    problems = list(pipeline_problems(base, family.parts, variant))
    yield from problems
    if problems:
        return
    config = read_json(base / "text_encoder/config.json")
    text = config.get("text_config", config)
    count, width = int(text["num_hidden_layers"]), int(text["hidden_size"])
    if odd := [layer for layer in layers or () if not 0 <= layer <= count]:
        yield f"--text_encoder_out_layers {' '.join(map(str, odd))}: the text encoder has the layers 1 to {count}, and 0 before them."
    wanted = int(read_json(base / "transformer/config.json").get("joint_attention_dim", 15360))
    if (given := width * len(layers or family.layers)) != wanted:
        yield (
            f"--text_encoder_out_layers: {len(layers or family.layers)} layers of width {width} make a text of {given} channels; the "
            f"transformer reads {wanted}: {wanted // width} layers."
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def vae_side(base: Path) -> int:
    """What heights and widths are multiples of: the VAE halves its input between levels, patches halve it once more."""
    return int(2 ** len(read_json(base / "vae/config.json")["block_out_channels"]))


def lora_layers(base: Path) -> tuple[str, ...]:
    """The layers that get an adapter by default, by the ends of their names: attention, and the single blocks' fused layers."""
    single = int(read_json(base / "transformer/config.json").get("num_single_layers", 48))
    fused = [f"single_transformer_blocks.{number}.attn.to_out" for number in range(single)]
    return ("to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj", *fused)


def build_transformer(base: Path, npu_attention: bool = False, fp8: bool = False) -> nn.Module:
    """The transformer of `base` without its weights; with `fp8` its large layers multiply in float8."""
    from diffusers import Flux2Transformer2DModel

    model: Any = Flux2Transformer2DModel.from_config(Flux2Transformer2DModel.load_config(base / "transformer"))
    if npu_attention:
        model.set_attention_backend("_native_npu")
    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=_fits_fp8, config=Float8LinearConfig(pad_inner_dim=True))
    return model  # type: ignore[no-any-return]


def _fits_fp8(module: Any, name: str) -> bool:
    return name != "proj_out" and module.in_features % FP8_SIDES == 0 and module.out_features % FP8_SIDES == 0
