"""Folders on each node's own disk: which ranks write to the same one, found out and not asked; and what they finish together.

Rank 0 makes a file with the run's nonce in its name. A rank that does not see it in its folder makes one of its own; when all of
these have, each lists its folder, and those that see each other's file share one. The lowest rank of each folder leads there: it
holds the lease, tidies, puts the manifest and removes old checkpoints. `homes` has for each rank the one that leads in its folder;
it is empty where all share one.

A job that dies may leave receipts of one save in several folders, and the manifest in some of them. No folder says by itself
whether all ranks had written; so the leaders put together what their folders have, and complete what is whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.documents import Json
from holdfast.core.manifest import Announcement
from holdfast.engine import repair
from holdfast.engine.deadlines import poll_of
from holdfast.engine.resume import checkpoint_folders
from holdfast.engine.store import Store, name_ranks
from holdfast.errors import CorruptCheckpoint, DeadlineExceeded, HoldfastError, UsageError
from holdfast.storage import Storage

log = logging.getLogger("holdfast")

_FOLDER = ".holdfast"
_TOKEN = re.compile(r"here-([0-9a-f]+)-(\d{1,7})")


def token(nonce: str, rank: int) -> str:
    return f"{_FOLDER}/here-{nonce}-{rank}"


def leave_token(storage: Storage, nonce: str, rank: int) -> None:
    storage.make_folder(_FOLDER)
    storage.put(token(nonce, rank), b"")


def sees_rank_0(storage: Storage, nonce: str) -> bool:
    """A name that nobody has asked for before: no cache of a network file system knows it by hearsay."""
    return storage.exists(token(nonce, 0))


def remove_tokens(storage: Storage) -> None:
    """This run's, when all have looked, and those of runs that died while they met."""
    for name in storage.names(_FOLDER):
        if _TOKEN.fullmatch(name):
            storage.remove(f"{_FOLDER}/{name}")


@dataclass
class Neighbours:
    """The exchange between rank 0 and the ranks that do not see its folder; `store` is below the run's nonce."""

    store: Store
    rank: int
    world_size: int
    patience: float
    """Seconds that rank 0 waits for each step of the others, who wait twice as long for its: it may still be waiting itself."""

    def tell(self, what: str, value: object) -> None:
        self.store.publish(f"folders/{what}/{self.rank}", json.dumps(value).encode())

    def hear(self, what: str, rank: int) -> Json:
        """What `rank` tells; an error of any rank is raised here, too.

        Raises:
            DeadlineExceeded: it tells nothing in time.
        """
        return json.loads(self._await(lambda: self.store.look(f"folders/{what}/{rank}"), what, lambda: [rank]))

    def _await(self, look: Callable[[], bytes | None], what: str, missing: Callable[[], Sequence[int]]) -> bytes:
        patience = self.patience * (2 if self.rank else 1)
        end = time.monotonic() + patience
        while (told := look()) is None:
            if (failed := self.store.look("folders/error")) is not None:
                error = json.loads(failed)
                raise (DeadlineExceeded if error["late"] else UsageError)(error["message"])
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"rank {self.rank} on {socket.gethostname()}: {name_ranks(missing())} did not tell of the folder there within "
                    f"{patience:.0f} s ('{what}'); look into the log there"
                )
            time.sleep(poll_of(self.rank, self.world_size))
        return told

    def fail(self, error: BaseException) -> None:
        """Tell all ranks why there will be no run."""
        text = str(error.args[0]) if isinstance(error, HoldfastError) and error.args else f"{type(error).__name__}: {error}"
        where = f"rank {self.rank} on {socket.gethostname()}"
        told = {"late": isinstance(error, DeadlineExceeded), "message": text if where in text else f"{where}: {text}"}
        with contextlib.suppress(RuntimeError):  # the store may be what has failed
            self.store.claim("folders/error", json.dumps(told).encode())

    def say_whether(self, sees: bool) -> None:
        """On all ranks but 0: whether this one sees its folder."""
        self.tell("sees", sees)
        self.store.add("folders/looked", 1)

    def await_strangers(self) -> list[int]:
        """On rank 0: the ranks that do not see its folder."""
        keys = {rank: f"folders/sees/{rank}" for rank in range(1, self.world_size)}
        self._await(
            lambda: b"all" if self.store.add("folders/looked", 0) == len(keys) else None,
            "sees",
            lambda: [rank for rank, key in keys.items() if self.store.look(key) is None],
        )
        told = self.store.gather(list(keys.values()))
        return [rank for rank, sees in zip(keys, told, strict=True) if not json.loads(sees)]

    def strangers(self) -> list[int]:
        return [int(rank) for rank in self.hear("strangers", 0)]

    def find_homes(self, storage: Storage, nonce: str, strangers: Sequence[int]) -> tuple[int, ...]:
        """For each rank, the lowest one that sees the same folder."""
        if self.rank in strangers:
            leave_token(storage, nonce, self.rank)
            if self.store.add("folders/tokens", 1) == len(strangers):
                self.store.publish("folders/all tokens", b"1")
            self._await(lambda: self.store.look("folders/all tokens"), "token", lambda: strangers)
            matches = (_TOKEN.fullmatch(name) for name in storage.names(_FOLDER))
            self.tell("home", min(int(m[2]) for m in matches if m is not None and m[1] == nonce))
        if self.rank == 0:
            homes = [0] * self.world_size
            for rank in strangers:
                homes[rank] = self.hear("home", rank)
            if any(homes[home] != home for home in homes):
                raise UsageError(f"the ranks do not agree on who shares a folder: {homes}. A file system shows some of them old listings")
            self.tell("homes", homes)
        return tuple(self.hear("homes", 0))

    def highest(self, homes: Sequence[int]) -> int:
        """The sequence number of the run: the highest of those that the leaders took their folders with."""
        if self.rank == 0:
            self.tell("run", max(self.hear("sequence", leader) for leader in sorted(set(homes))))
        return int(self.hear("run", 0))

    def complete_together(self, storage: Storage, homes: Sequence[int]) -> None:
        """On the leaders: put the manifests of saves that are whole over all folders, and lack it in some."""
        self.tell("begun", begun(storage))
        if self.rank == 0:
            self.tell("whole", whole([self.hear("begun", leader) for leader in sorted(set(homes))]))
        complete(storage, self.hear("whole", 0))

    def all_ready(self, homes: Sequence[int]) -> None:
        """Until every leader has its folder in order; each tells where it is."""
        if self.rank in homes:
            self.tell("ready", socket.gethostname())
        if self.rank == 0:
            for leader in set(homes):
                self.hear("ready", leader)
            self.tell("go", True)
        self.hear("go", 0)


