"""From a configuration to the objects that run it, and back: the resolved configuration of one run."""

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch

from bespokefl import models
from bespokefl.algorithms import Algorithm, build_algorithm
from bespokefl.core.registry import plain
from bespokefl.core.rng import derived_seed
from bespokefl.core.task import Task
from bespokefl.data import PARTITIONS, SOURCES, FederatedData, load
from bespokefl.data.held_out import HoldOut
from bespokefl.data.options import option_names, parse_options
from bespokefl.engines import Engine, build_engine
from bespokefl.errors import InputError
from bespokefl.experiments.joining import joining_of
from bespokefl.experiments.schema import AlgorithmChoice, Document, Experiment
from bespokefl.federation import Federation
from bespokefl.federation.attacks import Attack
from bespokefl.federation.loop import Census
from bespokefl.federation.privacy import PrivacySettings

NEW_CLIENTS = "new_clients"  # the section
OF_THE_RUN = frozenset({"rounds", "participation", "loss"})  # keys of [train] that algorithms are not told


_torchs_random_state = threading.Lock()  # there is one for all threads, and seeds may run side by side


def load_data(experiment: Experiment, seed: int) -> FederatedData:
    """The clients' data of a run; the partition is drawn by data.seed where it is set, else by the run's seed."""
    section = experiment.data
    keys = section.model_dump(exclude={"options", "seed"}) | section.options
    new = experiment.new_clients
    if new.count is not None and new.share is not None:
        raise InputError(f"new_clients.share = {new.share} stands beside new_clients.count; keep one of the two.")
    held_out = HoldOut(new.count, new.share, new.choose) if new.wanted else None
    return load(**keys, seed=data_seed(experiment, seed), held_out=held_out)


def data_seed(experiment: Experiment, seed: int) -> int:
    return seed if experiment.data.seed is None else experiment.data.seed


def make_module(experiment: Experiment, seed: int, data: Census) -> torch.nn.Module:
    """The initial network, the same for every algorithm of a seed; torch's own random state is left as it was."""
    with _torchs_random_state, torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "init"))
        section = experiment.model
        _check_answers(section.name, data)
        return models.build(section.name, data.input_shape, len(data.classes), **section.options)


def _check_answers(name: str, data: Census) -> None:
    spec, maps = models.MODELS.get(name), data.has_masks
    if spec is not None and spec.segments and not maps:
        raise InputError(
            f"model.name is {name!r}, which answers a label for every pixel, but the data has one label per sample; "
            "take a classifier (bespoke list models)"
        )


def make_task(experiment: Experiment, seed: int, data: Census) -> Task:
    precision = experiment.engine.precision
    dtype = torch.float64 if precision == "float64" else torch.float32
    module = make_module(experiment, seed, data)
    loss = chosen_loss(experiment, data)
    return Task(module, loss, head=experiment.model.head, dtype=dtype, bf16=precision == "bf16")


def chosen_loss(experiment: Experiment, data: Census) -> str:
    """The loss of train.loss, or the one that suits the labels."""
    loss = experiment.train.loss
    if loss == "dice" and not data.has_masks:
        raise InputError(
            "train.loss = 'dice' is for masks, but these data have one label a sample; use 'cross_entropy'."
        )
    return ("dice" if data.has_masks else "cross_entropy") if loss == "auto" else loss


def make_engine(experiment: Experiment) -> Engine:
    together = experiment.engine.together
    if experiment.engine.name == "debug" and together > 1:
        raise InputError(f"engine.together = {together}, but the debug engine runs one thing at a time; leave it out")
    section = experiment.engine.model_dump(exclude={"precision", "together"})
    return build_engine(section.pop("name"), section.pop("device"), **section)


def make_algorithm(experiment: Experiment, choice: AlgorithmChoice) -> Algorithm:
    """The method; what it is told with others and does not use is left out."""
    shared, own = _told(experiment, choice)
    return build_algorithm(choice.name, shared, own)


def _told(experiment: Experiment, choice: AlgorithmChoice) -> tuple[Document, Document]:
    """What the method is told together with others, and what for itself."""
    of_choice = {key: value for key, value in choice.hyper.items() if key in choice.shared}
    own = {key: value for key, value in choice.hyper.items() if key not in choice.shared}
    return _settings(experiment) | of_choice, own


def refuse_unused(experiment: Experiment, choice: AlgorithmChoice) -> None:
    """InputError for a hyper-parameter that was written for this very method and changes nothing in it."""
    make_algorithm(experiment, choice).refuse_unused(_told(experiment, choice)[1])


def unused(experiment: Experiment, choice: AlgorithmChoice) -> dict[str, str]:
    """What the method is told with others and does not use, each with the reason."""
    told = _settings(experiment).keys() | choice.shared
    own = _told(experiment, choice)[1]
    algorithm = make_algorithm(experiment, choice)
    found = {name: why for name, why in algorithm.unused().items() if name in told and name not in own}
    return found | {f"{NEW_CLIENTS}.{name}": why for name, why in _unused_by_newcomers(experiment, algorithm).items()}


def _unused_by_newcomers(experiment: Experiment, algorithm: Algorithm) -> dict[str, str]:
    section = experiment.new_clients
    return joining_of(section).unused(algorithm) if section.wanted else {}


