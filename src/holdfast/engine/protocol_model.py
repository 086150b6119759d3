"""The engine's protocols as a model small enough to try every interleaving of it.

Two machines, each with the faults that it must not have as switches:

* `Requests`: one caller and the call to stop. Ranks compute, meet in a gradient collective, look for requests in a hook
  before the optimizer step, step; a caller posts a request after step N. The store delays what was set until it is
  acknowledged, and may lose it; hosts run ahead of their devices; keys of an earlier attempt lie in the store.
* `Commit`: files, receipts, announcements, the manifest, deadlines, crashes and the next run that finishes the work.

`explore` visits every reachable state and counts the ways through them. The names of phases are those of the code:
`onecaller.OneCaller.before_step` is *look*, `watch.Watcher.post` is *set* and *acknowledge*, `watch.say_goodbye` is *serve*,
`service.Service` and `repair.finish` are the other machine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Machine(Protocol[State]):
    def initial(self) -> State: ...
    def successors(self, state: State) -> Iterator[State]: ...
    def wrong(self, state: State, final: bool) -> str: ...


@dataclass
class Explored:
    """`interleavings` counts complete runs, `wrong` maps each complaint to one state that has it."""

    states: int = 0
    transitions: int = 0
    interleavings: int = 0
    wrong: dict[str, object] = field(default_factory=dict)


def explore(machine: Machine[State]) -> Explored:
    """Every state that the machine can reach; runs never come back to a state, so the ways to the end can be counted."""
    result = Explored()
    ways: dict[State, int] = {}
    stack: list[tuple[State, Iterator[State], list[int]]] = []

    def enter(state: State) -> None:
        result.states += 1
        stack.append((state, machine.successors(state), [0, 0]))

    enter(machine.initial())
    while stack:
        state, following, counts = stack[-1]
        for successor in following:
            result.transitions += 1
            counts[0] += 1
            if successor in ways:
                counts[1] += ways[successor]
            else:
                counts[0] -= 1
                enter(successor)
                break
        else:
            stack.pop()
            final = counts[0] == 0
            ways[state] = counts[1] or 1
            if complaint := machine.wrong(state, final):
                result.wrong.setdefault(complaint, state)
            if stack:
                stack[-1][2][0] += 1
                stack[-1][2][1] += ways[state]
            else:
                result.interleavings = ways[state]
    return result


Fault = Literal[
    "no acknowledgement", "early look", "no wait for the device", "leave early", "stale keys", "stop one step ahead", "stop unheard"
]


@dataclass(frozen=True, slots=True)
class Rank:
    """`version` counts its steps; `phase` is where it is; `captured` has the version it captured for each request, or -1."""

    version: int = 0
    phase: str = "compute"
    captured: tuple[int, ...] = ()
    glimpse: tuple[int, ...] = ()
    listening: bool = True
    told: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """`store` says of each request: none, set (not yet acknowledged), visible or lost. `goal` is the step of the call to stop."""

    ranks: tuple[Rank, ...]
    store: tuple[str, ...]
    goal: int = 0
    crashed: int = -1
    late: bool = False


@dataclass(frozen=True)
class Requests:
    """`wishes` are (caller, step); with `stop` rank 0 ends the run once all listen. `crash` lets any one rank die anywhere."""

    ranks: int
    steps: int
    wishes: tuple[tuple[int, int], ...]
    stop: bool = False
    crash: bool = False
    fault: Fault | None = None

    def initial(self) -> Job:
        stale = ("visible",) if self.fault == "stale keys" else ()
        rank = Rank(captured=(-1,) * (len(self.wishes) + len(stale)), listening=not self.stop)
        return Job((rank,) * self.ranks, ("none",) * len(self.wishes) + stale)

    def successors(self, job: Job) -> Iterator[Job]:
        for index, state in enumerate(job.store):
            if state == "set" and self.fault == "no acknowledgement":  # nobody waits for it: it comes some time, or never
                for outcome in ("visible", "lost"):
                    yield replace(job, store=_with(job.store, index, outcome))
        for r, rank in enumerate(job.ranks):
            if r == job.crashed or rank.phase in ("gone", "stopped"):
                continue
            if self.crash and job.crashed < 0:
                yield replace(job, crashed=r)
            if not rank.listening:
                yield self._put(job, r, replace(rank, listening=True))
            yield from self._move(job, r, rank)

    def _move(self, job: Job, r: int, rank: Rank) -> Iterator[Job]:
        if rank.phase == "compute" and rank.version < self.steps:
            seen = tuple(i for i, s in enumerate(job.store) if s == "visible")
            yield self._put(job, r, replace(rank, phase="gradients", glimpse=seen if self.fault == "early look" else ()))
        elif rank.phase == "compute":
            yield self._put(job, r, replace(rank, phase="serve"))
        elif rank.phase == "gradients" and (self._together(job, rank) or self.fault == "no wait for the device"):
            yield self._look(job, r, rank)
        elif rank.phase == "lead":
            yield self._put(replace(job, goal=rank.version + (1 if self.fault == "stop one step ahead" else 2)), r, replace(rank, phase="step"))
        elif rank.phase == "step":
            yield self._boundary(job, r, replace(rank, version=rank.version + 1))
        elif rank.phase == "post":
            yield from self._post(job, r, rank)
        elif rank.phase == "serve":
            yield from self._serve(job, r, rank)

    def _together(self, job: Job, rank: Rank) -> bool:
        """Whether all ranks take part in the collective of this rank's next step."""
        entered = ("gradients", "lead", "step")
        return all(o.version > rank.version or (o.version == rank.version and o.phase in entered) for o in job.ranks)

    def _look(self, job: Job, r: int, rank: Rank) -> Job:
        """The hook before a step: serve what is visible, learn of the goal; rank 0 leads the stop once all listen."""
        if not rank.listening:
            return self._put(job, r, replace(rank, phase="step"))
        visible = rank.glimpse if self.fault == "early look" else tuple(i for i, s in enumerate(job.store) if s == "visible")
        captured, late = rank.captured, job.late
        for index in visible:
            step = self._step_of(index)
            if captured[index] < 0 and step == rank.version:
                captured = _with(captured, index, rank.version)
            elif captured[index] < 0 and step < rank.version:
                late = True
        heard = self.fault == "stop unheard" or all(o.listening for o in job.ranks)
        leads = self.stop and r == 0 and not job.goal and heard and rank.version + 2 <= self.steps
        rank = replace(rank, captured=captured, told=rank.told or job.goal > 0, phase="lead" if leads else "step", glimpse=())
        return self._put(replace(job, late=late), r, rank)

    def _boundary(self, job: Job, r: int, rank: Rank) -> Job:
        told = rank.told or (r == 0 and job.goal > 0)
        if told and rank.version >= job.goal:
            return self._put(job, r, replace(rank, phase="stopped", told=True))
        due = any(c == r and step == rank.version and rank.captured[i] < 0 for i, (c, step) in enumerate(self.wishes))
        return self._put(job, r, replace(rank, phase="post" if due else "compute", told=told))

    def _post(self, job: Job, r: int, rank: Rank) -> Iterator[Job]:
        index = next(i for i, (c, step) in enumerate(self.wishes) if c == r and step == rank.version and rank.captured[i] < 0)
        if job.store[index] == "none":
            yield replace(job, store=_with(job.store, index, "set"))
        if job.store[index] == "set" or self.fault == "no acknowledgement":
            store = job.store if self.fault == "no acknowledgement" else _with(job.store, index, "visible")
            if store[index] != "none":
                yield self._boundary(replace(job, store=store), r, replace(rank, captured=_with(rank.captured, index, rank.version)))

    def _serve(self, job: Job, r: int, rank: Rank) -> Iterator[Job]:
        captured = rank.captured
        for index, state in enumerate(job.store):
            if state == "visible" and captured[index] < 0 and self._step_of(index) == rank.version:
                captured = _with(captured, index, rank.version)
        if captured != rank.captured:
            yield self._put(job, r, replace(rank, captured=captured))
            return
        mine_done = all(c != r or all(o.captured[i] >= 0 for o in job.ranks) for i, (c, _) in enumerate(self.wishes))
        everybody_done = all(o.phase in ("serve", "gone") for o in job.ranks) and all(s != "set" for s in job.store)
        others_done = all(all(o.captured[i] >= 0 for o in job.ranks) for i, s in enumerate(job.store) if s == "visible")
        if self.fault == "leave early" or (mine_done and everybody_done and others_done) or job.crashed >= 0:
            yield self._put(job, r, replace(rank, phase="gone"))

    def wrong(self, job: Job, final: bool) -> str:
        for rank in job.ranks:
            for index, version in enumerate(rank.captured):
                if index >= len(self.wishes) and version >= 0:
                    return "captured what nobody asked for"
                if version >= 0 and version != self._step_of(index):
                    return "captured another step than was asked for"
        if job.late:
            return "a rank was past the step before it heard of the request"
        if not final or job.crashed >= 0:
            return ""
        if job.goal:
            together = all((rank.version, rank.phase) == (job.goal, "stopped") for rank in job.ranks)
            return "" if together else "not all ranks stopped at the step that was named"
        if any(v < 0 for rank in job.ranks for v in rank.captured[: len(self.wishes)]):
            return "a request was never served"
        return ""

    def _step_of(self, index: int) -> int:
        return self.wishes[index][1] if index < len(self.wishes) else 1

    @staticmethod
    def _put(job: Job, r: int, rank: Rank) -> Job:
        return replace(job, ranks=_with(job.ranks, r, rank))


