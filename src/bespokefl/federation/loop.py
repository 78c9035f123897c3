"""The round loop, wherever the clients are: sample some, run the algorithm's round on them, keep the server's state."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bespokefl.core.algorithm import Algorithm, Setup
from bespokefl.core.clients import Clients, Ledger, Postprocessor
from bespokefl.core.cohort import Cohort
from bespokefl.core.program import Call, Rows
from bespokefl.core.task import Answer, Task
from bespokefl.core.trees import Model, Tree
from bespokefl.data.dataset import IntArray
from bespokefl.errors import EndedEarly, InputError
from bespokefl.evaluation.history import Shown, percent
from bespokefl.evaluation.metrics import summarise
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.federation.attacks import Attack, Attacker
from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.federation.privacy import Privacy, PrivacySettings, check_private
from bespokefl.federation.sampling import Participation, Schedule

if TYPE_CHECKING:
    from bespokefl.federation.federation import Federation


class Census(Protocol):
    """What is known of the clients, whoever holds their samples."""

    @property
    def clients(self) -> int:
        """Their number."""
        ...

    @property
    def client_names(self) -> tuple[str, ...]: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def has_masks(self) -> bool: ...

    @property
    def note(self) -> str:
        """What a reader of the results should know of the source; empty if nothing."""
        ...

    @property
    def digest(self) -> Mapping[str, str]:
        """By which a resumed run knows its data, part by part."""
        ...

    def sizes(self, split: str) -> IntArray:
        """The number of samples of each client."""
        ...


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round."""

    round: int  # 1-based
    clients: Rows  # ids that were asked
    failed: dict[int, str]  # id -> why its answer was left out
    seconds: float
    bytes_down: int
    bytes_up: int
    samples_computed: int
    samples_useful: int
    cut: dict[int, str] = field(default_factory=dict)  # id -> how its weight was cut; only in a real federation

    @property
    def waste(self) -> float:
        """Computed over useful samples: 1 means no padding."""
        return self.samples_computed / max(1, self.samples_useful)