def without_unused(experiment: Experiment, choice: AlgorithmChoice) -> AlgorithmChoice:
    """The choice without what it does not use of what it is told with others."""
    idle = unused(experiment, choice)
    return choice.model_copy(update={"hyper": {k: v for k, v in choice.hyper.items() if k not in idle}})


def _settings(experiment: Experiment) -> Document:
    """What [train] says about local training, in the algorithms' terms; the rest is each method's own."""
    settings = experiment.train.model_dump(exclude=set(OF_THE_RUN), exclude_none=True)
    return {key: None if value == "full" else value for key, value in settings.items()}


class RunResources(NamedTuple):
    """What the seeds of one algorithm share: an engine keeps what it traced for this very task and algorithm.

    The task is on the engine's device: seeds that run at the same time cannot all move it.
    """

    task: Task
    algorithm: Algorithm
    engine: Engine


def make_resources(experiment: Experiment, choice: AlgorithmChoice, data: FederatedData) -> RunResources:
    engine = make_engine(experiment)
    client = experiment.engine.debug_client
    if client is not None and client >= data.clients:
        raise InputError(f"engine.debug_client = {client}, and the clients are 0 to {data.clients - 1}")
    task = make_task(experiment, experiment.seeds[0], data).to(engine.device)
    return RunResources(task, make_algorithm(experiment, choice), engine)


def make_federation(experiment: Experiment, resources: RunResources, seed: int, data: FederatedData) -> Federation:
    return Federation(
        resources.task,
        data,
        resources.algorithm,
        engine=resources.engine,
        seed=seed,
        participation=experiment.train.participation,
        initial=make_task(experiment, seed, data).initial,
        attack=Attack(**experiment.attack.model_dump()),
        keep_sent="before_agg" in experiment.eval.also,
        privacy=make_privacy(experiment),
    )


def make_privacy(experiment: Experiment) -> PrivacySettings | None:
    """What [privacy] says; nothing where it says nothing."""
    section = experiment.privacy
    if section.clip is not None and section.noise is not None:
        return PrivacySettings(section.clip, section.noise, section.delta)
    if section.wanted:
        there, missing = ("clip", "noise") if section.noise is None else ("noise", "clip")
        raise InputError(f"privacy.{there} stands alone; privacy.{missing} is needed beside it.")
    return None


def resolved(experiment: Experiment, choice: AlgorithmChoice, seed: int, data: FederatedData, task: Task) -> Document:
    """The configuration of one run with every default filled in: running it again repeats the run."""
    return resolved_with(_resolved_data(experiment, seed, data), experiment, choice, seed, data, task)


def resolved_with(
    about_data: Document, experiment: Experiment, choice: AlgorithmChoice, seed: int, data: Census, task: Task
) -> Document:
    """The same with a given table of the data."""
    attack = {} if experiment.attack.kind == "none" else {"attack": experiment.attack.model_dump()}
    new, no_steps = experiment.new_clients, _unused_by_newcomers(experiment, make_algorithm(experiment, choice))
    return {
        "seeds": [seed],
        "algorithm": {"name": choice.name, "label": choice.label} | _hyper(experiment, choice),
        "data": about_data,
        "model": _resolved_model(experiment, task),
        "train": experiment.train.model_dump(exclude_none=True) | {"loss": chosen_loss(experiment, data)},
        "eval": experiment.eval.model_dump(),
        "engine": experiment.engine.model_dump(),
        "checkpoint": experiment.checkpoint.model_dump(),
        "output": experiment.output.model_dump(),
        **attack,
        **({"privacy": experiment.privacy.model_dump()} if experiment.privacy.wanted else {}),
        **({NEW_CLIENTS: new.model_dump(exclude=set(no_steps))} if new.wanted else {}),
        **({"unused": idle} if (idle := unused(experiment, choice)) else {}),
    }


def _hyper(experiment: Experiment, choice: AlgorithmChoice) -> Document:
    """The hyper-parameters that act, without those of local training that [train] holds already."""
    algorithm = make_algorithm(experiment, choice)
    left_out = (_settings(experiment).keys() - choice.hyper.keys()) | algorithm.unused().keys()
    return _plain({f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name not in left_out})


def _resolved_data(experiment: Experiment, seed: int, data: FederatedData) -> Document:
    section = experiment.data
    source, partition = SOURCES[section.source].options, PARTITIONS[section.partition].options
    of_source = {key: value for key, value in section.options.items() if key in option_names(source)}
    return {
        **section.model_dump(exclude={"options"}),
        "root": None if section.root is None else os.path.abspath(os.path.expanduser(section.root)),
        "clients": data.record["partition"]["clients"],
        "test": data.record["split"]["test"],
        "val": data.record["split"]["val"],
        "seed": data_seed(experiment, seed),
        **_plain(asdict(parse_options(source, of_source, f"source {section.source!r}"))),
        **_plain({key: data.record["partition"][key] for key in option_names(partition)}),
    }


def _resolved_model(experiment: Experiment, task: Task) -> Document:
    spec = models.MODELS.get(experiment.model.name)
    defaults = spec.options if spec else {}
    return {"name": experiment.model.name, "head": task.head_name} | _plain(defaults | experiment.model.options)


def _plain(values: Mapping[str, Any]) -> Document:
    """Values as TOML reads them back."""
    return {key: plain(value) for key, value in values.items()}
