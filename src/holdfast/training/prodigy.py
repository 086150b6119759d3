"""Prodigy whose step-size estimate `d` is one number for the whole model, however the model is cut.

Prodigy (Mishchenko & Defazio 2023, https://arxiv.org/abs/2306.06101, algorithm 4) is Adam with a step size `d` that it
estimates while it trains. The estimate rests on two sums over every element of the model:

    r <- beta3 * r + sum_i  (d / d0) * dlr * g_i * (p0_i - p_i)         `d_numerator`
    s_i <- beta3 * s_i + (d / d0) * dlr * g_i                           state `s`, and its 1-norm `d_denom`
    d_hat = d_coef * r / sum_i |s_i|,    d <- max(d, d_hat)

Under FSDP a rank holds some of the elements only. `prodigyopt` (1.1.2) adds up what the rank holds, or, once it knows
FSDP1's flat parameters, all-reduces through `.cuda()`: under FSDP2 each rank then follows a `d` of its own. Here

1. a rank adds up what it holds, on the local tensors: no DTensor operation sees the uneven shapes;
2. the sums over a sharded parameter are all-reduced over the mesh dimensions that shard it, and over those only: what is
   replicated (DDP, the replicate dimension of HSDP) is already whole on every rank. This is one all-reduce of two numbers
   for each mesh and step, whatever the number of parameters, and every rank takes part in it even if it has no gradient;
3. every rank computes the same `d` from the same sums.

On one process each step is bit for bit that of `prodigyopt`. On several ranks the sums are taken in another order, so
that `d` equals that of one process up to rounding: with fp32 gradients 1e-5, relative. (With bf16 or fp16 parameters each
local sum is rounded to that type, by `prodigyopt` too.)

The state tensors `s`, `p0`, `exp_avg` and `exp_avg_sq` have the shape and the placement of their parameter, so that a
checkpoint can cut them anew. With `slice_p > 1`, `s` and `p0` hold every `slice_p`-th element of the local shard: they
are only good for the world size and the sharding that they were made with, and `d` is an estimate from other elements
for each of these.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import prodigyopt
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from holdfast.engine.fsdp1 import shard_group

# Over which groups a parameter's sums are to be added up, and the type of device that these groups work on.
_Reduction = tuple[str, tuple[dist.ProcessGroup, ...]]
_WHOLE: _Reduction = ("cpu", ())


class Prodigy(prodigyopt.Prodigy):  # type: ignore[misc]  # the library has no types
    """`prodigyopt.Prodigy`, with the same arguments, for one process, DDP, FSDP1, FSDP2 and HSDP, with or without CPU offload.

    Parameters that are DTensors are treated by their mesh and placements, those of FSDP1 by the group of their unit; a
    plain tensor counts as whole on every rank (unless its param group has `fsdp_in_use=True`: then as this rank's own part
    of it, in the default process group).

    `d`, `d_max`, `d_numerator`, `d_denom` and `d_hat` are plain floats in every param group, equal on all ranks.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; collective over the ranks that share a sharded parameter.

        Raises RuntimeError where two param groups have different learning rates other than 0.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        first, last = self.param_groups[0], self.param_groups[-1]
        d, d_max = first["d"], first["d_max"]
        lr = max(group["lr"] for group in self.param_groups)
        dlr = d * lr * _bias_correction(first)
        for group in self.param_groups:
            if group["lr"] not in (lr, 0.0):
                raise RuntimeError(
                    f"Prodigy has one learning rate: param groups may differ from it ({lr}) by being 0 only, "
                    f"not by {group['lr']}"
                )

        updates, sums = self._observe(d, dlr)
        delta_numerator, d_denom = _add_up(sums)
        if d_denom == 0:  # no gradient anywhere, or a learning rate of 0: nothing to learn from and no direction to go
            return loss

        d_numerator = first["d_numerator"] * _beta3(first) + delta_numerator
        d_hat = first["d_coef"] * d_numerator / d_denom
        if d == last["d0"]:
            d = max(d, d_hat)
        d_max = max(d_max, d_hat)
        d = min(d_max, d * first["growth_rate"])

        for group, params in zip(self.param_groups, updates, strict=True):
            group.update(d_numerator=d_numerator, d_denom=d_denom, d=d, d_max=d_max, d_hat=d_hat)
            for param, grad in params:
                self._move(param, grad, group, first, dlr)
            group["k"] += 1
        return loss

    def _observe(
        self, d: float, dlr: float
    ) -> tuple[list[list[tuple[torch.Tensor, torch.Tensor]]], dict[_Reduction, _Sums]]:
        """Take the gradients into the moments and into `s`; return (parameter, local gradient) by param group, and the sums.

        There is an entry in the sums for every reduction, also where a rank has no gradient: its peers may have one.
        """
        first = self.param_groups[0]
        beta1, beta2 = first["betas"]
        beta3 = _beta3(first)
        sums: dict[_Reduction, _Sums] = {}
        updates: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for group in self.param_groups:
            stride = group["slice_p"]
            updates.append([])
            for param in group["params"]:
                partial = sums.setdefault(self._reduction(param, group["fsdp_in_use"]), _Sums())
                if param.grad is None:
                    continue
                state = self._initialised(param, beta1, stride)
                local, grad = _local(param), _local_gradient(param)
                if group["weight_decay"] != 0 and not first["decouple"]:
                    grad.add_(local, alpha=group["weight_decay"])
                updates[-1].append((param, grad))
                if group["lr"] <= 0.0:
                    continue

                s, p0 = _local(state["s"]), _local(state["p0"])
                observed = _sliced(grad, stride)
                distance = p0.flatten() - _sliced(local, stride).flatten()
                partial.numerators.append(((d / group["d0"]) * dlr, torch.dot(observed.flatten(), distance)))
                if beta1 > 0:
                    _local(state["exp_avg"]).mul_(beta1).add_(grad, alpha=d * (1 - beta1))
                _local(state["exp_avg_sq"]).mul_(beta2).addcmul_(grad, grad, value=d * d * (1 - beta2))
                weight = d if group["safeguard_warmup"] else dlr
                s.mul_(beta3).add_(observed.reshape(s.shape), alpha=(d / group["d0"]) * weight)
                partial.denominators.append(s.flatten().abs().sum())
        return updates, sums

    def _reduction(self, param: torch.Tensor, own_part: bool) -> _Reduction:
        """Over which ranks the sums of `param` have to be added up."""
        if getattr(param, "_fsdp_flattened", False):
            groups: dict[int, dist.ProcessGroup | None] = self.__dict__.get("_groups", {})
            if id(param) not in groups:
                self._groups = groups = _flat_groups()
            group = groups.get(id(param), dist.group.WORLD)
            return _over(group) if group is not None else _WHOLE
        if own_part and dist.is_initialized() and dist.get_world_size() > 1:
            assert dist.group.WORLD is not None
            return _over(dist.group.WORLD)
        return _reduction_of(param)

    def _initialised(self, param: torch.Tensor, beta1: float, stride: int) -> dict[str, Any]:
        """The state of `param`, made at its first gradient."""
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            whole = param.detach() if stride == 1 else _sliced(_local(param), stride)
            state["step"] = 0
            state["s"] = torch.zeros_like(whole)
            state["p0"] = whole.clone()
            if beta1 > 0:
                state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state

    def _move(
        self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], first: dict[str, Any], dlr: float
    ) -> None:
        """Adam's step with the new `d` in its denominator; `dlr` has the `d` that the moments were scaled with."""
        state, local = self.state[param], _local(param)
        state["step"] += 1
        denom = _local(state["exp_avg_sq"]).sqrt().add_(group["d"] * group["eps"])
        if group["weight_decay"] != 0 and first["decouple"]:
            local.add_(local, alpha=-group["weight_decay"] * dlr)
        if first["betas"][0] > 0:
            local.addcdiv_(_local(state["exp_avg"]), denom, value=-dlr)
        else:
            local.addcdiv_(grad, denom, value=-dlr * group["d"])


