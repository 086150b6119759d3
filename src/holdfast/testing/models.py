"""Tiny random models in Hugging Face's folder layout, and real photos: made offline, in a second, the same every time.

The classes are the real ones and so are the tokenizers (trained on a few sentences below); only the sizes are small.
Needs the extra `holdfast[demo]`.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

SENTENCES = [
    "a photo of sks girl",
    "a photo of a small dog on the beach, late light, soft focus",
    "a portrait of an astronaut in front of the flag",
    "a cup of coffee on a wooden table, seen from above",
    "a temple roof among trees under a pale sky",
    "a red dahlia in full bloom, close view",
    "the quick brown fox jumps over the lazy dog while zebras watch",
    "training goes on where it was stopped, and nothing that was learned is lost",
]
PHOTO_WIDTH = 128


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random weights that depend on nothing before, and change nothing after."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tiny_flux(folder: Path) -> Path:
    """Write a random FluxPipeline that `FluxPipeline.from_pretrained` loads; returns `folder`.

    Its transformer has 2 double and 2 single blocks, guidance embeddings, and 4 packed channels (the VAE has 1).
    """
    diffusers: Any = import_module("diffusers")  # typed by halves only
    transformers: Any = import_module("transformers")
    folder = Path(folder)
    clip_vocabulary = _clip_tokenizer(folder / "tokenizer")
    t5_vocabulary = _t5_tokenizer(folder / "tokenizer_2")
    with _seeded(0):
        diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ).save_pretrained(folder / "transformer")
        transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=clip_vocabulary,
                bos_token_id=clip_vocabulary - 2,
                eos_token_id=clip_vocabulary - 1,
                pad_token_id=clip_vocabulary - 1,
                hidden_size=32,
                intermediate_size=37,
                num_attention_heads=4,
                num_hidden_layers=2,
                projection_dim=32,
            )
        ).save_pretrained(folder / "text_encoder")
        transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=t5_vocabulary, d_model=32, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
        ).save_pretrained(folder / "text_encoder_2")
        diffusers.AutoencoderKL(
            sample_size=32,
            block_out_channels=(4,),
            layers_per_block=1,
            latent_channels=1,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5035,
        ).save_pretrained(folder / "vae")
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder


def tiny_llama(folder: Path) -> Path:
    """Write a random LlamaForCausalLM (4 layers, grouped-query attention) and its tokenizer; returns `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers: Any = import_module("transformers")
    folder = Path(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    with _seeded(0):
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def photos(folder: Path, count: int = 5) -> Path:
    """Write `count` (at most 6) real photos that scikit-image and scikit-learn ship, PHOTO_WIDTH wide, of several
    heights, as PNG; returns `folder`."""
    from PIL import Image

    data: Any = import_module("skimage.data")
    samples: Any = import_module("sklearn.datasets")
    sources = {
        "astronaut": data.astronaut,
        "cat": data.cat,
        "china": lambda: samples.load_sample_image("china.jpg"),
        "coffee": data.coffee,
        "flower": lambda: samples.load_sample_image("flower.jpg"),
        "rocket": data.rocket,
    }
    if not 0 < count <= len(sources):
        raise ValueError(f"there are {len(sources)} photos, {count} were asked for")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(sources)[:count]:
        photo = Image.fromarray(sources[name]())
        photo.resize((PHOTO_WIDTH, round(PHOTO_WIDTH * photo.height / photo.width))).save(folder / f"{name}.png")
    return folder


def _clip_tokenizer(folder: Path) -> int:
    """A CLIP tokenizer that knows single characters only; returns the size of its vocabulary, specials last."""
    from tokenizers import pre_tokenizers

    transformers: Any = import_module("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*characters, *(character + "</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    transformers.CLIPTokenizer.from_pretrained(folder, model_max_length=77).save_pretrained(folder)
    return len(words)


def _t5_tokenizer(folder: Path) -> int:
    """A Unigram tokenizer as T5 has it: the words above and single characters; returns the size of its vocabulary.

    Made, not trained: training orders equal scores differently in every process.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = sorted({"\u2581" + word for sentence in SENTENCES for word in sentence.split()})
    characters = ["\u2581", *(character for character in string.printable if not character.isspace())]
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    scores += [(word, -5.0) for word in words] + [(character, -9.0) for character in characters]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=2, byte_fallback=False))
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "T5TokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "extra_ids": 0,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(scores)
