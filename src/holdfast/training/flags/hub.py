"""Whether and where the result is published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.training.flags.base import Flags


@dataclass(kw_only=True)
class HubFlags(Flags):
    """Upload to the Hugging Face Hub."""

    push_to_hub: bool = False
    """Upload what was trained, with a model card, to the Hugging Face Hub in the end."""

    hub_model_id: str | None = None
    """The repository to upload to. Default: the name of `output_dir`, below your own name."""

    hub_token: str | None = field(default=None, repr=False)
    """Token for the upload; HF_TOKEN or `hf auth login` do not show it to other users of this machine."""

    def warnings(self, total_steps: int) -> Iterator[str]:
        yield from super().warnings(total_steps)
        if not self.push_to_hub:
            yield from self.idle(("hub_model_id", "hub_token"), "without --push_to_hub")
