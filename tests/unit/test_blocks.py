"""Reading parts of tensors out of a file, against slicing: any boxes, types, alignments and memory, with hashes and without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.boxes import Box
from holdfast.core.documents import digest
from holdfast.core.safetensors import Entry
from holdfast.engine import blocks
from holdfast.engine.blocks import BlockFile, Part, read_parts
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.errors import CorruptCheckpoint
from holdfast.storage import LocalFolder

BLOCK, BUFFER = 64, 16


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    """Blocks of a few elements, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", BLOCK)
        patch.setattr(blocks, "BUFFER", BUFFER)
        patch.setattr(blocks, "_GAP", 8)
        yield


class Counting(LocalFolder):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[int] = []

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        super().read_into(path, offset, target)
        self.read += range(offset, offset + len(target))


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...], Box, int, bool]]:
    """dtype, shape of the piece, wanted box in it, bytes of padding before it, and whether its memory has gaps."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, n - o)) for n, o in zip(shape, offset, strict=True))
        found.append((draw(st.sampled_from(["F32", "BF16", "U8", "I64", "C128"])), shape, Box(offset, size), draw(st.integers(0, 9)), draw(st.booleans())))
    return found


def content(tensor: torch.Tensor) -> bytes:
    """Compared as bytes: random ones may be no numbers."""
    return bytes(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8).tolist())


@settings(deadline=None, max_examples=150)
@given(tensors(), st.booleans(), st.integers(1, 3))
def test_any_part_is_what_slicing_gives(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[str, tuple[int, ...], Box, int, bool]], hashed: bool, workers: int
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    data, parts, expected, needed = bytearray(), [], [], set()
    for number, (dtype, shape, box, padding, gaps) in enumerate(wanted):
        data += bytes(padding)
        value = torch.randint(0, 200, (*shape, 16 if dtype == "C128" else DTYPE_OF[dtype].itemsize), dtype=torch.uint8)
        whole = value.view(DTYPE_OF[dtype]).view(shape) if dtype != "U8" else value.view(shape)
        entry = Entry(dtype, shape, len(data), len(data) + value.numel())
        data += bytes(value.flatten().tolist())
        memory = torch.zeros((*box.size, 2) if gaps else box.size, dtype=whole.dtype)
        target = memory[..., 0] if gaps else memory
        origin = Box((5,) * len(shape), shape)  # the piece is somewhere in a larger tensor
        parts.append(Part(str(number), dtype, entry, origin, Box(tuple(o + 5 for o in box.offset), box.size), target))
        expected.append(whole[box.slices()])
        item = value.shape[-1]
        addresses = entry.start + item * torch.arange(prod(shape)).view(shape)[box.slices()].flatten()
        needed |= {int(a) + i for a in addresses for i in range(item)}
    (folder / "file").write_bytes(bytes(data))
    storage = Counting(folder)
    hashes = [digest(bytes(data[i : i + BLOCK])) for i in range(0, len(data), BLOCK)] if hashed else None
    done = read_parts(BlockFile(storage, "file", len(data), hashes, BLOCK), parts, workers)
    for part, value in zip(parts, expected, strict=True):
        assert content(part.target) == content(value)
    assert done == len(storage.read)
    assert needed <= set(storage.read)
    if hashed:  # only blocks in which something is wanted, each once
        assert len(set(storage.read)) == len(storage.read)
        assert {b // BLOCK for b in storage.read} == {b // BLOCK for b in needed}


@pytest.mark.parametrize("straight", [True, False])
def test_a_flipped_bit_is_found_wherever_the_block_goes(tmp_path: Path, straight: bool) -> None:
    data = bytearray(range(256))
    hashes = [digest(bytes(data[i : i + BLOCK])) for i in range(0, 256, BLOCK)]
    data[100] ^= 1
    (tmp_path / "file").write_bytes(bytes(data))
    file = BlockFile(LocalFolder(tmp_path), "file", 256, hashes, BLOCK)
    box = Box((0,), (256,) if straight else (70,))
    part = Part("t", "U8", Entry("U8", (256,), 0, 256), Box((0,), (256,)), box, torch.zeros(box.size, dtype=torch.uint8))
    with pytest.raises(CorruptCheckpoint, match=r"block 1 .* is not what was written"):
        read_parts(file, [part])
    with pytest.raises(CorruptCheckpoint, match="block 1 "):
        file.take(60, 65)
    assert bytes(file.take(3, 9)) == bytes(range(3, 9))


def test_a_file_that_is_read_in_parts_is_opened_once(tmp_path: Path) -> None:
    """By each thread: what another reads, and what is read afterwards, is the file that stands there."""
    folder, buffer = LocalFolder(tmp_path), bytearray(3)
    (tmp_path / "a").write_bytes(b"abcdef")
    (tmp_path / "b").write_bytes(b"uvwxyz")

    def read(path: str, at: int) -> bytes:
        folder.read_into(path, at, memoryview(buffer))
        return bytes(buffer)

    with folder.opened("a"):
        (tmp_path / "a").unlink()
        assert read("a", 3) == b"def"
        assert read("a", 0) == b"abc"
        assert read("b", 1) == b"vwx"
        with pytest.raises(EOFError, match="a ends at byte 6, 1 bytes too early"):
            read("a", 4)
        with ThreadPoolExecutor(1) as other, pytest.raises(FileNotFoundError):
            other.submit(read, "a", 0).result()
        with folder.opened("b"):
            assert read("b", 0) == b"uvw"
        assert read("a", 0) == b"abc"
    with pytest.raises(FileNotFoundError):
        read("a", 0)
