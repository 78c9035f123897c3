"""What every algorithm is: hyper-parameters, a server's round, and the programs of one client."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor

from bespokefl.core.acting import Condition, in_words, unless, unused, when
from bespokefl.core.cohort import Cohort
from bespokefl.core.exchange import Exchange
from bespokefl.core.hyper import checked, hyper
from bespokefl.core.model_programs import GLOBAL_MODEL, hand_over, network_outputs
from bespokefl.core.optim import Buffers, Optimizer
from bespokefl.core.optimizers import BESIDE, OPTIMIZERS, check_optimizer, make_optimizer
from bespokefl.core.program import Batches, Call, Down, Phase, Program, shuffled
from bespokefl.core.registry import Chosen
from bespokefl.core.task import Answer, Batch, Pass, Task
from bespokefl.core.tree_io import full_name
from bespokefl.core.trees import Model, Tree, zeros
from bespokefl.errors import InputError

AVERAGED_BY = ("averages", "round")


class Setup(NamedTuple):
    """The federation that an algorithm is to serve."""

    clients: int  # N
    cohort_sizes: tuple[int, ...]  # clients asked in a round, ascending where rounds differ; none: not known
    seed: int
    validates: bool  # whether some client has validation samples

    @property
    def cohort_size(self) -> int:
        """The number of clients asked in a round, for a method that needs one."""
        if len(self.cohort_sizes) == 1:
            return self.cohort_sizes[0]
        raise InputError(
            f"a round has {self.told_sizes}, by participation, schedule or round(clients=...), and the method needs "
            f"one number: give clients_per_round beside them, a number from 1 to {self.clients}"
        )

    @property
    def told_sizes(self) -> str:
        """The numbers of clients asked in a round, in words."""
        if not self.cohort_sizes:
            return "an unknown number of clients"
        *others, last = map(str, self.cohort_sizes)
        return f"{', '.join(others)} or {last} clients" if others else f"{last} clients"


class Training(NamedTuple):
    """A model in local training."""

    x: Model
    m: Buffers  # of the optimiser: momentum


class Newcomer(NamedTuple):
    """How ONE client that never took part comes to a model of its own: where it starts, and epochs of steps.

    The functions are those of a program; ``kept`` is the state that ``init_client`` gives. After every epoch the client
    may be asked for its ``model``, so what goes from step to step also goes from epoch to epoch.
    """

    how: str  # for people: what is trained, from where
    begin: Callable[..., Tree]  # (task, down, kept) -> carry
    step: Callable[..., Tree]  # (task, down, carry, batch) -> carry
    model: Callable[..., Model]  # (task, down, carry) -> the client's model
    fresh: Callable[..., Tree]  # (task, down, carry) -> carry with its optimisers as at the start
    shared: Mapping[str, Tree]  # what the server sends
    before: tuple[Phase, ...] = ()  # once, before the first epoch


@dataclass(frozen=True)
class Algorithm:
    """The settings that local training shares; a method adds its own in its paper's symbols.

    Nothing hides on ``self``: the server's state is what ``init`` and ``round`` return, a client's what ``init_client``
    and a program's ``finish`` return.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    # The uploads that hold parameters, which attacks replace: by name, what a model started from (a download of the
    # exchange, or an entry of its ``held``), or None for an update, such as a gradient.
    sends: ClassVar[Mapping[str, str | None]] = {}
    # The programs that ``round`` runs on clients, and all that they send back; a silo runs no other for a server.
    exchanges: ClassVar[tuple[Exchange, ...]] = ()
    # What of a client's state never leaves it: by the name of the tree ("" is all of it), in words.
    stays: ClassVar[Mapping[str, str]] = {}
    # The programs of whose uploads ``round`` takes nothing but the mean, by ``up.weights(self.weights)``: a node that
    # hosts several clients may then send their mean. Does not count for a subclass with another ``round``.
    averages: ClassVar[tuple[str, ...]] = ()
    # When inherited hyper-parameters act, by name, where that is not always; what the bases say holds besides.
    acts: ClassVar[Mapping[str, Condition]] = {}

    # Likewise of lr, momentum, batch_size and opt_state of the steps that a new client takes by `newcomer`.
    newcomer_acts: ClassVar[Mapping[str, Condition]] = {
        "momentum": when(optimizer="sgd"),
        "opt_state": unless(momentum=0) | unless(optimizer="sgd"),
    }

    lr: float = hyper(0.05, "eta: step size of local SGD", low=0)
    lr_decay: float = hyper(1.0, "factor of lr from round to round: eta_t = eta lr_decay^t", above=0, high=1)
    momentum: float = hyper(0.0, "momentum of local SGD", low=0, below=1, when=when(optimizer="sgd"))
    weight_decay: float = hyper(0.0, "weight decay of local SGD", low=0, when=when(optimizer=("sgd", "adam")))
    local_epochs: int = hyper(5, "E: passes over a client's train split in a round", low=1)
    batch_size: int | None = hyper(50, "samples of a local step; nothing: the whole split", low=1)
    drop_last: bool = hyper(False, "drop the last incomplete batch of an epoch", when=unless(batch_size=None))
    weights: Literal["sample", "uniform"] = hyper("sample", "p_i: aggregation by samples (n_i) or all clients alike")
    opt_state: Literal["reset", "keep"] = hyper(
        "reset", "the optimiser's buffers at the start of a round", when=unless(momentum=0) | unless(optimizer="sgd")
    )
    optimizer: str | Chosen = hyper(
        "sgd",
        "local optimiser, also as a table with its options: sgd, adam, adamw, rmsprop, adagrad, an installed one or "
        "module:name; takes the place of local SGD everywhere",
        among=OPTIMIZERS,
    )
    betas: tuple[float, float] = hyper(
        (0.9, 0.999), "of Adam: decay of its two moments", low=0, below=1, when=when(optimizer="adam")
    )
    amsgrad: bool = hyper(False, "of Adam: divide by the largest second moment so far", when=when(optimizer="adam"))

    def __init_subclass__(cls) -> None:
        """A method without a docstring of its own is described by that of its file."""
        super().__init_subclass__()
        if cls.__doc__ is None and cls.__module__ in sys.modules:
            cls.__doc__ = sys.modules[cls.__module__].__doc__

    def __post_init__(self) -> None:
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        method = getattr(self, "name", type(self).__name__)
        for name, value in checked(type(self), own, method).items():
            object.__setattr__(self, name, value)
        if self.optimizer != "sgd" and self.only_sgd:
            raise InputError(
                f"algorithm.optimizer = {Chosen.of(self.optimizer)} ({method}): {self.only_sgd}; it must be 'sgd': "
                f"{{name = '{method}', optimizer = 'sgd'}} beside methods that take others"
            )
        defaults = {f.name: f.default for f in fields(self)}
        self.refuse_unused(name for name in self.unused() if getattr(self, name) != defaults[name])
        check_optimizer(self.optimizer, self.lr, self._beside_optimizer, method)

    def unused(self) -> dict[str, str]:
        """The hyper-parameters that change nothing in a round, as the others stand, each with the reason."""
        return unused(type(self), vars(self))

    def refuse_unused(self, names: Iterable[str]) -> None:
        """InputError for the first of these hyper-parameters that changes nothing."""
        reasons, method = self.unused(), getattr(self, "name", type(self).__name__)
        for name in names:
            if name in reasons:
                told = f"algorithm.{name} = {in_words(getattr(self, name))} ({method})"
                raise InputError(f"{told} changes nothing: {reasons[name]}. Leave {name} out.")

    @property
    def moving(self) -> tuple[str, ...]:
        """The hyper-parameters that change from round to round: engines do not trace programs anew for these."""
        return ("lr",) if self.lr_decay != 1 else ()

    def at(self, t: int) -> Self:
        """The method as it is in a round, counted from 0."""
        return self._with(lr=self.lr * self.lr_decay**t) if self.moving else self

    @property
    def remote_unsupported(self) -> str:
        """Why clients on machines of their own cannot run this method; empty if they can."""
        return ""

    @property
    def only_sgd(self) -> str:
        """Why no optimiser but plain SGD makes sense for this method; empty if others do."""
        return ""

    # the server --------------------------------------------------------------------------------------
    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        """The server's state before the first round."""
        return {}

    def init_client(self, task: Task, x0: Model) -> Tree:
        """The state of a client that has not taken part yet, the same for all."""
        return {}

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        """One round: the server's next state."""
        raise NotImplementedError

    def personal_model(self, server: Tree, cohort: Cohort) -> Call:
        """The program whose upload ``model`` is a client's own model; by default it only looks into its state."""
        return Call(self.own_model)

    @property
    def own_model(self) -> Program:
        """The program that gives a client the model of its state."""
        return Program(self.own, (), hand_over)

    def own(self, task: Task, down: Down, kept: Tree) -> Model:
        """A client's own model, where its state has it."""
        raise NotImplementedError

    @property
    def received_model(self) -> Program:
        """What the server sends as ``w`` is the model."""
        return GLOBAL_MODEL

    def programs(self) -> dict[str, Program]:
        """All that a client may be asked to run, by name: the class's properties that return a Program.

        In a real federation a request has the name only. A method whose programs have arguments adds a name for each.
        """
        names = _program_names(type(self))  # type: ignore[arg-type]  # mypy takes __hash__ for that of the class
        return {name: getattr(self, name) for name in names}

    def uploads(self) -> dict[str, Exchange]:
        """What a round has as the hyper-parameters stand, by program."""
        return {e.program: e for e in self.exchanges if not e.only.why_not(vars(self))}

    def model_programs(self) -> list[str]:
        """The programs that make a client's model and nothing else; a silo sends nobody what they make."""
        of_rounds = {e.program for e in self.exchanges} | set(self.uploads())
        return [name for name in self.programs() if name not in of_rounds]

    def global_model(self, server: Tree) -> Model | None:
        """The server's model; nothing where the method has none."""
        return None

    def check(self, task: Task, setup: Setup) -> None:
        """Refuses (InputError) hyper-parameters that do not fit the model or the federation."""

    def check_answer(self, task: Task, answer: Answer) -> None:
        """Refuses (InputError) a model whose answers, looked at before the first round, the method cannot use."""

    def averaged(self) -> tuple[str, ...]:
        """The programs whose uploads may be averaged before the server has them."""
        place = {name: next(k for k, cls in enumerate(type(self).__mro__) if name in vars(cls)) for name in AVERAGED_BY}
        return self.averages if place["averages"] <= place["round"] else ()

    # a client that comes later -----------------------------------------------------------------------
    def newcomer(self, server: Tree, task: Task) -> Newcomer:
        """How a client that never took part gets its model; by default it fine-tunes the global one."""
        w = self.global_model(server)
        if w is None:
            raise InputError(
                f"algorithm.name = {self.name!r} has no global model that a new client could start from, and does not "
                "say what else it starts from; give it a method newcomer()"
            )
        return self.tuning(w, "the global model, fine-tuned")

    @property
    def newcomer_settings(self) -> dict[str, str]:
        """What the steps of a new client go by, where it is not lr, momentum or batch_size: the name that it has."""
        return {}

    def for_newcomers(self, **settings: Any) -> Self:
        """The same method with another lr, momentum or batch_size for the steps that a new client takes."""
        named = {self.newcomer_settings.get(key, key): value for key, value in settings.items()}
        return self._with(**settings | named) if settings else self

    def unused_by_newcomers(self, *, tuning: bool = False) -> dict[str, str]:
        """What changes nothing in a new client's steps, each with the reason; ``tuning``: if they are plain SGD."""
        acts = Algorithm.newcomer_acts if tuning else self.newcomer_acts
        return {name: why for name, condition in acts.items() if (why := condition.why_not(vars(self)))}

    def _with(self, **values: Any) -> Self:
        """A copy with other values; whether they change anything is not asked."""
        other = copy(self)
        for name, value in checked(type(self), values, type(self).__name__).items():
            object.__setattr__(other, name, value)
        return other

    def tuning(self, w: Model, how: str) -> Newcomer:
        """Plain local SGD from a given model."""
        return Newcomer(how, self.begin_tuning, self.tuning_step, x_of, without_momentum, {"w": w})

    def joining(
        self,
        how: str,
        begin: Callable[..., Tree],
        step: Callable[..., Tree],
        shared: Mapping[str, Tree],
        before: tuple[Phase, ...] = (),
    ) -> Newcomer:
        """A new client's way to a model by this method's own functions; see `Newcomer`."""
        return Newcomer(how, begin, step, self.joined_model, self.fresh_optimiser, shared, before)

    def begin_tuning(self, task: Task, down: Down, kept: Tree) -> Training:
        """The download ``w`` and a fresh optimiser, to be trained on."""
        return Training(down.w, self.opt.init(task.params(down.w)))

    def tuning_step(self, task: Task, down: Down, c: Training, batch: Batch) -> Training:
        """One step of local training on a batch."""
        return self.descend(c, task.grad(c.x, batch))

    def joined_model(self, task: Task, down: Down, c: Tree) -> Model:
        """The model of a new client: the carry's ``x``, unless the method says otherwise."""
        return x_of(task, down, c)

    def fresh_optimiser(self, task: Task, down: Down, c: Tree) -> Tree:
        """A new client's carry without momentum, which is its ``m``, unless the method says otherwise."""
        return without_momentum(task, down, c)

    # what is seen of it ------------------------------------------------------------------------------
    def outputs(self, task: Task, model: Model, batch: Batch) -> Tensor:
        """What a personal model answers; a method whose personal model is more than one network says how."""
        return network_outputs(task, model, batch)

    def server_facts(self, server: Tree) -> dict[str, Tensor]:
        """What people look at in the server's state (PGFed's matrix A), recorded in evaluated rounds."""
        return {}

    def client_facts(self, task: Task, server: Tree, kept: Tree) -> dict[str, Tensor]:
        """The same of ONE client's state (LG-Mix's lambda), without branches on tensors; NaN where there is none."""
        return {}

    def layer_names(self, task: Task) -> list[str]:
        """The names of the layers, for facts that have a number for each."""
        return [layer.name for layer in task.layers]

    def warnings(self, server: Tree) -> dict[str, str]:
        """What a user should know about the server's state: a word for the matter, and a sentence. Looked at in
        evaluated rounds; each matter is said once in a run."""
        return {}

    # pieces of a client's program --------------------------------------------------------------------
    @property
    def opt(self) -> Optimizer:
        """The local optimiser with the method's ``lr``."""
        return self.opt_at(self.lr)

    def opt_at(self, lr: float) -> Optimizer:
        """The local optimiser with another rate."""
        return make_optimizer(self.optimizer, lr, self._beside_optimizer)

    @property
    def _beside_optimizer(self) -> dict[str, Any]:
        """Of its options those that are hyper-parameters of their own."""
        return {name: getattr(self, name) for name in BESIDE.get(Chosen.of(self.optimizer).name, ())}

    @property
    def epochs(self) -> Batches:
        """The batches of a round: ``local_epochs`` shuffled passes over the train split."""
        return shuffled(self.local_epochs, self.batch_size, drop_last=self.drop_last)

    def epochs_or_steps(self, unit: str) -> Batches:
        """``local_epochs`` epochs of the train split or, for the unit "steps", as many batches."""
        steps = self.local_epochs if unit == "steps" else None
        return shuffled(self.local_epochs, self.batch_size, steps=steps, drop_last=self.drop_last)

    def momentum_at_start(self, kept: Buffers, params: Model) -> Buffers:
        """The buffers that a round's training of ``params`` begins with."""
        return kept if self.opt_state == "keep" else self.opt.init(params)

    def momentum_to_keep(self, m: Buffers) -> Buffers:
        """What of the buffers goes into a client's state."""
        return m if self.opt_state == "keep" else {}

    def descend(self, c: Training, p: Pass) -> Training:
        """One step of the optimiser along a pass's gradient, with its new buffers."""
        x, m = self.opt.step(c.x, p.grad, c.m)
        return Training(x | p.buffers, m)

    @classmethod
    def named_tuples(cls) -> dict[str, type]:
        """The classes of state that its files define, by their full names: what a checkpoint may rebuild."""
        found: dict[str, type] = {}
        for base in reversed(cls.__mro__):
            for value in (*vars(sys.modules[base.__module__]).values(), *vars(base).values()):
                if not (isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")):
                    continue
                if found.setdefault(full_name(value), value) is not value:
                    raise InputError(
                        f"{cls.__name__}'s files define two classes with the name {full_name(value)}; a checkpoint "
                        "could not tell them apart. Give them names of their own"
                    )
        return found


@cache
def _program_names(cls: type) -> tuple[str, ...]:
    """A class's properties that return a Program."""
    found = inspect.getmembers(cls, lambda v: isinstance(v, property))
    told = {name: value.fget.__annotations__.get("return") for name, value in found}
    return tuple(name for name, kind in told.items() if kind in (Program, Program.__name__))


@dataclass(frozen=True)
class OneModel(Algorithm):
    """A method whose server keeps one model w, and nothing else."""

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"w": x0}

    def global_model(self, server: Tree) -> Model:
        w: Model = server["w"]
        return w


def x_of(task: Task, down: Down, c: Tree) -> Model:
    """The model of a carry that keeps it as ``x``."""
    x: Model = c.x
    return x


def without_momentum(task: Task, down: Down, c: Tree) -> Tree:
    """A carry whose optimiser starts afresh: its buffers ``m`` are zeros."""
    return c._replace(m=zeros(c.m))
