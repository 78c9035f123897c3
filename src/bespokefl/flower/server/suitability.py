"""Whether a configuration can run on what a node has: asked before the node has a say in anything."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from bespokefl import models
from bespokefl.engines.base import Resident
from bespokefl.errors import BespokeError, InputError
from bespokefl.evaluation.fit import check_fit
from bespokefl.experiments import resolve
from bespokefl.experiments.schema import Experiment
from bespokefl.flower import limits
from bespokefl.flower.server.census import Kind, RemoteCensus, kind_of
from bespokefl.flower.server.upload_schema import made_up
from bespokefl.flower.silo.terms import Limits
from bespokefl.plain import one_line


class Suitability:
    """Of one seed of an experiment; each kind of node is looked at once for the same classes."""

    def __init__(self, experiment: Experiment, seed: int) -> None:
        self._experiment, self._seed = experiment, seed
        self._known: dict[tuple[Kind, tuple[str, ...]], str] = {}

    def __call__(self, about: Mapping[str, Any]) -> str:
        """Why the configuration cannot run on samples as a node describes them; nothing if it can."""
        key = kind_of(about), tuple(about["classes"])
        if key not in self._known:
            self._known[key] = ""
            try:
                self._check(*key)
            except Exception as error:  # the node chose what the model is built for, so no kind can be left out
                said = str(error) if isinstance(error, BespokeError) else f"{type(error).__name__}: {error}"
                self._known[key] = one_line(f"the configuration cannot run on its samples: {said}", limits.TEXT)
        return self._known[key]

    def _check(self, kind: Kind, classes: tuple[str, ...]) -> None:
        attack, section = self._experiment.attack.kind, self._experiment.model
        if attack != "none" and kind.hosts == "own":
            raise InputError(f"attack.kind = {attack!r}: only simulated clients can play attackers")
        with torch.device("meta"):
            counted = models.build(section.name, kind.input_shape, max(1, len(classes)), **section.options)
        if (size := sum(math.prod(p.shape) for p in counted.parameters())) > Limits().parameters:
            raise InputError(f"the model would have {size:,} parameters; at most {Limits().parameters:,} are accepted")
        census = RemoteCensus(("",), classes, kind.input_shape, kind.target, kind.inputs, {}, ("",))
        task = resolve.make_task(self._experiment, self._seed, census)
        sample = made_up(kind.input_shape, classes, kind.target, kind.inputs)
        check_fit(task, sample, Resident(sample.x, sample.y, torch.device("cpu"), task.dtype))
