"""The recipes of `holdfast train`: each is one file of model, data and loss."""

from __future__ import annotations

# Name on the command line -> module with `Config` (importable without torch), or `parse(arguments)`, and `main(config)`.
RECIPES: dict[str, str] = {
    "flux-dreambooth": "holdfast.recipes.flux_dreambooth",
    "flux2-lora": "holdfast.recipes.flux2_lora",
    "causal-lm": "holdfast.recipes.causal_lm",
}
