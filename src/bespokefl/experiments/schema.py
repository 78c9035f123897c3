"""The configuration of an experiment: every key that its TOML file may hold, with its type and default."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bespokefl.errors import InputError

Document = dict[str, Any]
Positive = Annotated[int, Field(ge=1)]
LARGEST_SEED = 2**63  # and no seed is
Seed = Annotated[int, Field(ge=0, lt=LARGEST_SEED)]


class Section(BaseModel):
    """A table of the file. Values are taken as they are: "5" is not 5, and true is not 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataSection(Section):
    source: str = "digits"
    root: str | None = None  # the file or folder that holds the data
    clients: Positive | None = None  # None: 20, or as many as there are domains
    partition: str = "dirichlet"
    normalize: str = "unit"
    test: float | None = None  # fractions of each client's samples; None: the partition's own
    val: float | None = None
    seed: Seed | None = None  # of the partition; None: the run's seed
    max_samples: Positive | None = None
    options: Document = {}  # those of the source and the partition


class ModelSection(Section):
    name: str = "mlp"
    head: str | None = None  # None: the module `head`, or else the last layer with parameters
    options: Document = {}


class TrainSection(Section):
    """How clients train. What is None is the method's own (docs/methods.md has them all)."""

    rounds: Positive = 100
    local_epochs: Positive | None = None
    batch_size: Positive | Literal["full"] | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    lr_decay: Annotated[float, Field(gt=0, le=1)] | None = None  # factor from round to round
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    optimizer: str | Document | None = None  # a name, module:name, or a table of a name and its options
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] | None = None
    amsgrad: bool | None = None
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    drop_last: bool | None = None  # leave an incomplete last batch of an epoch out
    loss: Literal["auto", "cross_entropy", "dice"] = "auto"  # auto: dice where labels are masks, else cross_entropy


class EvalSection(Section):
    every: Positive = 1  # rounds; the last one is always evaluated
    select: Literal["auto", "last", "val", "best_test"] = "auto"  # auto: val with validation data, else last
    s_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1  # c of the S-accuracy
    cross: bool | Literal["auto"] = "auto"  # S- and G-accuracy; auto: where they cost seconds, or are asked for
    target: Annotated[float, Field(gt=0, le=1)] | None = None  # rounds are counted until the mean reaches it
    also: list[Literal["global", "before_agg", "train", "s_acc", "g_acc"]] = []  # scored, too, in every evaluated round
    features: bool = False  # keep figures of the personal models' features, the head's inputs, of every evaluated round


class EngineSection(Section):
    name: str = "vectorized"
    device: str = "auto"
    precision: Literal["float32", "float64", "bf16"] = "float32"
    compile: bool = False
    tf32: bool = True
    lanes: Positive | None = None
    stack: Positive | None = None
    together: Positive = 1  # runs of a method at once: seeds, and trials of `bespoke tune`
    debug_client: Seed | None = None  # of the debug engine: the only client for which breakpoints stop


class CheckpointSection(Section):
    every: Positive | Literal["auto"] = "auto"  # auto: as often as costs less than 3 % of the time


class OutputSection(Section):
    personal: bool = False  # write each client's model
    surface: bool = False  # write how the loss lies around some models of the last round


class TuneSection(Section):
    """How `bespoke tune` chooses hyper-parameters."""

    grid: Document = {"train.lr": [0.005, 0.01, 0.05, 0.1]}  # by key: values to try, or a range {low, high, log}
    own: dict[str, Document] = {}  # by label: instead of the grid's for this method; [] leaves a key alone
    trials: Positive | None = None  # of each method; None: the whole grid, or 20 where there is a range
    metric: Literal["mean", "worst5"] = "mean"  # of the clients' validation accuracies
    rounds: Positive | None = None  # of a trial; None: train.rounds
    seeds: Annotated[list[Seed], Field(min_length=1)] | None = None  # of a trial; None: the first of seeds
    val: Annotated[float, Field(gt=0, lt=1)] = 0.2  # share of the train samples, where the data have no validation
    prune: bool = False  # end a trial that stays below the median of those before it


