"""The states that are saved: what a rank holds, under FSDP2 (or FSDP1) on CPU ranks.

dense   24 layers of 2048 × 2048 in fp32 with AdamW: 100M parameters, 1.2 GB of state
lora    the same layers frozen, read from a folder, with adapters of rank 64 and AdamW: 403 MB of base, 75 MB that change
small   20,000 parameters of 10 kB with plain SGD: 205 MB in very many pieces
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, RANK = 2048, 24, 64
CASES = ("dense", "lora", "small")


class Adapted(nn.Module):
    """A frozen layer and a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Pieces(nn.Module):
    """A hundred small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterList([nn.Parameter(torch.randn(2560)) for _ in range(100)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([p.sum() for p in self.pieces]).sum()


def bare_model(case: str, width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    if case == "dense":
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    if case == "lora":
        return nn.Sequential(*[Adapted() for _ in range(layers)])
    if case == "small":
        return nn.Sequential(*[Pieces() for _ in range(200)])
    raise ValueError(f"no case {case}")


def unit_classes(case: str) -> type[nn.Module]:
    return {"dense": nn.Linear, "lora": Adapted, "small": Pieces}[case]


def sharded_model(case: str, wrap: str, base: Path | None = None) -> nn.Module:
    """The model of `case` over all ranks; `wrap` is fsdp2, fsdp1 or none (one process).

    `base`: a folder with the frozen weights of `lora`; made by `write_base`.
    """
    model = bare_model(case)
    if wrap == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({unit_classes(case)})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    elif wrap == "fsdp2":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if base is not None and case == "lora":
        import holdfast

        holdfast.load_pretrained(model, base)
    return model


def write_base(folder: Path) -> None:
    """The frozen weights of `lora` as a folder that `load_pretrained` reads; trained parts included, as a start."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors").exists():
        save_file(bare_model("lora").state_dict(), folder / "model.safetensors")


def make_optimizer(case: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if case == "small":
        return torch.optim.SGD(trained, lr=1e-3)
    return torch.optim.AdamW(trained, lr=1e-3)


def set_gradients(model: nn.Module) -> None:
    """Gradients without a backward: the optimizer's step is real, the rest of a step is a sleep."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