def name_folders(neighbours: Neighbours, homes: Sequence[int]) -> str:
    """`ranks 0 and 1 on node7, ranks 2 and 3 on node8`, the first few."""
    leaders = sorted(set(homes))
    named = [f"{name_ranks([r for r, h in enumerate(homes) if h == at])} on {neighbours.hear('ready', at)}" for at in leaders[:4]]
    return ", ".join(named) + (f" and {len(leaders) - 4} more" if len(leaders) > 4 else "")


Begun = dict[str, dict[str, list[dict[str, Json]]]]
"""Folder -> attempt -> what each rank's receipt says, for those whose files are there."""


def begun(storage: Storage) -> Begun:
    """The attempts that may only lack a manifest, here or in another folder: newer than the manifest that is here, or its own."""
    found: Begun = {}
    for folder in checkpoint_folders(storage):
        try:
            attempts = repair.durable_attempts(storage, folder)
        except OSError as error:
            log.warning("%s: cannot look into %s: %s", storage.describe(), folder, error)
            continue
        for attempt, receipts in attempts.items():
            found.setdefault(folder, {})[attempt] = [
                {
                    "announcement": json.loads(Announcement.of(r).encoded()),
                    "order": [r.run_sequence, r.save_index],
                    "world_size": r.world_size,
                }
                for r in receipts
            ]
    return found


def whole(found: Sequence[Begun]) -> Begun:
    """Of what the folders have, the attempts of which every rank's part is in one of them: all that is known of each, by rank."""
    merged: Begun = {}
    for begun_there in found:
        for folder, attempts in begun_there.items():
            for attempt, parts in attempts.items():
                merged.setdefault(folder, {}).setdefault(attempt, []).extend(parts)
    complete: Begun = {}
    for folder, attempts in merged.items():
        for attempt, parts in attempts.items():
            by_rank = {part["announcement"]["rank"]: part for part in parts}
            agreed = {json.dumps([p["order"], p["world_size"]]) for p in parts}
            if len(agreed) == 1 and sorted(by_rank) == list(range(parts[0]["world_size"])):
                complete.setdefault(folder, {})[attempt] = [by_rank[rank] for rank in sorted(by_rank)]
    return complete


def complete(storage: Storage, found: Begun) -> None:
    """Put the manifests that are missing here."""
    for folder, attempts in found.items():
        for parts in attempts.values():
            announcements = [Announcement.parse(json.dumps(p["announcement"]).encode(), folder) for p in parts]
            run_sequence, save_index = parts[0]["order"]
            try:
                if repair.complete_with(storage, folder, announcements, run_sequence, save_index):
                    log.warning("%s: completed %s: all ranks had written it, each into its folder", storage.describe(), folder)
            except (CorruptCheckpoint, ValueError, OSError) as error:
                log.warning("%s: left %s as it is: %s", storage.describe(), folder, error)