@dataclass(repr=False)
class History(Shown):
    """The rounds of a federation's run and the evaluations in between.

    A notebook shows it as a table; `rows`, `table` and `frame` give its numbers, `plot` a chart.

    >>> from bespokefl.algorithms import FedAvg
    >>> data = bfl.load("digits", clients=3, max_samples=150)
    >>> model = bfl.build_model("linear", data.input_shape, len(data.classes))
    >>> history = bfl.Federation(model, data, FedAvg(local_epochs=1)).run(rounds=2)
    >>> history.accuracy.shape  # evaluated rounds by clients
    (2, 3)
    >>> [row["round"] for row in history.table()]
    [1, 2]
    """

    rounds: list[RoundRecord] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by 1-based round
    method: str = ""  # the algorithm's name

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """One row per evaluated round, one column per client."""
        return np.stack([e.accuracy for e in self.evaluations.values()])

    def summary(self) -> dict[str, float]:
        """Mean, std, worst and top 5 % of the clients' accuracies (of masks: Dice) in the last evaluated round."""
        last = list(self.evaluations.values())[-1].main
        if np.isnan(last).all():
            raise InputError("no client has an accuracy (a task without classes?); see the losses in rows()")
        return dict(summarise(last))  # type: ignore[arg-type]

    def rows(self) -> list[dict[str, Any]]:
        """One row per (round, client): the primary result, of which all else is a view."""
        return [
            {
                "round": r,
                "client": int(client),
                "n_test": int(e.n[place]),
                "accuracy": float(e.accuracy[place]),
                "loss": float(e.loss[place]),
                **{name: float(values[place]) for name, values in e.further.items()},
            }
            for r, e in self.evaluations.items()
            for place, client in enumerate(e.clients)
        ]

    def table(self) -> list[dict[str, Any]]:
        """One row per evaluated round: mean, std, worst and top 5 % of the clients, as in `summary`, and their loss."""
        return [{"round": r, "metric": e.main_metric, **_figures(e)} for r, e in self.evaluations.items()]

    def _course(self) -> list[dict[str, Any]]:
        return [{"method": self.method, **row} for row in self.table()]

    def _cells(self) -> tuple[list[str], list[list[str]], str]:
        rows = self.table()
        every = -(-len(rows) // MOST_LINES)
        shown = [row for place, row in enumerate(reversed(rows)) if place % max(1, every) == 0][::-1]
        metric = rows[0]["metric"] if rows else "accuracy"
        headings = ["round", f"mean {metric} %", "worst 5 %", "top 5 %", "std", "mean loss"]
        cells = [
            [
                str(row["round"]),
                *(percent(row[key]) for key in ("mean", "worst5", "top5", "std")),
                "-" if row["loss"] is None else f"{row['loss']:.4f}",
            ]
            for row in shown
        ]
        told = f"{self.method}, {len(self.rounds)} rounds, {len(rows)} of them evaluated"
        return headings, cells, told if every <= 1 else f"{told}; every {every}. is shown"


MOST_LINES = 20  # of a history that is shown


def _figures(e: Evaluation) -> dict[str, float | None]:
    """Those of one evaluation; None where no client has the metric."""
    scored, losses = not np.isnan(e.main).all(), not np.isnan(e.loss).all()
    found = summarise(e.main) if scored else dict.fromkeys(("mean", "std", "worst5", "top5"))
    figures: dict[str, float | None] = {key: found[key] for key in ("mean", "std", "worst5", "top5")}
    return figures | {"loss": float(np.nanmean(e.loss)) if losses else None}


class _Kept(Callback):
    """The history of a run, for whoever has it in Python."""

    def __init__(self, after_round: Callable[[RoundRecord], None]) -> None:
        self.history, self._after_round = History(), after_round

    def on_round(self, run: Rounds) -> None:
        self.history.rounds.append(run.newest)
        if run.scores:
            self.history.evaluations[run.newest.round] = run.scores["test"]
        self._after_round(run.newest)


def check_train(data: Census) -> None:
    """Every client has something to train on."""
    without = np.flatnonzero(data.sizes("train") == 0)
    if len(without):
        names = ", ".join(f"{data.client_names[c]} (number {c})" for c in without[:5])
        raise InputError(
            f"{len(without)} of {data.clients} clients have no samples to train on: {names}; give them some, or leave "
            "them out"
        )


class RoundLoop(ABC):
    """An algorithm's server and its rounds. Where clients are, and how they are scored, is a subclass's matter.

    Args:
        task: the model and its loss.
        data: what is known of the clients.
        algorithm: what they compute together.
        device: that of the server's state.
        participation: the share of clients asked in a round, or ``clients_per_round`` their number.
        schedule: who takes part, round by round (a sequence, or a function of the 0-based round); default: uniform
            samples from a stream that only the seed and the round determine. A method that starts from the number of
            clients in a round takes it from the schedule; if its rounds differ, say ``clients_per_round`` too.
        attack: what malicious clients do; they take part like all others and are not scored.
        privacy: clip, noise and delta of `bespokefl.federation.privacy`.
        secret: a key from which samples are drawn in the place of the seed.
    """

    clients: Clients
    server: Tree

    def __init__(
        self,
        task: Task,
        data: Census,
        algorithm: Algorithm,
        *,
        device: torch.device,
        seed: int,
        participation: float,
        clients_per_round: int | None,
        schedule: Schedule | None,
        attack: Attack,
        privacy: PrivacySettings | None,
        secret: str | None = None,
    ) -> None:
        self.task, self.data, self.algorithm, self.device = task, data, algorithm, device
        self.seed, self.attack = seed, attack
        self.malicious = attack.malicious(data.clients, seed)
        self.honest = np.setdiff1d(np.arange(data.clients), self.malicious)
        self.participation = Participation(data.clients, participation, clients_per_round, schedule, seed, secret)
        self.rounds_done = 0
        self._suited = set(self.participation.sizes)  # of rounds, that the method was told of
        self._private = privacy

    @property
    def privacy(self) -> Privacy | None:
        """The mechanism that uploads go through, where privacy was asked for."""
        if self._private is None:
            return None
        n, m, sends = self.data.clients, self.participation.drawn, self.algorithm.sends
        return Privacy(*self._private, n, m, sends, self._noise_seed, self.participation.secret is not None)

    @property
    def setup(self) -> Setup:
        """What the algorithm is told of the federation."""
        return Setup(self.data.clients, self.participation.sizes, self.seed, bool(self.data.sizes("val").any()))

    @property
    def _noise_seed(self) -> int | None:
        """Of the noise; a simulation repeats itself, so its noise is no secret."""
        return self.seed

    def _start(self, initial: Model | None, answer: Answer) -> tuple[Model, Tree]:
        """Checks the method, and makes the server's state; the initial model, and a client's initial state."""
        x0 = self._initial(initial)
        setup = self.setup
        self.algorithm.check(self.task, setup)
        self.algorithm.check_answer(self.task, answer)
        self.algorithm.named_tuples()  # two of one name are refused now, not when a checkpoint is read
        if self._private is not None:
            method = self.algorithm
            averaged = bool(method.averaged())
            check_private(self._private, method.name, method.weights, averaged, self.task, self.data.clients)
        self._x0 = x0
        self.server = self._first_state(setup)
        with torch.device(self.device):
            return x0, self.algorithm.init_client(self.task, x0)

    def _first_state(self, setup: Setup) -> Tree:
        with torch.device(self.device):
            return self.algorithm.init(self.task, self._x0, setup)

    def _check_size(self, n: int) -> None:
        """Refuses a round of n clients of which the method was not told, if it minds."""
        if n in self._suited:
            return
        self.algorithm.check(self.task, self.setup._replace(cohort_sizes=(n,)))
        if not self.participation.said:  # a method that needs one number now meets two where it asks
            self._first_state(self.setup._replace(cohort_sizes=tuple(sorted({*self.participation.sizes, n}))))
        self._suited.add(n)

    @property
    def local(self) -> "Federation | None":
        """This federation, where all clients' samples are in this process; nothing where they are elsewhere."""
        return None

    def begin(self) -> None:  # noqa: B027
        """Before the first round of this process; a state to go on from is restored by then."""

    def end(self) -> None:  # noqa: B027
        """After the last round of a run."""

    # rounds ------------------------------------------------------------------------------------------
    def round(self, clients: Iterable[int] | None = None, silent: Collection[int] = ()) -> RoundRecord:
        """One round. ``clients`` overrides the sample; ``silent`` ones are asked but never answer.

        A method that starts from the number of clients in a round (PGFed's first alpha) refuses ``clients`` that are
        fewer or more than the federation's own; say ``clients_per_round`` there, and that is the number.
        """
        who = self.participation
        ids = who.of(self.rounds_done) if clients is None else who.checked(clients)
        if clients is not None:
            self._check_size(len(ids))
        ledger, start = Ledger(), self._clock()
        cohort = Cohort(self.clients, ids, self.rounds_done, silent=frozenset(silent), ledger=ledger)
        self.server = self.algorithm.at(cohort.round).round(self.server, cohort)
        self.rounds_done += 1
        return RoundRecord(
            self.rounds_done,
            ids,
            ledger.failed,
            self._clock() - start,
            ledger.bytes_down,
            ledger.bytes_up,
            ledger.samples_computed,
            ledger.samples_useful,
            ledger.cut,
        )

    def run(
        self,
        rounds: int,
        *,
        evaluate_every: int = 1,
        after_round: Callable[[Self, RoundRecord], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> History:
        """Several rounds with evaluations of every client's model; the last round is always evaluated."""
        kept, first = _Kept(lambda record: after_round(self, record) if after_round else None), self.rounds_done
        evaluated = lambda r: bool(evaluate_every) and (r - first) % evaluate_every == 0  # noqa: E731
        self.go(first + rounds, [kept, *callbacks], evaluated)
        kept.history.method = self.algorithm.name
        return kept.history

    def go(self, until: int, callbacks: Sequence[Callback], evaluated: Callable[[int], bool]) -> Rounds:
        """All rounds up to one, which is evaluated as those before it are that ``evaluated`` says: the only loop."""
        run = Rounds(self, until, callbacks)
        try:
            for one in callbacks:
                one.resume(run)
            run.done = self.rounds_done
            for one in callbacks:
                one.on_start(run)
            self.begin()
            while self.rounds_done < run.until and not run.stop and run.ended_early is None:
                self._next(run, evaluated)
            if run.ended_early is not None or self.rounds_done >= run.until:
                for one in callbacks:
                    one.on_end(run)
        finally:
            for one in callbacks:
                one.close()
        if run.ended_early is not None:
            raise run.ended_early
        return run

    def _next(self, run: Rounds, evaluated: Callable[[int], bool]) -> None:
        run.scores = {}
        try:
            run.record = self.round()
            if run.is_last or evaluated(self.rounds_done):
                run.scores["test"] = self.evaluate()
                for one in run.callbacks:
                    one.on_evaluation(run)
            for one in run.callbacks:
                one.on_round(run)
        except EndedEarly as reason:
            run.ended_early = reason
        else:
            run.done = self.rounds_done

    # models and scores -------------------------------------------------------------------------------
    @property
    @abstractmethod
    def engine_name(self) -> str:
        """What runs the clients' programs."""

    @abstractmethod
    def evaluate(self, split: str = "test", model: str = "personal", *, closer: bool = False) -> Evaluation:
        """Scores the personal (or the global) model of every honest client on its own split. Reads, never writes.

        ``closer`` measures all that there is for the task, also what takes its time.
        """

    @property
    def scorable(self) -> tuple[str, ...]:
        """The kinds of models that ``evaluate`` can score."""
        return ("personal", "global") if self.has_global else ("personal",)

    @property
    def has_global(self) -> bool:
        return self.algorithm.global_model(self.server) is not None

    def global_model(self) -> Model | None:
        """The server's model, where the algorithm has one."""
        return self.algorithm.global_model(self.server)

    def facts(self) -> dict[str, NDArray[Any]]:
        """What the algorithm shows of its state: arrays of the server."""
        return {k: v.detach().cpu().numpy() for k, v in self.algorithm.server_facts(self.server).items()}

    def _call(self, model: str, cohort: Cohort) -> Call:
        """The program that gives the model to be scored, with its downloads."""
        if model not in ("personal", "global"):
            raise InputError(f"model = {model!r}: it is one of {', '.join(map(repr, self.scorable))}")
        if model == "personal":
            with torch.device(self.device):
                return self.algorithm.at(cohort.round).personal_model(self.server, cohort)
        w = self.global_model()
        if w is None:
            raise InputError(f"{type(self.algorithm).__name__} has no global model to score")
        return Call(self.algorithm.received_model, {"w": w})

    # keeping -----------------------------------------------------------------------------------------
    @abstractmethod
    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything that later rounds depend on: tensors by name, and JSON."""

    @abstractmethod
    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Takes over a state, so that the next rounds are those of the run it came from, bit for bit."""

    # details -----------------------------------------------------------------------------------------
    def _initial(self, given: Model | None) -> Model:
        mine = self.task.initial
        if given is None:
            return mine
        if set(given) != set(mine) or any(given[k].shape != v.shape for k, v in mine.items()):
            wanted = {k: tuple(v.shape) for k, v in mine.items()}
            seen = {k: tuple(v.shape) for k, v in given.items()}
            raise InputError(f"initial has the tensors {seen}; the model's are {wanted}")
        return {k: given[k].detach().to(v) for k, v in mine.items()}

    def _postprocessors(self) -> list[Postprocessor]:
        """What happens to uploads, in this order."""
        chain: list[Postprocessor] = []
        if self.attack.replaces_uploads:
            sends, names, honest = self.algorithm.sends, self.task.names, self.task.buffer_names
            chain.append(Attacker(self.attack, self.malicious, sends, names, honest, self.seed))
        if self.privacy is not None:
            chain.append(self.privacy)
        return chain

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
