"""What a restore reads: for each tensor of this rank, the pieces in the ranks' files that fill it, straight into place.

A tensor is met as *targets*: boxes of the global tensor with a view of this rank's memory for each. A DTensor or a plain
tensor is one box, a piece of a flat unit a few. A target asks the checkpoint for the written boxes that meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from holdfast.core.boxes import Box
from holdfast.core.documents import Json
from holdfast.core.flat import Flat, boxes
from holdfast.core.layout import TensorSpec
from holdfast.engine.blocks import Part, read_parts
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.collect import Registered, describe
from holdfast.engine.dtypes import DTYPE_OF
from holdfast.engine.fsdp1 import FlatPiece
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint

Target = tuple[Box, torch.Tensor]


@dataclass
class Restore:
    """What is to be read, by rank whose file holds it, what to look at then, and what to do with it afterwards."""

    checkpoint: Checkpoint
    registered: Registered
    small: dict[str, Json]
    same_world: bool
    parts: dict[int, list[Part]] = field(default_factory=dict)
    checks: list[Callable[[], None]] = field(default_factory=list)
    install: list[Callable[[], None]] = field(default_factory=list)

    def spec(self, name: str) -> TensorSpec:
        return self.checkpoint.tensors[name]

    def saved_name(self, name: str) -> str | None:
        """Under which name the checkpoint holds a tensor: its own, or that of a parameter it was tied to."""
        return name if name in self.checkpoint.tensors else self.checkpoint.aliases.get(name)

    def saved_shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a saved tensor; of a per-rank one, that of the rank whose copy this rank would take."""
        spec = self.spec(name)
        return spec.shape if spec.shape is not None else self.shape_at(self.plain_source(name), name)

    def shape_at(self, rank: int, name: str) -> tuple[int, ...]:
        """The shape of a per-rank tensor in the file of `rank`."""
        return self.checkpoint.own(name, rank).whole.size

    def plain_source(self, name: str) -> int:
        """Whose copy of a per-rank tensor to take: the own one, or, for another number of ranks, one of equal copies."""
        manifest, rank = self.checkpoint.manifest, self.registered.rank
        if self.same_world:
            return rank
        if manifest.plain_equal or self.spec(name).slot is None:
            return rank if rank in self.checkpoint.here else self.checkpoint.first
        return _equal_copy(self.checkpoint, name)

    def check_held(self, name: str, wanted: Box) -> None:
        """Before memory is made for a part of a tensor whose size nothing here tells: the files hold as much as the layout says.

        Raises:
            CorruptCheckpoint: they do not.
        """
        spec = self.spec(name)
        if spec.placement is None:  # its shape stands in the header of the file that has it
            return
        common = (piece.box.intersect(wanted) for piece in self.checkpoint.pieces(name, spec, wanted))
        if sum(box.numel for box in common if box is not None) != wanted.numel:
            raise CorruptCheckpoint(f"{self.checkpoint.where}: the pieces of {name} do not fill it")

    def add(self, name: str, targets: Iterator[Target] | list[Target], kept: bool = False) -> None:
        """Find what fills `targets` with the saved tensor `name`; with `kept` they have what the base holds already."""
        for box, view in targets:
            if self.spec(name).placement is None:
                pieces = iter([self.checkpoint.own(name, self.plain_source(name))])
            else:
                pieces = self.checkpoint.pieces(name, self.spec(name), box)
            for p in pieces:
                if p.source >= 0 or not kept:
                    self._add_part(p.source, Part(name, p.dtype, p.entry, p.whole, p.box, view), box)

    def add_piece(self, rank: int, name: str, piece: Box, box: Box, view: torch.Tensor) -> None:
        """Fill the target from one rank's file, which holds `piece` of the tensor."""
        entry = self.checkpoint.entry(rank, name)
        self._add_part(rank, Part(name, self.spec(name).dtype, entry, piece, piece, view), box)

    def _add_part(self, rank: int, part: Part, box: Box) -> None:
        """`part.target` holds `box`: keep of both what they have in common."""
        wanted = part.wanted.intersect(box)
        if wanted is None:
            return
        target = part.target
        for d, (o, n) in enumerate(zip(wanted.relative_to(box).offset, wanted.size, strict=True)):
            if n != target.shape[d]:
                target = target.narrow(d, o, n)
        self.parts.setdefault(rank, []).append(Part(part.name, part.dtype, part.entry, part.piece, wanted, target))

    def targets(self, name: str, tensor: torch.Tensor | FlatPiece) -> list[Target]:
        """This rank's part of a tensor, as boxes with their memory."""
        if isinstance(tensor, FlatPiece):
            return list(flat_targets(tensor, tensor.local))
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
        spec = describe(name, tensor, self.registered).spec
        if spec.placement is None or spec.shape is None:
            return [(Box.whole(tuple(tensor.shape)), local)]
        coordinate = spec.placement.mesh.coordinate(self.registered.rank)
        if coordinate is None:
            return []
        assert not isinstance(spec.placement, Flat)
        return [(spec.placement.box(spec.shape, coordinate), local)]

    def resolver(
        self, current: Mapping[str, torch.Tensor] | None = None, in_place: bool = False
    ) -> Callable[[str], torch.Tensor]:
        """Give every tensor of a state tree a new one of its own, laid out like the current one where there is one.

        With `in_place` the current tensor itself is filled where shape and dtype are the same: somebody may hold it.
        """

        def resolve(name: str) -> torch.Tensor:
            spec = self.checkpoint.tensors.get(name)
            if spec is None:
                raise CorruptCheckpoint(f"{self.checkpoint.where}: the state speaks of a tensor {name!r} that is not there")
            shape, dtype = self.saved_shape(name), DTYPE_OF[spec.dtype]
            like = (current or {}).get(name)
            if in_place and like is not None and tuple(like.shape) == shape and like.dtype == dtype:
                tensor = like
            elif like is not None and tuple(like.shape) == shape:
                tensor = torch.empty_like(like, dtype=dtype, requires_grad=False)
            else:
                self.check_held(name, Box.whole(shape))
                tensor = torch.empty(shape, dtype=dtype)
            self.add(name, self.targets(name, tensor))
            return tensor

        return resolve


def flat_targets(piece: FlatPiece, local: torch.Tensor) -> Iterator[Target]:
    """The boxes of a piece in `local`, a vector laid out like it."""
    for box, at in boxes(piece.shape, piece.start, piece.stop):
        yield box, local[at : at + box.numel].view(box.size)


def _equal_copy(checkpoint: Checkpoint, name: str) -> int:
    """A rank whose copy of an optimizer's per-rank tensor equals that of every rank that has one.

    Raises:
        IncompatibleCheckpoint: they differ, so that there is no telling what another number of ranks should get.
    """
    first: tuple[int, bytes] | None = None
    for rank in sorted(checkpoint.here):
        entry = checkpoint.header(rank).get(name)
        if entry is None:
            continue
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        whole = Box.whole((entry.nbytes,))
        read_parts(checkpoint.file(rank), [Part(name, "U8", entry, whole, whole, data)], workers=1)
        content = bytes(data.tolist())
        if first is None:
            first = rank, content
        elif content != first[1]:
            raise IncompatibleCheckpoint(
                f"{checkpoint.where}: {name} differs between rank {first[0]} and rank {rank}, so it cannot be given to "
                f"another number of ranks; resume on {checkpoint.manifest.world_size} ranks"
            )
    if first is None:
        raise CorruptCheckpoint(f"{checkpoint.where}: no rank's file has {name}")
    return first[0]
