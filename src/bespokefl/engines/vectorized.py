"""All clients of a cohort at once: stacked, or side by side in threads, whichever suits the model and the device.

On a GPU, and for small models everywhere, clients are stacked and one operation serves them all. On a CPU a stack per
core is better for middling models (each core works in its own cache), and one client per core for convolutions, which
stacking only slows down. The choice is a fixed rule of model and device: a timed one could change the bits of a run.
"""

import gc
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bespokefl.core import trees
from bespokefl.core.program import Phase, Result, Rows
from bespokefl.core.task import Task
from bespokefl.engines.base import Job, Plans, numerics, total_samples
from bespokefl.engines.buckets import Shape, group
from bespokefl.engines.budget import Budget
from bespokefl.engines.collect import Collector
from bespokefl.engines.graphs import GraphCache
from bespokefl.engines.memory import keep_freed_memory
from bespokefl.engines.sequential import Sequential
from bespokefl.engines.solo import run_client
from bespokefl.engines.stacked import Stack
from bespokefl.engines.steppers import Steppers
from bespokefl.engines.variants import Variants
from bespokefl.errors import InputError

TINY_MODEL = 2**15  # parameters up to which the operations are too short for threads to share
LARGE_MODEL = 2**20  # parameters from which one client fills a core's cache on its own


class Layout(NamedTuple):
    lanes: int  # threads side by side, one core each
    stack: int | None  # most clients of one stack; None: as many as fit; 1: no stack at all


