"""Several runs at a time, in processes of their own; on CPUs they share the cores, on GPUs each has one.

A process has one run, or the seeds of a method that share an engine. A run draws the same numbers in whatever process
it goes, and one that fails stops no other. A process that dies takes only its own runs with it.
"""

import multiprocessing
import multiprocessing.synchronize
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bespokefl.data import FederatedData
from bespokefl.engines.memory import share_card
from bespokefl.errors import in_short
from bespokefl.experiments import resolve
from bespokefl.experiments.running import Ending, Outcome, explain, run_seeds
from bespokefl.experiments.schema import Experiment
from bespokefl.interrupts import Interrupted, StopRequest
from bespokefl.progress import Line, Reporter
from bespokefl.results import files
from bespokefl.results.partition import partition_file, write_partition

PAUSE = 0.5  # seconds between two looks at whether somebody asked to stop


@dataclass(frozen=True)
class Job:
    """Runs of one method that share an engine: one for each seed."""

    experiment: Experiment
    out: Path
    label: str
    folders: dict[int, Path]  # by seed
    name: str  # for people: with the setting
    describes: tuple[int, ...]  # seeds of which it also writes what the clients' data look like


def gpus(experiment: Experiment) -> list[str]:
    """The GPUs to share among workers, as CUDA_VISIBLE_DEVICES names them; none where the experiment uses no GPU."""
    if resolve.make_engine(experiment).device.type != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    _, _, chosen = experiment.engine.device.partition(":")
    return [names[int(chosen)]] if chosen else names


def free_workers(experiment: Experiment) -> int:
    """As many as there are GPUs where the experiment uses them, else cores."""
    return len(gpus(experiment)) or len(_cores())