class _Sums:
    """What one rank knows of the two sums: numbers still on their device, so that the host waits once and not for each."""

    def __init__(self) -> None:
        self.numerators: list[tuple[float, torch.Tensor]] = []  # (factor, 0-dim tensor)
        self.denominators: list[torch.Tensor] = []

    def totals(self) -> tuple[float, float]:
        """(numerator, denominator) over this rank's elements, added up in float64 in the order of the parameters."""
        values = _floats([tensor for _, tensor in self.numerators] + self.denominators)
        count = len(self.numerators)
        numerator = sum(factor * value for (factor, _), value in zip(self.numerators, values[:count], strict=True))
        return float(numerator), float(sum(values[count:]))


def _floats(tensors: list[torch.Tensor]) -> list[float]:
    """The values of 0-dim tensors, with one transfer for each device and dtype."""
    batches: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        batches.setdefault((tensor.device, tensor.dtype), []).append(index)
    values = [0.0] * len(tensors)
    for indices in batches.values():
        for index, value in zip(indices, torch.stack([tensors[i] for i in indices]).tolist(), strict=True):
            values[index] = value
    return values


def _add_up(sums: dict[_Reduction, _Sums]) -> tuple[float, float]:
    """(numerator, denominator) of the whole model from this rank's sums: one all-reduce of two numbers for each mesh."""
    numerator = denominator = 0.0
    for (device_type, groups), partial in sums.items():
        part = partial.totals()
        if groups:
            # Not every accelerator adds float64; float32 is as exact as the local sums of fp32 parameters are.
            dtype = torch.float64 if device_type in ("cpu", "cuda") else torch.float32
            both = torch.tensor(part, dtype=dtype, device=device_type)
            for group in groups:
                dist.all_reduce(both, group=group)
            part = tuple(both.tolist())
        numerator += part[0]
        denominator += part[1]
    return numerator, denominator


