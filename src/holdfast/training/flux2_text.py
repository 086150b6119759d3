"""The text of Flux2: hidden states of some layers of a language model, side by side, for each token of a caption.

    (batch, max_sequence_length, layers x width)        "sequence" in the cache

The encoder is whole on each rank that encodes, cut over all of them (`holdfast.training.encoders`), or on a server of Hugging
Face's. Of a Mistral3 or Qwen3 model only the text layers up to the last one that is wanted are built and read: no vision tower,
no head. The caption becomes tokens by the tokenizer's own chat template; the vision part of its processor is not needed.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.training.cache import Entry
from holdfast.training.encoders import Captions, Encode, can_shard, encoder_dtype, folder_digest, open_encoder
from holdfast.training.flux2 import Family
from holdfast.training.parts import Parts

logger = logging.getLogger(__name__)

SERVER = "https://remote-text-encoder-flux-2.huggingface.co/predict"
SERVER_DEADLINE_S = 300.0
# Before the names of a text model's tensors: in folders of Mistral3 from before release 4.52 of Transformers, from after it, of Qwen3.
NAMES = {r"^(language_model\.model|model\.language_model|model)\.": "model."}


def captions_of(parts: Parts[Any], family: Family) -> Captions:
    """The captions of a run, as its flags have them encoded: `--fsdp_text_encoder`, `--remote_text_encoder`."""
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    config = parts.config
    layers = config.text_encoder_out_layers or family.layers
    if config.remote_text_encoder:
        return Captions(parts, ["remote", SERVER, str(parts.dtype)], lambda: remote_encoder(parts))
    sharded = bool(config.fsdp_text_encoder) and can_shard()
    if config.fsdp_text_encoder and not sharded:
        logger.warning("--fsdp_text_encoder has no effect with one process: there is nobody to share the text encoder with")
    told = folder_digest(parts.base / "tokenizer") + ("" if family.klein else SYSTEM_MESSAGE)
    settings = [parts.prints["text_encoder"], told, config.max_sequence_length, list(layers), str(parts.dtype)]
    return Captions(parts, settings, lambda: local_encoder(parts, family, layers, sharded), sharded)


def local_encoder(parts: Parts[Any], family: Family, layers: tuple[int, ...], sharded: bool) -> Encode:
    """The pipeline's own text encoder as far as it is needed, by the pipeline's own function."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(parts.base / "tokenizer")
    units = (family.layer, nn.Embedding) if sharded else None
    dtype = encoder_dtype(parts.dtype)
    encoder = open_encoder(parts, "text_encoder", lambda: build_encoder(parts.base, max(layers)), dtype, units, NAMES)
    embed = family.kind._get_qwen3_prompt_embeds if family.klein else family.kind._get_mistral_3_small_prompt_embeds

    def encode(caption: str) -> Entry:
        sequence = embed(
            encoder, tokenizer, caption, parts.dtype, parts.device,
            max_sequence_length=parts.config.max_sequence_length, hidden_states_layers=layers,
        )  # fmt: skip
        return {"sequence": sequence[0]}

    return encode


class TextLayers(nn.Module):
    """A language model, to be called as itself.

    FSDP2 gives another class to what it cuts, and Transformers looks up by the class which hidden states a model can give: so the
    model stands inside this.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def build_encoder(base: Path, last: int) -> TextLayers:
    """The text layers of the text encoder up to the one with the number `last`, without their weights."""
    from transformers import AutoConfig, AutoModel

    model: Any = AutoModel.from_config(AutoConfig.from_pretrained(base / "text_encoder").get_text_config())
    if last < len(model.layers):
        del model.layers[last:]
        model.norm = nn.Identity()  # it comes after the last of all layers
    return TextLayers(model)


def remote_encoder(parts: Parts[Any]) -> Encode:
    """The encoder of the Hugging Face server, which takes a token of an account."""
    import requests
    from huggingface_hub import get_token

    token = parts.config.hub_token or get_token()

    def encode(caption: str) -> Entry:
        try:
            answer = requests.post(
                SERVER, json={"prompt": caption}, headers={"Authorization": f"Bearer {token}"}, timeout=SERVER_DEADLINE_S
            )
            answer.raise_for_status()
            sequence = torch.load(io.BytesIO(answer.content), map_location="cpu", weights_only=True)
        except Exception as error:
            why = str(error).replace(str(token), "***")
            raise UsageError(f"--remote_text_encoder: {SERVER} did not encode {caption!r}: {why}\nLeave the flag out to encode here.") from None
        return {"sequence": sequence.reshape(-1, sequence.shape[-1]).to(parts.dtype)}

    return encode