class Vectorized:
    """The default engine.

    Args:
        lanes, stack: override the layout that the engine would choose.
        compile: ``torch.compile`` the training steps: some faster, but seconds of compiling for each size of a stack.
        tf32: let CUDA matrix products and convolutions use TF32.
    """

    name = "vectorized"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        lanes: int | None = None,
        stack: int | None = None,
        compile: bool = False,
        tf32: bool = True,
    ) -> None:
        self.device, self.tf32 = torch.device(device), tf32
        self.lanes, self.stack, self.compile = lanes, stack, compile
        self._cores = _cores()
        self._cache, self._steppers = GraphCache(), Steppers(self.device)
        self._budget = Budget(self.device)
        self._refused: set[Task] = set()
        self._variants = Variants()
        self._sequential = Sequential(device, tf32=tf32)
        self._pool: ThreadPoolExecutor | None = None
        if self.device.type == "cpu":
            keep_freed_memory()

    # decisions ---------------------------------------------------------------------------------------
    def plan(self) -> dict[str, Any]:
        return {"memory": self._budget.used_limit, "compiled": self.compile, "lanes": self.lanes or self._cores}

    def load_state(self, plan: Mapping[str, Any]) -> None:
        self._budget.load_state(plan["memory"])
        self.compile = bool(plan["compiled"])
        self._cores = int(plan["lanes"])

    def release(self) -> None:
        if self.device.type == "cuda":
            self._steppers.release()
            gc.collect()  # what a run leaves refers to itself, a failed one's frames too: without this it would stay
            torch.cuda.empty_cache()

    def layout(self, task: Task) -> Layout:
        """Lanes and stack for a model on this device."""
        cores = self.lanes or self._cores
        if self.stack == 1:
            return Layout(cores, 1) if self.device.type == "cpu" else Layout(1, 1)
        if self.device.type != "cpu":
            return Layout(1, self.stack)
        if self.stack is None and (task.has_convolutions or task.size >= LARGE_MODEL):
            return Layout(cores, 1)
        return Layout(self.lanes or (1 if task.size <= TINY_MODEL else cores), self.stack)

    # running -----------------------------------------------------------------------------------------
    def run(self, job: Job) -> Result:
        if job.task in self._refused:
            return self._sequential.run(job)
        variant = self._variants.of([job.program])
        if variant is None or not variant.varies:
            return self._run(job)
        own = {**job.per_client, **variant.download([len(job.clients)], job.task.dtype, self.device)}
        try:
            return self._run(replace(job, program=variant.program, per_client=own, fails_whole=True))
        except (InputError, torch.OutOfMemoryError):
            raise
        except Exception:  # of a client, or a tensor cannot stand for a float: then each round has its own functions
            self._variants.refuse([job.program])
        return self._run(job)

    def _run(self, job: Job) -> Result:
        plans = job.plans()
        layout = self.layout(job.task)
        threads = 1 if self.device.type == "cpu" else None
        with numerics(job.task.dtype, self.device, tf32=self.tf32, threads=threads):
            chunks, answers = self._chunks(job, plans, layout), Collector(len(job.clients))
            side_by_side = layout.lanes > 1 and len(chunks) > 1
            in_turn = self._workers(layout.lanes).map if side_by_side else map
            for _ in in_turn(lambda rows: self._chunk(job, plans, rows, answers), chunks):
                pass  # a lane's exception is raised here
        return answers.result(useful=total_samples(plans))

    def _chunks(self, job: Job, plans: Plans, layout: Layout) -> list[Rows]:
        """Which rows of the job run together, the longest first."""
        shapes = [Shape(plan, phase.batches.size) for plan, phase in zip(plans, job.program.phases, strict=True)]
        everyone = np.arange(len(job.clients), dtype=np.int64)
        if layout.stack == 1:
            work = np.sum([s.steps for s in shapes], axis=0) if shapes else np.zeros(len(everyone))
            return [everyone[r : r + 1] for r in np.argsort(-work, kind="stable")]
        # A compiled step costs seconds for every new shape, so its cohorts are not regrouped from round to round.
        whole = not shapes or any(self._compiles(phase) for phase in job.program.phases)
        groups = [everyone] if whole else group(shapes, total_samples(plans))
        # Every lane gets every n-th client of a group: like work for each core.
        shares = [g[lane :: layout.lanes] for g in groups for lane in range(layout.lanes) if len(g) > lane]
        most = min(layout.stack or len(everyone), self._budget.clients(job, plans, layout.lanes, self._cache))
        return [part for share in shares for part in np.array_split(share, -(-len(share) // most))]

    def _compiles(self, phase: Phase) -> bool:
        return self.compile and phase.batches.size is not None and phase.batches.stream is not None

    def _chunk(self, job: Job, plans: Plans, rows: Rows, answers: Collector) -> None:
        for part in self._attempt(job, plans, rows, answers):
            self._chunk(job, plans, part, answers)

    def _attempt(self, job: Job, plans: Plans, rows: Rows, answers: Collector) -> list[Rows]:
        """The parts in which the rows are to be tried again, for want of memory; none: they are answered."""
        try:
            answers.add(rows, self._fast(job, plans, rows))
            return []
        except InputError:
            raise
        except torch.OutOfMemoryError:
            freed = self._steppers.release()
            if len(rows) == 1 and not freed:
                raise
        except Exception as error:
            if job.fails_whole:
                raise
            answers.add(rows, self._one_by_one(job, plans, rows, error))
            return []
        # Only here, where the error is forgotten, can the memory go that its frames held.
        gc.collect()
        torch.cuda.empty_cache()
        return [rows] if freed else np.array_split(rows, 2)

    def _fast(self, job: Job, plans: Plans, rows: Rows) -> Result:
        if len(rows) == 1 and self.layout(job.task).stack == 1:
            r = int(rows[0])
            upload, state, computed = run_client(job, r, [p[r] for p in plans], self._cache, self.device)
            uploads, states = trees.tree_map(lambda v: v.unsqueeze(0), (upload, state))
        else:
            stack = Stack(job.select(rows), self._cache, self.device, self._compiles, self._steppers)
            uploads, states, computed = stack.run([[p[r] for r in rows] for p in plans])
        return Result(np.arange(len(rows)), uploads, states, {}, computed)

    def _one_by_one(self, job: Job, plans: Plans, rows: Rows, error: Exception) -> Result:
        """A client of the chunk failed, or vmap cannot take the model: the sequential engine tells which."""
        with self._cache.module_lock:  # other lanes may be here too
            result = self._sequential.run(job.select(rows))
            if not result.failed and job.task not in self._refused:
                self._refused.add(job.task)
                where = job.task.stuck_in(lambda: self._fast(job, plans, rows))
                warnings.warn(
                    f"{where} cannot run vectorized ({_first_line(error)}); clients run one after another instead",
                    stacklevel=2,
                )
        return result

    def _workers(self, lanes: int) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(lanes, "lane", initializer=lambda: torch.set_num_threads(1))
        return self._pool


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
