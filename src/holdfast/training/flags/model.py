"""Which model, and how it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from holdfast.training.flags.base import Flags, installed

Precision = Literal["no", "fp16", "bf16"]


@dataclass(kw_only=True)
class ModelFlags(Flags):
    """The base pipeline and the arithmetic."""

    pretrained_model_name_or_path: str
    """The base pipeline: a folder in diffusers' layout, or the name of a repository on the Hugging Face Hub."""

    revision: str | None = None
    """Revision of the repository: a branch, a tag or a commit."""

    variant: str | None = None
    """Variant of the weight files, such as fp16 for `model.fp16.safetensors`; a part without it uses its plain files."""

    cache_dir: str | None = None
    """Where downloads of models and datasets are kept. Default: the Hub's own cache."""

    mixed_precision: Precision | None = None
    """Precision of the arithmetic; the trained weights are kept in fp32. Default: what the accelerate config says."""

    gradient_checkpointing: bool = False
    """Compute activations anew in the backward pass instead of keeping them: slower, smaller."""

    offload: bool = False
    """Keep the VAE and the text encoders in host memory while they are not used."""

    allow_tf32: bool = False
    """Let matrix products run in TF32 on NVIDIA devices that have it."""

    enable_npu_flash_attention: bool = False
    """Flash attention of Ascend NPUs; needs torch_npu."""

    cpu_fsdp: bool = False
    """Let FSDP run on CPU ranks, for tests and dry runs (Accelerate ignores FSDP there). Also: HOLDFAST_CPU_FSDP=1."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.variant is not None and not self.variant.replace("_", "").replace("-", "").isalnum():
            yield f"--variant is {self.variant!r}; give the word inside the file names, such as fp16."
        if self.enable_npu_flash_attention and not installed("torch_npu"):
            yield (
                "--enable_npu_flash_attention needs an Ascend NPU and torch_npu, which is not installed: pip install "
                "torch-npu (of torch's version), or leave the flag out."
            )