CommitFault = Literal["remove after announcing", "receipt first", "commit early", "tidy beside a job"]


@dataclass(frozen=True, slots=True)
class Disk:
    """By rank: `files`, `receipts` and `announced`; `phase` per rank; the manifest; whether rank 0 gave up; who crashed."""

    phases: tuple[str, ...]
    files: tuple[bool, ...]
    receipts: tuple[bool, ...]
    announced: tuple[bool, ...]
    manifest: bool = False
    failed: bool = False
    crashed: frozenset[int] = frozenset()
    tidied: bool = False


@dataclass(frozen=True)
class Commit:
    """One attempt of `ranks` ranks, any of which may crash at any time; in the end the next run tidies the folder."""

    ranks: int
    fault: CommitFault | None = None

    def initial(self) -> Disk:
        no = (False,) * self.ranks
        return Disk(("begin",) * self.ranks, no, no, no)

    def successors(self, disk: Disk) -> Iterator[Disk]:
        alive = [r for r in range(self.ranks) if r not in disk.crashed and disk.phases[r] != "done"]
        for r in alive:
            if not disk.tidied:
                yield replace(disk, crashed=disk.crashed | {r})
            yield from self._move(disk, r)
        if not disk.tidied and (not alive or self.fault == "tidy beside a job"):
            yield self._tidy(disk)

    def _move(self, disk: Disk, r: int) -> Iterator[Disk]:
        phase = disk.phases[r]
        first, second = ("receipt", "file") if self.fault == "receipt first" else ("file", "receipt")
        if phase == "begin":
            yield self._write(disk, r, first, "half")
        elif phase == "half":
            yield self._write(disk, r, second, "written")
        elif phase == "written":
            yield replace(disk, announced=_with(disk.announced, r, True), phases=_with(disk.phases, r, "waiting"))
        elif phase == "waiting":
            if disk.failed:
                yield self._remove(disk, r)
            elif r == 0:
                if sum(disk.announced) >= self.ranks - (self.fault == "commit early"):
                    yield replace(disk, manifest=True, phases=_with(disk.phases, r, "done"))
                elif not all(disk.announced):  # its deadline: it alone knows that it will not commit
                    yield self._remove(replace(disk, failed=True), r)
            elif disk.manifest:
                yield replace(disk, phases=_with(disk.phases, r, "done"))
            else:  # its own deadline
                given_up = replace(disk, phases=_with(disk.phases, r, "done"))
                yield self._remove(disk, r) if self.fault == "remove after announcing" else given_up

    @staticmethod
    def _write(disk: Disk, r: int, what: str, phase: str) -> Disk:
        phases = _with(disk.phases, r, phase)
        if what == "file":
            return replace(disk, files=_with(disk.files, r, True), phases=phases)
        return replace(disk, receipts=_with(disk.receipts, r, True), phases=phases)

    @staticmethod
    def _remove(disk: Disk, r: int) -> Disk:
        return replace(
            disk,
            files=_with(disk.files, r, False),
            receipts=_with(disk.receipts, r, False),
            phases=_with(disk.phases, r, "done"),
        )

    def _tidy(self, disk: Disk) -> Disk:
        """`repair.finish` and `repair.remove_leftovers`, by the next owner of the folder."""
        disk = replace(disk, tidied=True)
        if disk.manifest:
            return disk
        if all(disk.receipts):
            return replace(disk, manifest=True)
        no = (False,) * self.ranks
        return replace(disk, files=no, receipts=no)

    def wrong(self, disk: Disk, final: bool) -> str:
        if disk.manifest and not all(disk.files):
            return "a manifest names a file that is not there"
        if final and not disk.crashed and not disk.failed and not disk.manifest:
            return "nobody crashed or was late, and the checkpoint is not complete"
        return ""