def run_jobs(jobs: Sequence[Job], reporters: Sequence[Sequence[Reporter]], stop: StopRequest) -> Outcome:
    """Run all, in as many processes as there are groups of reporters, each with one for every seed of a job.

    A run that fails is recorded, and the others go on.
    """
    context = multiprocessing.get_context("spawn")
    asked = context.Event()
    pending, outcome = deque(jobs), Outcome()
    interrupted: list[str] = []
    names = gpus(jobs[0].experiment)
    places = []
    for number, shown in enumerate(reporters):
        gpu = names[number % len(names)] if names else None
        share = _Share(number, len(reporters), gpu, -(-len(reporters) // max(1, len(names))))
        places.append(_Place(context, share, asked, shown))
    try:
        while (pending and not stop.asked) or any(place.job for place in places):
            if stop.asked:
                asked.set()
            for place in places:
                if place.job is None and pending and not stop.asked:
                    place.give(pending.popleft())
            busy = {place.connection: place for place in places if place.job is not None}
            for connection in wait(list(busy), PAUSE):
                busy[connection].listen(outcome, interrupted)
    finally:
        for place in places:
            place.close()
    if pending or interrupted:
        raise Interrupted("; ".join(interrupted) or f"before {pending[0].name}")
    return outcome


class _Share(NamedTuple):
    """A worker's part of the machine."""

    number: int
    of: int  # workers
    gpu: str | None
    on_gpu: int = 1  # workers on that GPU


class _Place:
    """A worker process as its master sees it; a new one takes the place of one that died."""

    def __init__(
        self, context: Any, share: _Share, asked: multiprocessing.synchronize.Event, reporters: Sequence[Reporter]
    ) -> None:
        self._context, self._share, self._asked, self._reporters = context, share, asked, reporters
        self.job: Job | None = None
        self._begun: set[int] = set()  # which of the job's runs have
        self._over: set[int] = set()  # which of them are
        self._start()

    def _start(self) -> None:
        self.connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_work, args=(theirs, self._asked, self._share), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is noticed here

    def give(self, job: Job) -> None:
        self.job, self._begun, self._over = job, set(), set()
        self.connection.send(job)

    def listen(self, outcome: Outcome, interrupted: list[str]) -> None:
        """One message from the worker."""
        job = self.job
        assert job is not None
        try:
            kind, *content = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            reason = f"the process of this run ended by itself (exit code {self._process.exitcode}); out of memory?"
            for number, (seed, folder) in enumerate(job.folders.items()):
                if number not in self._over:
                    files.write_atomically(folder / files.ERROR, f"{reason}\n")
                    if number in self._begun:
                        self._reporters[number].finish(f"failed: {reason}")
                    else:  # its reporter has not heard of it
                        self._reporters[number].note(f"{job.name}, seed {seed}: failed: {reason}")
                whole = number in self._over and (folder / files.SUMMARY).is_file()
                outcome.add(folder, Ending.FINISHED if whole else Ending.FAILED)
            self.job = None
            self._start()
            return
        if kind == "done":
            endings, stopped = content
            self.job = None
            if stopped is not None:
                interrupted.append(stopped)
            else:
                for seed, folder in job.folders.items():
                    outcome.add(folder, endings.get(seed, Ending.FAILED))
        else:
            number, *told = content
            if kind == "start":
                self._begun.add(number)
            if kind == "finish":
                self._over.add(number)
            getattr(self._reporters[number], kind)(*told)

    def close(self) -> None:
        """A worker without a job ends by itself; one that is still busy is stopped, its checkpoints are whole."""
        self.connection.close()
        if self.job is not None:
            self._process.kill()
        self._process.join()


# in the worker's process ------------------------------------------------------------------------------


class _Shared(StopRequest):
    """The master's wish to stop."""

    def __init__(self, event: multiprocessing.synchronize.Event) -> None:
        self._event = event

    @property
    def asked(self) -> bool:
        return self._event.is_set()

    @asked.setter
    def asked(self, value: bool) -> None:
        raise NotImplementedError


class _Messenger:
    """A reporter that tells the master, for one of the runs."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None], number: int, name: str) -> None:
        self._send, self._number, self._name = send, number, name

    def start(self, label: str, seed: int, rounds: int, done: int) -> None:
        self._send(("start", self._number, self._name, seed, rounds, done))

    def round(self, line: Line) -> None:
        self._send(("round", self._number, line))

    def finish(self, outcome: str) -> None:
        self._send(("finish", self._number, outcome))

    def note(self, text: str) -> None:
        self._send(("note", self._number, text))


def _work(connection: Connection, event: multiprocessing.synchronize.Event, share: _Share) -> None:
    """Runs what it is given, until the master closes the connection."""
    for wish in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wish, signal.SIG_IGN)  # the master listens, and tells
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    threading.Thread(target=_end_with_master, daemon=True).start()
    _take(share)
    stop = _Shared(event)
    held: dict[Any, FederatedData] = {}  # the data of the last runs: the next ones often need the same
    speaking = threading.Lock()

    def send(message: tuple[Any, ...]) -> None:
        with speaking:  # runs that share an engine are threads
            connection.send(message)

    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionError):
            return
        send(("done", *_do(job, held, send, stop)))


def _end_with_master() -> None:
    """Ends this process at once when its master dies, as the locks of the folders that it writes in go with that."""
    master = multiprocessing.parent_process()
    assert master is not None
    master.join()
    os._exit(1)


def _do(
    job: Job, held: dict[Any, FederatedData], send: Callable[[tuple[Any, ...]], None], stop: StopRequest
) -> tuple[dict[int, Ending], str | None]:
    """How the runs of seeds ended, and where they stopped if somebody asked for it."""
    messengers = {seed: _Messenger(send, number, job.name) for number, seed in enumerate(job.folders)}

    def failed(seed: int, error: Exception) -> None:
        files.write_atomically(job.folders[seed] / files.ERROR, explain(error))
        messengers[seed].note(f"{job.name}, seed {seed}: failed: {in_short(error)}")

    for key in held.keys() - {(job.out, seed) for seed in job.folders}:
        del held[key]  # before others are loaded: both may not fit
    data = {}
    for seed in job.folders:
        try:
            if (job.out, seed) not in held:
                held[job.out, seed] = resolve.load_data(job.experiment, seed)
            if seed in job.describes:
                write_partition(partition_file(job.out, seed), held[job.out, seed])
            data[seed] = held[job.out, seed]
        except Exception as error:
            failed(seed, error)
    if not data:
        return {}, None
    try:
        done = run_seeds(job.experiment, job.out, job.label, data, [messengers[seed] for seed in data], stop)
    except Interrupted as interrupt:
        return {}, str(interrupt)
    except Exception as error:  # before they began: those of a run itself are recorded by `run_seeds`
        for seed in data:
            failed(seed, error)
        return {}, None
    return dict(zip(data, done, strict=True)), None


def _take(share: _Share) -> None:
    """Its part of the cores, and its GPU; engines take as many threads as they find cores."""
    torch.set_num_threads(1)
    cores = _cores()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[share.number % len(cores) :: share.of])
    if share.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = share.gpu  # read when CUDA is first used
        share_card(share.on_gpu)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
