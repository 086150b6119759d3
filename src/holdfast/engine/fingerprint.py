"""Whether a tensor's bytes are still what they were, at the speed of its memory.

On the host that is XXH3 of its bytes. On a device nothing but sums leaves it: the bytes are taken as 64-bit integers in rows of
an odd length, each row and each column is summed (modulo 2**64), and the sums are hashed. An odd length, so that to change the
same bit of all numbers changes a sum, too. It finds what training code does to weights by mistake; it withstands no adversary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

ROW = 1021
"""64-bit integers in a row: the sums are then 1/500 of the bytes for a large tensor."""

HOST, DEVICE = "host", "device"


def kind_of(tensor: torch.Tensor) -> str:
    """Which of the two a tensor's fingerprint is: they cannot be compared with each other."""
    return HOST if tensor.device.type == "cpu" else DEVICE


def fingerprints(tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[str]:
    """One for each tensor, of its dtype's bytes in row-major order; what devices have to tell comes in one copy each."""
    result = [""] * len(tensors)
    sums: dict[torch.device, list[tuple[int, list[torch.Tensor]]]] = {}
    with torch.no_grad():
        for i, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if kind == HOST:
                result[i] = xxhash.xxh3_128_hexdigest(data.numpy().data) if len(data) else ""
            else:
                sums.setdefault(data.device, []).append((i, list(_sums(data))))
        for found in sums.values():
            told = torch.cat([part for _, parts in found for part in parts]).cpu().numpy().tobytes()
            at = 0
            for i, parts in found:
                n = 8 * sum(len(part) for part in parts)
                result[i] = xxhash.xxh3_128_hexdigest(told[at : at + n])
                at += n
    return result


def _sums(data: torch.Tensor) -> list[torch.Tensor]:
    """Vectors of 64-bit integers: of rows, of columns, and what fills no row as it is."""
    whole = len(data) // (8 * ROW) * (8 * ROW)
    body, rest = data[:whole], data[whole:]
    padded = torch.zeros(-(-len(rest) // 8) * 8, dtype=torch.uint8, device=data.device)
    padded[: len(rest)] = rest
    vectors = [padded.view(torch.int64)]
    if whole:
        if body.storage_offset() % 8:
            body = body.clone()
        rows = body.view(torch.int64).view(-1, ROW)
        vectors += [rows.sum(1), rows.sum(0)]
    return vectors
