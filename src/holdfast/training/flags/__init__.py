"""The flags of the recipes in groups that a recipe's `Config` is put together from. A field is a flag (`--output_dir`,
`--output-dir`), its docstring is what `--help` shows. Nothing here imports torch."""