class AttackSection(Section):
    """What malicious clients do to the federation."""

    kind: Literal["none", "noise", "scale", "labels", "signs"] = "none"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of the clients, drawn once per seed
    sigma: Annotated[float, Field(gt=0)] = 1.0  # noise: standard deviation
    factor: float = 100.0  # scale: of the update
    clients: Annotated[list[Seed], Field(min_length=1)] | None = None  # ids instead of a share


class Contradiction(Section):
    """Numbers that contradict each other inside a paper."""

    where: str | list[str]  # the cells it concerns: patterns for setting/label/metric, or label/metric without settings
    says: str

    @property
    def places(self) -> list[str]:
        return [self.where] if isinstance(self.where, str) else self.where


class DataNote(Section):
    """Where data come from that cannot be shipped."""

    name: str
    where: str  # an address, or whom to ask
    licence: str = ""
    layout: str = ""  # what is to lie at data.root
    settings: list[str] = ["*"]  # patterns of the settings that need them


class NewClientsSection(Section):
    """Clients that are held out of the training and join afterwards, as in PGFed's figure 4."""

    count: Positive | None = None  # how many clients; None: by share
    share: Annotated[float, Field(gt=0, lt=1)] | None = None  # of all clients; neither: nobody is held out
    choose: Literal["last", "random"] = "last"  # which ones
    epochs: Positive = 20  # of their own training
    start: Literal["method", "global"] = "method"  # the method's own procedure, or plain SGD from the global model
    opt_state: Literal["reset", "keep"] = "reset"  # a fresh optimiser in every epoch, or one for all
    lr: Annotated[float, Field(gt=0)] | None = None  # None: as in the training
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    batch_size: Positive | Literal["full"] | None = None

    @property
    def wanted(self) -> bool:
        return self.count is not None or self.share is not None


class FederationSection(Section):
    """How a real federation deals with silos that are slow, gone or wrong; a simulation has none of it."""

    deadline: Annotated[float, Field(gt=0)] = 600.0  # seconds for an exchange; who has not answered then is left out
    min_answers: Positive = 1  # clients of a round; fewer, and the round is tried again
    retries: Annotated[int, Field(ge=0)] = 2  # of a round; after them the run ends with what it has
    max_norm: Annotated[float, Field(gt=0)] | None = 1e6  # of an answer, relative to the download or initial model
    max_change: Annotated[float, Field(gt=1)] | None = 100.0  # of an upload, times the median node's of late
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.5  # of all weights, for one node, from three nodes on
    max_bytes: Positive = 2**32  # of an answer
    cohort: Literal["secret", "seed"] = "secret"  # what draws a round's clients: a key of the server's, or the seed
    wait: Annotated[float, Field(gt=0)] = 300.0  # seconds for silos to connect, at the start and before a retry
    hello: Annotated[float, Field(gt=0)] = 30.0  # seconds for a greeting's answer; the start waits as long to go on
    min_nodes: Positive | None = None  # enough to start with after wait; None: all but those that were left out


class PrivacySection(Section):
    """Client-level differential privacy of the averaged updates; off unless clip and noise are set."""

    clip: Annotated[float, Field(gt=0)] | None = None  # largest norm of a client's update
    noise: Annotated[float, Field(gt=0)] | None = None  # standard deviation of the noise on their sum, over clip
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # of the guarantee; below one over the number of clients

    @property
    def wanted(self) -> bool:
        return self.clip is not None or self.noise is not None


class TrackSection(Section):
    """Who else is told of the runs; it changes nothing in them."""

    to: list[Literal["tensorboard", "mlflow"]] = []
    mlflow_uri: str | None = None  # None: MLFLOW_TRACKING_URI, or else a database beside the results
    experiment: str | None = None  # its name in MLflow; None: that of the output folder


OF_OTHERS_DATA = ("s_acc", "g_acc", "s_acc_std", "g_acc_std")  # metrics of personal models on others' test data


