"""Several federations on one engine: what they ask for at the same time runs as one job.

A GPU is not filled by one small federation. Runs of one method with several seeds do the same work on other samples,
and those with several learning rates, say, do it by other numbers: each has a thread and a seat, and when all that are
seated wait for the engine, their jobs are joined, client by client, run as one, and taken apart again. Draws are keyed
by each run's own seed, so its numbers are those that it has alone, up to the rounding of larger stacks.
"""

import threading
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bespokefl.core.program import Result, Rows
from bespokefl.core.trees import Tree, concat, rows, tree_map
from bespokefl.engines.base import Engine, Job, Plans, Resident, total_samples
from bespokefl.engines.variants import Variant, Variants, fingerprint


@dataclass(frozen=True)
class Joined(Job):
    """Jobs of several federations as one; its clients are numbered from 0, since theirs may have the same ids."""

    parts: tuple[Job, ...] = ()
    offsets: tuple[int, ...] = ()  # where the samples of each part begin in the joined data
    owner: Rows | None = None  # by client: the part that it is of,
    place: Rows | None = None  # and its row in it

    def select(self, positions: Rows) -> "Joined":
        chosen = super().select(positions)
        assert isinstance(chosen, Joined) and self.owner is not None and self.place is not None
        return replace(chosen, owner=self.owner[positions], place=self.place[positions])

    def plans(self) -> Plans:
        by_part = [part.plans() for part in self.parts]
        return [
            [[batch + self.offsets[p] for batch in by_part[p][f][r]] for p, r in self._rows()]
            for f in range(len(self.program.phases))
        ]

    def keys(self, positions: Rows, phase: int, steps: int) -> Rows:
        owners = self._rows()
        columns = [self.parts[p].keys(np.array([r]), phase, steps) for p, r in (owners[int(k)] for k in positions)]
        return np.concatenate(columns, axis=1)

    def _rows(self) -> list[tuple[int, int]]:
        assert self.owner is not None and self.place is not None
        return [(int(p), int(r)) for p, r in zip(self.owner, self.place, strict=True)]


class SharedEngine:
    """One engine for several federations, each of which gets a seat (an engine of its own, as it seems).

    ``variants`` are those of an earlier one on the same engine, whose traced functions then serve again.
    """

    def __init__(self, engine: Engine, seats: int, variants: Variants | None = None) -> None:
        self.engine = engine
        self.variants = variants or Variants()
        self.seats = [EngineHandle(self, number) for number in range(seats)]
        self._seated = set(range(seats))
        self._waiting: dict[int, Job] = {}
        self._answers: dict[int, Result | BaseException] = {}
        self._changed = threading.Condition()
        self._data: dict[tuple[int, ...], tuple[list[Resident], Resident, tuple[int, ...]]] = {}

    def run(self, seat: int, job: Job) -> Result:
        """Waits for all others that are seated; the last one to come runs the jobs of all."""
        with self._changed:
            self._waiting[seat] = job
            self._serve_if_complete()
            while seat not in self._answers:
                self._changed.wait()
            answer = self._answers.pop(seat)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def leave(self, seat: int) -> None:
        """The others need not wait for this one any more."""
        with self._changed:
            self._seated.discard(seat)
            self._serve_if_complete()

    def _serve_if_complete(self) -> None:
        if not self._waiting or set(self._waiting) != self._seated:
            return
        jobs, self._waiting = dict(sorted(self._waiting.items())), {}
        alike: dict[Hashable, list[int]] = {}
        for seat, job in jobs.items():
            alike.setdefault(_kind(job), []).append(seat)
        for seats in alike.values():
            self._answers |= dict(zip(seats, self._answer([jobs[seat] for seat in seats]), strict=True))
        self._changed.notify_all()

    def _answer(self, jobs: Sequence[Job]) -> list[Result | BaseException]:
        programs = [job.program for job in jobs]
        variant = self.variants.of(programs)
        if variant is None:
            return self._answer_by_floats(jobs)
        short_of_memory = False
        if len(jobs) > 1:
            try:
                return list(self._run_joined(jobs, variant))
            except torch.OutOfMemoryError:
                short_of_memory = True
            except Exception:
                if variant.varies:
                    self.variants.refuse(programs)
                    return self._answer_by_floats(jobs)
                # Else it is one of them, perhaps: each is told what is wrong with it alone.
        if short_of_memory:  # not in the except clause, where the failed attempt's tensors are still held
            self.engine.release()
        return [_caught(self.engine.run, job) for job in jobs]

    def _answer_by_floats(self, jobs: Sequence[Job]) -> list[Result | BaseException]:
        """Only those with the same hyper-parameters are joined."""
        alike: dict[Hashable, list[int]] = {}
        for k, job in enumerate(jobs):
            alike.setdefault(fingerprint(job.program).floats, []).append(k)
        answers = {
            k: answer
            for places in alike.values()
            for k, answer in zip(places, self._answer([jobs[k] for k in places]), strict=True)
        }
        return [answers[k] for k in range(len(jobs))]

    def _run_joined(self, jobs: Sequence[Job], variant: Variant) -> Sequence[Result]:
        data, offsets = self._joined_data([job.data for job in jobs])
        joined = join(jobs, data, offsets, variant, self.engine.device)
        result = self.engine.run(joined)
        if variant.varies and result.failed:
            raise next(iter(result.failed.values()))
        return take_apart(joined, result)

    def _joined_data(self, parts: Sequence[Resident]) -> tuple[Resident, tuple[int, ...]]:
        key = tuple(id(part) for part in parts)
        if key not in self._data:
            self._data[key] = (list(parts), *Resident.joined(parts))  # the parts, so that ids stay theirs
        return self._data[key][1:]