def _reduction_of(param: torch.Tensor) -> _Reduction:
    """Over which ranks the sums of a DTensor have to be added up: those of the mesh dimensions that cut it."""
    if not isinstance(param, DTensor):
        return _WHOLE
    mesh = param.device_mesh
    cut = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]
    groups = tuple(mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1)
    return (mesh.device_type, groups) if groups else _WHOLE


def _over(group: dist.ProcessGroup) -> _Reduction:
    accelerator = torch.accelerator.current_accelerator()
    on_host = accelerator is None or dist.get_backend(group) == dist.Backend.GLOO
    return ("cpu" if on_host or accelerator is None else accelerator.type, (group,))


def _flat_groups() -> dict[int, dist.ProcessGroup | None]:
    """By id of every FSDP1 parameter, flat or original, the ranks that cut its unit; None where each holds the whole.

    FSDP1 leaves no way from a parameter to its module, and an optimizer is not shown the model, so the modules are looked
    for among all living objects, once. (Adding up over all ranks would do for `d` itself, which is a quotient, but not for
    `d_numerator`, which a checkpoint carries to other shardings.)
    """
    found: dict[int, dist.ProcessGroup | None] = {}
    for module in [o for o in gc.get_objects() if issubclass(type(o), FullyShardedDataParallel)]:
        if module._handle is not None:
            group = shard_group(module)
            flat: Any = module._handle.flat_param
            for parameter in (flat, *(flat._params or ()), *(flat._shared_params or ())):
                found[id(parameter)] = group
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _local_gradient(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient, cut as the parameter is (tensor parallelism leaves some as partial sums)."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return _local(grad)


def _sliced(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """`tensor` itself, or a 1-D tensor of every `stride`-th of its elements."""
    return tensor if stride == 1 else tensor.flatten()[::stride]


def _beta3(group: dict[str, Any]) -> float:
    return math.sqrt(group["betas"][1]) if group["beta3"] is None else float(group["beta3"])


def _bias_correction(group: dict[str, Any]) -> float:
    if not group["use_bias_correction"]:
        return 1
    beta1, beta2 = group["betas"]
    return float(((1 - beta2 ** (group["k"] + 1)) ** 0.5) / (1 - beta1 ** (group["k"] + 1)))
