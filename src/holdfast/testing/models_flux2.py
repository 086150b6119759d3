"""A tiny random Flux2 pipeline in Hugging Face's folder layout, and a dataset of image pairs: made offline, the same every time.

The classes are the real ones: Flux2Transformer2DModel, AutoencoderKLFlux2, Mistral3 with 32 layers and the files of a Pixtral
processor with a chat template (Klein: Qwen3 with 28 layers); only the sizes are small. Needs the extra `holdfast[demo]`.
"""

from __future__ import annotations

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.testing.models import SENTENCES, _seeded, photos

SPECIALS = ["<pad>", "<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{% else %}[INST]{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}[IMG]{% endif %}{% endfor %}"
    "{% if message['role'] == 'system' %}[/SYSTEM_PROMPT]{% else %}[/INST]{% endif %}"
    "{% endfor %}"
)
INSTRUCTIONS = [
    "turn it into a pencil drawing",
    "mirror the picture",
    "make it black and white",
    "turn day into night",
    "paint it in oil",
    "make it black and white",  # twice: it is encoded once
]


QWEN_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


def tiny_flux2(folder: Path, text_width: int = 16, klein: bool = False) -> Path:
    """Write a random pipeline that `Flux2Pipeline.from_pretrained` loads, or `Flux2KleinPipeline`; returns `folder`.

    Heights and widths are multiples of 4: its VAE halves once and the patches are of 2 by 2; 16 channels in each token.
    `text_width` is of the text encoder, for one that is large enough to be measured; a multiple of 4. Klein has no guidance
    embedding and is not distilled.
    """
    diffusers: Any = import_module("diffusers")  # typed by halves only
    transformers: Any = import_module("transformers")
    folder = Path(folder)
    vocabulary = _tokenizer(folder / "tokenizer", klein)
    with _seeded(0):
        diffusers.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * text_width,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not klein,
        ).save_pretrained(folder / "transformer")
        (_qwen if klein else _mistral)(transformers, vocabulary, text_width).save_pretrained(folder / "text_encoder")
        vae = diffusers.AutoencoderKLFlux2(
            sample_size=32,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            block_out_channels=(4, 4),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=1,
        )
        vae.bn.running_mean.uniform_(-0.5, 0.5)  # statistics that make a difference
        vae.bn.running_var.uniform_(0.5, 2.0)
        vae.save_pretrained(folder / "vae")
    diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "Flux2KleinPipeline" if klein else "Flux2Pipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM" if klein else "Mistral3ForConditionalGeneration"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],  # PixtralProcessor wants torchvision
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
        **({"is_distilled": False} if klein else {}),
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder


def _qwen(transformers: Any, vocabulary: int, width: int) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, max_position_embeddings=512, num_hidden_layers=28,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def _mistral(transformers: Any, vocabulary: int, width: int) -> Any:
    text = {
        "model_type": "mistral",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 32,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "image_size": 30,
        "patch_size": 6,
        "num_channels": 3,
    }
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=3, vision_feature_layer=-1)
    return transformers.Mistral3ForConditionalGeneration(config)


def _tokenizer(folder: Path, klein: bool) -> int:
    """The files of a Pixtral processor, or a Qwen tokenizer, that knows a few sentences; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers: Any = import_module("transformers")
    told: Any = import_module("diffusers.pipelines.flux2.system_messages")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=SPECIALS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([told.SYSTEM_MESSAGE] * 3 + SENTENCES + INSTRUCTIONS, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    fast.chat_template = QWEN_TEMPLATE if klein else TEMPLATE
    fast.save_pretrained(folder)
    if klein:
        return len(fast)
    # What PixtralProcessor.save_pretrained adds; the class itself wants torchvision, with which it reads this folder.
    images = {
        "image_processor_type": "PixtralImageProcessor", "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "patch_size": {"height": 6, "width": 6}, "size": {"longest_edge": 30},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=2))
    about = {"processor_class": "PixtralProcessor", "image_token": "[IMG]", "patch_size": 6, "spatial_merge_size": 1}
    (folder / "processor_config.json").write_text(json.dumps(about, indent=2))
    return len(fast)


def image_pairs(folder: Path, count: int = 6) -> Path:
    """Write a dataset of `count` (at most 6) pairs that `datasets.load_dataset` reads: one parquet file; returns `folder`.

    Columns: `output`, a real photo; `file_name`, the image that it is made from: the photo in greys; `instruction`.
    """
    from PIL import Image

    datasets: Any = import_module("datasets")
    folder = Path(folder)
    rows: dict[str, list[Any]] = {"output": [], "file_name": [], "instruction": INSTRUCTIONS[:count]}
    for path in sorted(photos(folder / "photos", count).glob("*.png")):
        given = io.BytesIO()
        Image.open(path).convert("L").save(given, format="PNG")
        rows["output"].append({"bytes": path.read_bytes(), "path": path.name})
        rows["file_name"].append({"bytes": given.getvalue(), "path": f"grey-{path.name}"})
        path.unlink()
    (folder / "photos").rmdir()
    kinds = {"output": datasets.Image(), "file_name": datasets.Image(), "instruction": datasets.Value("string")}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(folder / "train.parquet")
    return folder
