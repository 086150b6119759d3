"""Which checkpoint a run continues from: the newest that every rank finds whole, the same on all ranks.

Rank 0 proposes, newest first. Every rank looks (names, shapes, documents; no memory touched) and votes, rank 0 decides; the
ranks read, vote again on what they read, and rank 0 decides again. A checkpoint that fails on any rank is passed over on
all. Newest means the highest (run sequence, save index) in the manifest, never a time, a name or a step.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.manifest import MANIFEST_FILE, RANK_NAME, Manifest
from holdfast.engine import repair, restore
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.collect import Registered
from holdfast.engine.deadlines import Deadlines, pauses, poll_of
from holdfast.engine.foreign_checkpoint import ForeignCheckpoint, identity_of, is_foreign
from holdfast.engine.retention import Complete
from holdfast.engine.store import Store, name_ranks
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    DeadlineExceeded,
    HoldfastError,
    IncompatibleCheckpoint,
    NoUsableCheckpoint,
    UsageError,
)
from holdfast.formats.recognise import recognise
from holdfast.storage import LocalFolder, Storage

log = logging.getLogger("holdfast")

_FOLDER = re.compile(r"checkpoint-(\d+)")


def folder_of(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoint_folders(storage: Storage) -> list[str]:
    """What may be a checkpoint: by its name, or because a rank has written into it (a script's own name for its folders)."""
    names = (n for n in sorted(storage.names("")) if not n.startswith("."))
    return [n for n in names if _FOLDER.fullmatch(n) or any(RANK_NAME.fullmatch(inner) for inner in storage.names(n))]


def tidy(storage: Storage, together: bool = False) -> list[str]:
    """Complete what only lacks its manifest, and remove what dead attempts left; returns what was done, for people.

    Nobody else may be saving to `storage`: for the owner of its lease before its first save, and for `holdfast repair`. Of saves into
    several folders the parts stay, unless the leaders of these have completed `together` what was whole.
    """
    done = []
    for name in checkpoint_folders(storage):
        try:
            if repair.finish(storage, name) is not None:
                done.append(f"completed {name}: all ranks had written it and only its manifest was missing or damaged")
            elif not together and repair.is_part(storage, name):
                done.append(f"left {name} as it is: a part of a save into several folders, which a run on all of them completes or removes")
            elif removed := repair.remove_leftovers(storage, name):
                done.append(f"removed {len(removed)} files of interrupted saves from {name}")
        except OSError as error:
            done.append(f"left {name} as it is: {error}")
    for line in done:
        log.warning("%s: %s", storage.describe(), line)
    return done


@dataclass(frozen=True, slots=True)
class Survey:
    """The complete checkpoints of an output folder, newest first; why others are incomplete, or cannot be used at all."""

    complete: list[Complete]
    incomplete: list[str]
    unusable: list[str]


def survey(storage: Storage) -> Survey:
    """Look at every checkpoint folder's manifest, and at nothing else."""
    complete: list[Complete] = []
    incomplete, unusable = [], []
    for name in checkpoint_folders(storage):
        path = f"{name}/{MANIFEST_FILE}"
        try:
            manifest = Manifest.parse(storage.get(path), f"{storage.describe()}/{path}")
            complete.append(Complete(name, manifest.order, manifest.step, manifest.metric))
        except (FileNotFoundError, NotADirectoryError):
            kind = recognise(storage, name)
            of_others = f"{name} is {kind}: give its path to resume from it"
            incomplete.append(of_others if kind else f"{name} is incomplete: it has no {MANIFEST_FILE}, its save was interrupted")
        except (CheckpointError, OSError) as error:
            unusable.append(f"{name} cannot be used: {error}")
    return Survey(sorted(complete, key=lambda c: c.order, reverse=True), incomplete, unusable)


@dataclass
class Resume:
    """One `resume()` of all ranks together. `index` tells it from earlier ones of the same run, `leaders` are the ranks that speak for
    the folders that the ranks see: rank 0 alone, where all see one."""

    store: Store
    registered: Registered
    deadlines: Deadlines
    index: int
    leaders: Sequence[int] = (0,)
    plan: restore.Restore | None = None
    """What was restored, once it was."""

    def newest(self, storage: Storage) -> Checkpoint | None:
        """Continue from the newest checkpoint that holds on all ranks; None where there is none yet.

        Raises:
            NoUsableCheckpoint: there are complete ones, and none holds.
            IncompatibleCheckpoint: the newest is of another model or optimizer: older ones would be too.
        """
        candidates: list[str] = []
        reasons: list[str] = []
        if self.registered.rank == 0:
            candidates, reasons = self._everywhere(storage)
        elif self.registered.rank in self.leaders:
            self.store.publish(f"resume/{self.index}/complete/{self.registered.rank}", json.dumps(_digests(storage)).encode())
        for number in range(1 << 30):
            proposal = self._propose(storage, candidates, number, reasons)
            if "none" in proposal:
                break
            checkpoint, reason = self._try(storage, proposal, number)
            if checkpoint is not None:
                return checkpoint
            reasons.append(reason)
            if self.registered.rank == 0:
                log.warning("passed over: %s", reason)
        if proposal["none"]:
            raise NoUsableCheckpoint(
                f"no checkpoint in {storage.describe()} can be used: {proposal['none']}. "
                "Repair or remove them, or start in another folder; nothing was started over"
            )
        return None

    def _everywhere(self, storage: Storage) -> tuple[list[str], list[str]]:
        """On rank 0: the checkpoints that are complete in all folders, newest first, and what there is to say of others."""
        found = survey(storage)
        for line in (*found.incomplete, *found.unusable):
            log.warning("passed over: %s", line)
        candidates, reasons = [c.folder for c in found.complete], list(found.unusable)
        if len(self.leaders) == 1:
            return candidates, reasons
        seen = {0: _digests(storage)}
        for leader in self.leaders[1:]:
            key = f"resume/{self.index}/complete/{leader}"
            seen[leader] = json.loads(self._await(key, self.deadlines.agreement, f"rank {leader} did not say what its folder holds"))
        for folder in sorted({f for there in seen.values() for f in there}):
            lacking = [leader for leader, there in seen.items() if folder not in there]
            if lacking or len({there[folder] for there in seen.values()}) > 1:
                what = f"is not complete in the folder of {name_ranks(lacking)}" if lacking else "is not the same one in all folders"
                has = name_ranks(leader for leader, there in seen.items() if folder in there)
                reasons.append(f"{folder} {what} (it is in that of {has}; the ranks see {len(seen)} folders)")
                log.warning("passed over: %s", reasons[-1])
                candidates = [c for c in candidates if c != folder]
        return candidates, reasons

    def exactly(self, storage: Storage, folder: str) -> Checkpoint:
        """Continue from this one, which may be another program's, or fail on all ranks."""
        proposal = self._propose(storage, [folder], 0, [])
        checkpoint, reason = self._try(storage, proposal, 0)
        if checkpoint is None:
            raise CorruptCheckpoint(reason)
        if isinstance(checkpoint, ForeignCheckpoint) and self.registered.rank == 0:
            for line in checkpoint.left_out:
                log.warning("%s: not taken over: %s", checkpoint.where, line)
        return checkpoint

    def _propose(
        self, storage: Storage, candidates: Sequence[str], number: int, reasons: Sequence[str]
    ) -> dict[str, str]:
        """Rank 0's next candidate, on all ranks; `{"none": why}` when there are no more."""
        key = f"resume/{self.index}/{number}/proposal"
        if self.registered.rank == 0:
            proposal = {"none": "; ".join(reasons)}
            if number < len(candidates):
                proposal = {"folder": candidates[number], "digest": "", "error": ""}
                try:
                    foreign = is_foreign(storage, candidates[number])
                    proposal["digest"] = (identity_of if foreign else _digest)(storage, candidates[number])
                except (CheckpointError, OSError) as error:
                    proposal |= _as_vote(error)
            self.store.publish(key, json.dumps(proposal).encode())
            return proposal
        answer = self._await(key, self.deadlines.agreement, "rank 0 did not propose a checkpoint")
        return json.loads(answer)  # type: ignore[no-any-return]

    def _try(self, storage: Storage, proposal: dict[str, str], number: int) -> tuple[Checkpoint | None, str]:
        """The checkpoint once it is loaded on all ranks, or why it is passed over."""
        if proposal["error"]:
            _raise_if_final(proposal)
            return None, proposal["error"]
        prefix = f"resume/{self.index}/{number}"
        checkpoint, plan, error = None, None, None
        try:
            # Whatever goes wrong here, memory running out included, has to reach the other ranks: they wait for this vote.
            checkpoint = self._open(storage, proposal["folder"])
            if checkpoint.digest != proposal["digest"]:
                raise CorruptCheckpoint(f"{checkpoint.where} is another checkpoint here than on rank 0: the folders differ")
            plan = restore.match(checkpoint, self.registered)
        except Exception as failed:
            error = failed
        verdict = self._vote(f"{prefix}/match", error, self.deadlines.agreement)
        if verdict["error"]:
            _raise_if_final(verdict)
            return None, verdict["error"]
        assert checkpoint is not None
        assert plan is not None
        try:
            read = restore.read(plan)
            log.debug("rank %d read %d bytes of %s", self.registered.rank, read, checkpoint.where)
        except Exception as failed:
            error = failed
        verdict = self._vote(f"{prefix}/read", error, self.deadlines.load)
        if verdict["error"]:
            _raise_if_final(verdict)
            return None, verdict["error"]
        try:
            restore.install(plan)
        except Exception as failed:
            error = failed
        verdict = self._vote(f"{prefix}/install", error, self.deadlines.agreement)
        if verdict["error"]:  # the weights are those of the checkpoint by now, so there is no going on to another one
            raise error if error is not None else CheckpointError(f"{checkpoint.where} could not be resumed: {verdict['error']}")
        self.plan = plan
        return checkpoint, ""

    def _open(self, storage: Storage, folder: str) -> Checkpoint:
        if isinstance(storage, LocalFolder) and is_foreign(storage, folder):
            return ForeignCheckpoint(storage, folder, self.registered)
        return Checkpoint(storage, folder)

    def _vote(self, prefix: str, error: Exception | None, deadline: float) -> dict[str, str]:
        """Tell rank 0 how it went here and hear how it went everywhere."""
        rank, world_size = self.registered.rank, self.registered.world_size
        mine = _as_vote(error)
        if rank != 0:
            self.store.publish(f"{prefix}/{rank}", json.dumps(mine | {"host": socket.gethostname()}).encode())
            self.store.add(f"{prefix}/votes", 1)
            verdict = json.loads(self._await(f"{prefix}/verdict", deadline, "rank 0 did not decide on a checkpoint"))
        else:
            end, pause = time.monotonic() + deadline, pauses()
            while self.store.add(f"{prefix}/votes", 0) < world_size - 1:
                if time.monotonic() > end:
                    missing = [r for r in range(1, world_size) if self.store.look(f"{prefix}/{r}") is None]
                    raise DeadlineExceeded(
                        f"{name_ranks(missing)} did not look at a checkpoint within {deadline:.0f} s; look into their logs"
                    )
                time.sleep(next(pause))
            told = self.store.gather([f"{prefix}/{r}" for r in range(1, world_size)])
            votes = dict(enumerate([mine | {"host": socket.gethostname()}, *map(json.loads, told)]))
            against = [(r, v) for r, v in sorted(votes.items()) if v["error"]]
            verdict = _as_vote(None)
            if against:
                r, vote = against[0]
                verdict = {"error": f"{vote['error']} (rank {r} on {vote['host']})", "kind": vote["kind"]}
            self.store.publish(f"{prefix}/verdict", json.dumps(verdict).encode())
        if error is not None and verdict["kind"] == mine["kind"] and not _another_may_do(error):
            raise error  # this rank's own, with its traceback
        return verdict  # type: ignore[no-any-return]

    def _await(self, key: str, deadline: float, problem: str) -> bytes:
        end = time.monotonic() + deadline
        pause = pauses(poll_of(self.registered.rank, self.registered.world_size))
        while (value := self.store.look(key)) is None:
            if time.monotonic() > end:
                raise DeadlineExceeded(f"rank {self.registered.rank}: {problem} within {deadline:.0f} s; look into its log")
            time.sleep(next(pause))
        return value


def _digests(storage: Storage) -> dict[str, str]:
    """The complete checkpoints in a folder and their manifests' digests."""
    return {c.folder: _digest(storage, c.folder) for c in survey(storage).complete}


def _digest(storage: Storage, folder: str) -> str:
    return Checkpoint(storage, folder).digest


_FINAL: dict[str, type[HoldfastError]] = {
    kind.__name__: kind for kind in (CheckpointNotFound, IncompatibleCheckpoint, UsageError, HoldfastError)
}
"""What no older checkpoint would mend, by the name under which it travels; the last stands for any other error of a rank."""


def _another_may_do(error: Exception) -> bool:
    """Whether the fault lies in the checkpoint's bytes, so that an older one is worth a try."""
    return isinstance(error, OSError | CorruptCheckpoint) and not isinstance(error, CheckpointNotFound)


def _as_vote(error: Exception | None) -> dict[str, str]:
    if error is None:
        return {"error": "", "kind": ""}
    kind = "" if _another_may_do(error) else next((name for name, c in _FINAL.items() if isinstance(error, c)), "HoldfastError")
    text = error.args[0] if isinstance(error, HoldfastError) and error.args else f"{type(error).__name__}: {error}"
    return {"error": str(text), "kind": kind}


def _raise_if_final(verdict: dict[str, str]) -> None:
    if verdict["kind"]:
        raise _FINAL[verdict["kind"]](verdict["error"])
