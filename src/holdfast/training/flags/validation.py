"""Pictures along the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.training.flags.base import Flags


@dataclass(kw_only=True)
class ValidationFlags(Flags):
    """Which pictures are made of the model while it is trained, and when."""

    validation_prompt: str | None = None
    """Prompt of the pictures that show how far the training is. Default: no pictures."""

    num_validation_images: int = 4
    """Pictures at each validation; the ranks share them out."""

    validation_epochs: int = 50
    """Passes over the samples between two validations; one more comes at the end."""

    final_validation_prompt: str | None = None
    """Prompt of the pictures at the end. Default: `validation_prompt`."""

    skip_final_inference: bool = False
    """No pictures at the end."""

    @property
    def last_prompt(self) -> str | None:
        """The prompt of the pictures at the end, if there are to be any."""
        return None if self.skip_final_inference else self.final_validation_prompt or self.validation_prompt

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.below({"num_validation_images": 1, "validation_epochs": 1})

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if self.validation_prompt is None:
            yield from self.idle(("validation_epochs",), "without --validation_prompt")
            if self.final_validation_prompt is None:
                yield from self.idle(("num_validation_images", "skip_final_inference"), "without --validation_prompt")
        if self.skip_final_inference:
            yield from self.idle(("final_validation_prompt",), "with --skip_final_inference")