Item = TypeVar("Item")


def _with(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def report(show: Callable[[str], None] = print) -> bool:
    """Explore both machines as they are, then with each fault planted; returns whether the model found what it should."""
    machines: list[Machine[Any]] = []
    for ranks in (2, 3, 4):
        for first in range(1, 5):
            for second in range(first, 5):
                for callers in {(0, 0), (0, ranks - 1)}:
                    if ranks < 4 or (first, second) in ((1, 2), (4, 4)):
                        wishes = ((callers[0], first), (callers[1], second))
                        machines.append(Requests(ranks, 4, wishes, crash=ranks == 2))
        machines += [Requests(ranks, 4, (), stop=True, crash=ranks < 4), Commit(ranks)]
    total = Explored()
    for machine in machines:
        one = explore(machine)
        total.states += one.states
        total.transitions += one.transitions
        total.interleavings += one.interleavings
        total.wrong.update(one.wrong)
    show(f"{len(machines)} machines, {total.states:,} states, {total.transitions:,} transitions, {total.interleavings:,} interleavings")
    show(f"as it is: {', '.join(total.wrong) or 'nothing wrong'}")
    good = not total.wrong
    requests = Requests(2, 3, ((0, 1), (0, 3)))
    planted: list[Any] = [
        replace(requests, fault="no acknowledgement"),
        replace(requests, fault="early look"),
        replace(requests, fault="no wait for the device"),
        replace(requests, fault="leave early"),
        replace(requests, fault="stale keys"),
        Requests(2, 4, (), stop=True, fault="stop one step ahead"),
        Requests(2, 4, (), stop=True, fault="stop unheard"),
        Commit(3, fault="remove after announcing"),
        Commit(3, fault="receipt first"),
        Commit(3, fault="commit early"),
        Commit(3, fault="tidy beside a job"),
    ]
    for faulty in planted:
        found = explore(faulty)
        show(f"{faulty.fault}: {', '.join(found.wrong) or 'NOT NOTICED'}")
        good = good and bool(found.wrong)
    return good


if __name__ == "__main__":
    raise SystemExit(0 if report() else 1)
