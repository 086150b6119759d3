"""Receipts and manifests: a rank's word that its file is durable, and the table of contents that makes a checkpoint count.

A manifest names the files of exactly one attempt and holds the digest of every receipt; a receipt holds the hash of every
block of its rank's file and the digest of its layout. So one number, the manifest's digest, identifies every byte of a
checkpoint. A manifest has no times and no hosts: two committers of the same receipts write the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from holdfast.core.documents import Fields, Json, canonical, digest, parse
from holdfast.core.layout import MAX_RANKS
from holdfast.errors import CorruptCheckpoint

FORMAT, RECEIPT_FORMAT, VERSION = "holdfast-checkpoint", "holdfast-receipt", 1

MANIFEST_FILE = "manifest.json"

BLOCK = 1 << 20
"""Bytes per hash. A reader that needs a part of a block reads and checks all of it, so the block is the unit of waste: at
1 MiB a row range of a large matrix wastes little, and the hashes of a 10 GB file take 330 KB of its receipt."""

MAX_NOTES = 1024
"""Models that a run can have been given; more notes than that are nobody's."""

MAX_SEQUENCE = 10**15
"""Runs are counted one by one: a higher number is made up, and would leave none for the runs after it."""

_ATTEMPT = re.compile(r"[0-9a-f]{8,32}-[0-9]{1,12}")


def attempt_name(nonce: str, save_index: int) -> str:
    return f"{nonce}-{save_index}"


def rank_file(rank: int, attempt: str) -> str:
    return f"rank-{rank:05d}-{attempt}.safetensors"


def receipt_file(rank: int, attempt: str) -> str:
    return f"rank-{rank:05d}-{attempt}.json"


def layout_file(layout_digest: str) -> str:
    return f"layout-{layout_digest}.json"


REMOVED = "removed-"


def removed_file(attempt: str) -> str:
    """An empty file: this attempt is being removed, and nobody should complete it once its manifest is gone."""
    return f"{REMOVED}{attempt}"


RANK_NAME = re.compile(r"rank-(\d{5,})-([0-9a-f]{8,32}-\d{1,12})\.(safetensors|json)")