class PaperSection(Section):
    """What a paper reports, for `bespoke reproduce`."""

    title: str = ""
    source: str = ""  # the paper, and what is known of the place
    metrics: Annotated[list[str], Field(min_length=1)] = ["mean"]  # that the paper reports
    unit: Literal["percent", "fraction"] = "percent"  # of accuracies and the like in ``numbers``
    numbers_from: str = ""  # a table that is shipped, such as "pgfed.table1", or a setting of it: fills what follows
    rows: dict[str, str] = {}  # by label: the row of that table, or setting/row, where it is not the label's own
    numbers: dict[str, dict[str, float]] = {}  # by metric, then label
    spreads: dict[str, dict[str, float]] = {}  # likewise, of those numbers
    spread_of: Literal["seeds", "clients"] = "seeds"  # over what ``spreads`` are taken
    lost: list[str] = []  # metric/label of numbers that the paper has, and that cannot be read any more
    accuracy: dict[str, float] = {}  # short for numbers.mean, always in percent
    added: list[str] = []  # labels that the paper does not have
    contradictions: list[Contradiction] = []
    remarks: list[str] = []  # on all of its numbers
    data: list[DataNote] = []


class AlgorithmChoice(Section):
    name: str
    label: str  # names the folder and the row in tables
    hyper: Document = {}
    shared: frozenset[str] = frozenset()  # which of them were told to several methods
    note: str = ""  # what a reader of the results should know of this method here; stands under the table
    key: str = "algorithm"  # where it stands in the file


@dataclass(frozen=True)
class Origin:
    """Where each key was set, for messages."""

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)
    from_command: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def located(self, algorithm: str = "algorithm") -> Iterator[None]:
        """Adds the place to an InputError that leaves the block; ``algorithm.*`` stands at the given key."""
        try:
            yield
        except InputError as error:
            place = self._place(str(error), algorithm)
            raise (type(error)(f"{error} ({place})") if place else error) from error.__cause__

    def at(self, key: str, error: InputError) -> InputError:
        """The error with the place of a key, or only the file where the key is in none of its lines."""
        place = self._place_of(key) or self.file
        return InputError(f"{error} ({place})") if place else error

    def _place(self, message: str, algorithm: str) -> str | None:
        for token in re.findall(r"[A-Za-z_][\w-]*(?:\.[\w+-]+)*", message):
            if "." not in token and token not in ("seeds", "algorithms"):
                continue
            at_entry = re.sub(r"^algorithm(?=\.)", algorithm, token)
            method = [algorithm] if at_entry != token else []  # where its key is not in the file
            keys = [token] if token in self.from_command else [at_entry, token, *method]
            if place := next(filter(None, map(self._place_of, keys)), None):
                return place
        return None

    def _place_of(self, key: str) -> str | None:
        entry = "algorithms" if key.startswith("algorithms.") else key  # a new list has nothing of the file's
        if {key, entry} & self.from_command:
            return "from the command line"
        return f"{self.file}, line {self.lines[key]}" if key in self.lines else None


@dataclass(frozen=True)
class Experiment:
    """A checked configuration: some algorithms, some seeds, one setting."""

    algorithms: tuple[AlgorithmChoice, ...]
    seeds: tuple[int, ...]
    data: DataSection
    model: ModelSection
    train: TrainSection
    eval: EvalSection
    engine: EngineSection
    checkpoint: CheckpointSection
    output: OutputSection
    attack: AttackSection
    tune: TuneSection
    new_clients: NewClientsSection
    track: TrackSection
    federation: FederationSection
    privacy: PrivacySection
    paper: PaperSection
    origin: Origin


@dataclass(frozen=True)
class Part:
    """A setting of a file, an experiment of its own; without settings the only one has no name."""

    name: str
    title: str
    experiment: Experiment
    set_up: str = ""  # the small set-up that it was brought to


SECTIONS: dict[str, type[Section]] = {
    "data": DataSection,
    "model": ModelSection,
    "train": TrainSection,
    "eval": EvalSection,
    "engine": EngineSection,
    "checkpoint": CheckpointSection,
    "output": OutputSection,
    "attack": AttackSection,
    "tune": TuneSection,
    "new_clients": NewClientsSection,
    "track": TrackSection,
    "federation": FederationSection,
    "privacy": PrivacySection,
    "paper": PaperSection,
}