class EngineHandle:
    """What one of the federations takes for its engine."""

    def __init__(self, together: SharedEngine, number: int) -> None:
        self._together, self._number = together, number
        self.name, self.device = together.engine.name, together.engine.device

    def run(self, job: Job) -> Result:
        return self._together.run(self._number, job)

    def leave(self) -> None:
        self._together.leave(self._number)

    def plan(self) -> dict[str, Any]:
        return self._together.engine.plan()

    def load_state(self, plan: Mapping[str, Any]) -> None:
        self._together.engine.load_state(plan)

    def release(self) -> None:
        """The others still use what the engine keeps."""


def join(
    jobs: Sequence[Job], data: Resident, offsets: tuple[int, ...], variant: Variant, device: torch.device
) -> Joined:
    """What differs between the jobs becomes the clients' own, what is one and the same stays shared."""
    sizes = [len(job.clients) for job in jobs]
    first = jobs[0]
    shared: dict[str, Tree] = {}
    own: dict[str, Tree] = {name: concat([job.per_client[name] for job in jobs]) for name in first.per_client}
    for name, value in first.shared.items():
        if all(_is_same(value, job.shared[name]) for job in jobs):
            shared[name] = value
        else:
            own[name] = concat([_repeated(job.shared[name], n) for job, n in zip(jobs, sizes, strict=True)])
    return Joined(
        first.task,
        data,
        {},
        variant.program,
        np.arange(sum(sizes)),
        shared,
        own | variant.download(sizes, first.task.dtype, device),
        concat([job.states for job in jobs]),
        first.seed,
        first.round,
        variant.varies,
        tuple(jobs),
        offsets,
        np.repeat(np.arange(len(jobs)), sizes),
        np.concatenate([np.arange(n) for n in sizes]),
    )


def take_apart(joined: Joined, result: Result) -> list[Result]:
    """Each part's own result; padding is shared in proportion to the work."""
    assert joined.owner is not None and joined.place is not None
    waste = result.computed / max(1, result.useful)
    answers = []
    for p, part in enumerate(joined.parts):
        mine = np.flatnonzero(joined.owner[result.positions] == p)
        positions = joined.place[result.positions[mine]]
        uploads, states = ({}, {}) if not len(mine) else rows((result.uploads, result.states), torch.as_tensor(mine))
        failed = {
            int(part.clients[joined.place[k]]): error for k, error in result.failed.items() if joined.owner[k] == p
        }
        useful = total_samples(part.plans())
        answers.append(Result(positions, uploads, states, failed, round(waste * useful), useful))
    return answers


def _kind(job: Job) -> Hashable:
    """Jobs that are alike in this run the same program, but for floats, on the same kinds of tensors."""
    if any(phase.batches.shared for phase in job.program.phases):
        return id(job)  # its clients meet the same samples, those of another job do not
    each = rows((dict(job.per_client), job.states), 0)
    flat, spec = pytree.tree_flatten((dict(job.shared), each))
    return job.task, fingerprint(job.program).shape, job.data.kind, spec, tuple((v.shape, v.dtype) for v in flat)


def _is_same(a: Tree, b: Tree) -> bool:
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(ours) == len(theirs) and all(u is v for u, v in zip(ours, theirs, strict=True))


def _repeated(tree: Tree, n: int) -> Tree:
    repeat: Callable[[Tensor], Tensor] = lambda v: v.expand(n, *v.shape)  # noqa: E731
    return tree_map(repeat, tree)


def _caught(run: Callable[[Job], Result], job: Job) -> Result | BaseException:
    try:
        return run(job)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their tensors would be held until the others are done
        return error