@dataclass(frozen=True, slots=True)
class BaseNote:
    """For people and for exports: from which folder (and repository, at which revision) a model was loaded.

    `model` is the name that its tensors begin with. What the folder has to hold is said elsewhere, by digests.
    """

    model: str
    path: str
    repository: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        if self.repository is None:
            return self.path
        return f"{self.repository} at revision {self.revision} ({self.path})"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank wrote in one attempt.

    `plain` is one digest over the tensors that every rank writes for itself: where all ranks' agree, they are copies of each
    other. `blocks` are xxh3-128 hashes of consecutive pieces of `block_size` bytes of the rank's file. `home` is set where the ranks
    wrote to several folders: the lowest rank that wrote to the same one.
    """

    attempt: str
    run_sequence: int
    save_index: int
    step: int
    rank: int
    world_size: int
    layout: str
    size: int
    block_size: int
    blocks: tuple[str, ...]
    plain: str
    host: str
    captured_s: float
    written_s: float
    metric: float | None = None
    groups: str | None = None
    bases: tuple[BaseNote, ...] = ()
    home: int | None = None

    def encoded(self) -> bytes:
        document = {"format": RECEIPT_FORMAT, "version": VERSION, **asdict(self), "blocks": list(self.blocks)}
        document["bases"] = [_without_none(asdict(note)) for note in self.bases] or None
        return canonical(_without_none(document))

    @classmethod
    def parse(cls, data: bytes, what: str) -> Receipt:
        fields = Fields(parse(data, what), what)
        fields.expect("format", RECEIPT_FORMAT)
        fields.version(VERSION)
        receipt = cls(
            attempt=_attempt(fields),
            run_sequence=fields.count("run_sequence", MAX_SEQUENCE),
            save_index=fields.count("save_index"),
            step=fields.count("step"),
            rank=fields.count("rank", MAX_RANKS),
            world_size=fields.count("world_size", MAX_RANKS),
            layout=fields.digest("layout"),
            size=fields.count("size"),
            block_size=fields.count("block_size", 1 << 30),
            blocks=fields.digests("blocks"),
            plain=fields.digest("plain"),
            host=fields.get("host", str),
            captured_s=fields.get("captured_s", float),
            written_s=fields.get("written_s", float),
            metric=_metric(fields),
            groups=fields.digest("groups") if "groups" in fields.document else None,
            bases=_notes(fields),
            home=_home(fields),
        )
        if receipt.block_size == 0 or len(receipt.blocks) != -(-receipt.size // receipt.block_size):
            raise CorruptCheckpoint(f"{what}: {len(receipt.blocks)} hashes for {receipt.size} bytes")
        return receipt


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the committer needs to know of a receipt: it travels through the store, so that nobody has to read it back."""

    rank: int
    attempt: str
    step: int
    layout: str
    plain: str
    receipt: str
    metric: float | None = None
    groups: str | None = None
    home: int | None = None

    @classmethod
    def of(cls, receipt: Receipt) -> Announcement:
        own = digest(receipt.encoded())
        return cls(
            receipt.rank, receipt.attempt, receipt.step, receipt.layout, receipt.plain, own, receipt.metric, receipt.groups, receipt.home
        )  # fmt: skip

    def encoded(self) -> bytes:
        return canonical(_without_none(asdict(self)))

    @classmethod
    def parse(cls, data: bytes, what: str) -> Announcement:
        fields = Fields(parse(data, what), what)
        return cls(
            rank=fields.count("rank", MAX_RANKS),
            attempt=_attempt(fields),
            step=fields.count("step"),
            layout=fields.digest("layout"),
            plain=fields.digest("plain"),
            receipt=fields.digest("receipt"),
            metric=_metric(fields),
            groups=fields.digest("groups") if "groups" in fields.document else None,
            home=_home(fields),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The table of contents of one complete checkpoint.

    `run_sequence` and `save_index` order checkpoints by when they were requested, whatever their step; `plain_equal` says
    whether the per-rank tensors of all ranks are copies of each other. `metric` is what rank 0's `save` was given, `groups_differ` says
    that values in the optimizers' parameter groups are not the same on all ranks. `homes` is there where the ranks wrote to several
    folders, each of which has this manifest: for each rank the lowest one that wrote to the same folder.
    """

    attempt: str
    run_sequence: int
    save_index: int
    step: int
    world_size: int
    layouts: tuple[str, ...]
    receipts: tuple[str, ...]
    plain_equal: bool
    metric: float | None = None
    groups_differ: bool | None = None
    homes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, announcements: Sequence[Announcement], run_sequence: int, save_index: int) -> Manifest:
        """The manifest of one announcement per rank, in rank order.

        Raises:
            ValueError: they speak of different attempts or steps; such receipts must never be committed.
        """
        first = announcements[0]
        for rank, a in enumerate(announcements):
            if a.rank != rank or a.attempt != first.attempt or a.step != first.step:
                raise ValueError(
                    f"rank {rank} announced step {a.step} of attempt {a.attempt} as rank {a.rank}, "
                    f"rank 0 step {first.step} of attempt {first.attempt}"
                )
        return cls(
            attempt=first.attempt,
            run_sequence=run_sequence,
            save_index=save_index,
            step=first.step,
            world_size=len(announcements),
            layouts=tuple(sorted({a.layout for a in announcements})),
            receipts=tuple(a.receipt for a in announcements),
            plain_equal=len({a.plain for a in announcements}) == 1,
            metric=first.metric,
            groups_differ=True if len({a.groups for a in announcements}) > 1 else None,
            homes=_homes(announcements),
        )

    @property
    def order(self) -> tuple[int, int]:
        return self.run_sequence, self.save_index

    def encoded(self) -> bytes:
        document: dict[str, Json] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        lists = {"layouts": list(self.layouts), "receipts": list(self.receipts)}
        return canonical(_without_none(document) | lists | ({"homes": list(self.homes)} if self.homes is not None else {}))

    @classmethod
    def parse(cls, data: bytes, what: str) -> Manifest:
        fields = Fields(parse(data, what), what)
        fields.expect("format", FORMAT)
        fields.version(VERSION)
        manifest = cls(
            attempt=_attempt(fields),
            run_sequence=fields.count("run_sequence", MAX_SEQUENCE),
            save_index=fields.count("save_index"),
            step=fields.count("step"),
            world_size=fields.count("world_size", MAX_RANKS),
            layouts=fields.digests("layouts"),
            receipts=fields.digests("receipts"),
            plain_equal=fields.get("plain_equal", bool),
            metric=_metric(fields),
            groups_differ=True if fields.document.get("groups_differ") is True else None,
            homes=fields.counts("homes", MAX_RANKS) if "homes" in fields.document else None,
        )
        if manifest.world_size == 0 or len(manifest.receipts) != manifest.world_size or not manifest.layouts:
            raise CorruptCheckpoint(f"{what}: {len(manifest.receipts)} receipts for {manifest.world_size} ranks")
        if manifest.homes is not None and len(manifest.homes) != manifest.world_size:
            raise CorruptCheckpoint(f"{what}: folders of {len(manifest.homes)} ranks for {manifest.world_size}")
        return manifest


def _home(fields: Fields) -> int | None:
    return fields.count("home", MAX_RANKS) if "home" in fields.document else None


def _homes(announcements: Sequence[Announcement]) -> tuple[int, ...] | None:
    """Raises ValueError where some ranks say that they share one folder, and some that there are several."""
    homes = [a.home for a in announcements if a.home is not None]
    if homes and len(homes) != len(announcements):
        raise ValueError("some ranks wrote to one folder for all and some to one of several")
    return tuple(homes) or None


def _without_none(document: dict[str, Json]) -> dict[str, Json]:
    """A field that is not set is left out."""
    return {k: v for k, v in document.items() if v is not None}


def _notes(fields: Fields) -> tuple[BaseNote, ...]:
    documents = fields.get("bases", list) if "bases" in fields.document else []
    if len(documents) > MAX_NOTES:
        raise CorruptCheckpoint(f"{fields.what}: notes of {len(documents)} bases")
    notes = []
    for document in documents:
        note = Fields(document, f"{fields.what}: base")
        more = {key: note.get(key, str) for key in ("repository", "revision") if key in note.document}
        notes.append(BaseNote(note.get("model", str), note.get("path", str), **more))
    return tuple(notes)


def _metric(fields: Fields) -> float | None:
    return fields.get("metric", float) if "metric" in fields.document else None


def _attempt(fields: Fields) -> str:
    attempt = fields.get("attempt", str)
    if not _ATTEMPT.fullmatch(attempt):  # it becomes part of file names
        raise CorruptCheckpoint(f"{fields.what}: {attempt!r:.60} is no attempt")
    return attempt
