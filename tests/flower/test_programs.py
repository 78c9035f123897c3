"""Programs go by name: every program of every method has one, and a silo takes nothing else."""

from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from tests.flower.memory import experiment
from tests.test_contract import MODELS, SETTINGS, make_data

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.core import InputError, Order, Program, Task
from bespokefl.engines import Sequential
from bespokefl.engines.base import Job, Result
from bespokefl.engines.variants import fingerprint
from bespokefl.federation import Federation

# Settings under which methods run other programs than by default.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"personal": "global"}, {"personal": "finetune"}],
    "fedrep": [{"last_head_epochs": 1}],
    "fedbabu": [{"finetune_part": "head"}],
    "fedrod": [{"head": "hyper"}],
    "fedpg": [{"grad_mode": "exact"}, {"pm_base": "persistent"}, {"pers_backtrack": True}, {"pm_eval": "rebuild"}],
    "l2sgd": [{"form": "coin", "p": 0.5, "flips": 12}, {"form": "coin", "p": 0.1, "flips": 64}],
    "local": [{"local_every_round": True}],
    "pfedme": [{"train_all": True}, {"local_unit": "steps"}],
    "per-fedavg": [{"variant": "fo"}],
    "pfedhn": [{"server_step": "cohort"}, {"private_head": True}],
    "plgu-ghn": [{"ghn_delta": "recompute"}],
    "pgfed": [{"grad_pass": "code"}],
    "lg-mix": [{"trace": "code"}],
}
CASES = [(name, hyper) for name in ALGORITHMS for hyper in ({}, *VARIANTS.get(name, []))]


class Recording(Sequential):
    """An engine that remembers what it was asked to run, and does one batch of each phase."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.programs: list[Program] = []

    def run(self, job: Job) -> Result:
        self.programs.append(job.program)
        return super().run(job)


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=lambda v: v if isinstance(v, str) else ",".join(map(str, v)))
def test_every_program_of_rounds_and_personal_models_has_a_name(name: str, hyper: dict[str, Any]) -> None:
    algorithm = build_algorithm(name, SETTINGS | {"local_epochs": 1}, hyper)
    engine = Recording()
    task = Task(MODELS["mlp"]())
    schedule = [[0, 3], [0, 1, 3]]
    federation = Federation(task, make_data(), algorithm, engine=engine, schedule=schedule, clients_per_round=3)
    federation.round()
    federation.round()
    federation.personal_models([0])
    named = algorithm.programs()
    known = {fingerprint(program) for t in range(3) for program in algorithm.at(t).programs().values()}
    assert {fingerprint(program) for program in engine.programs} <= known
    twin = build_algorithm(name, SETTINGS | {"local_epochs": 1}, hyper).programs()  # as a silo has it
    assert list(twin) == list(named)
    for key, program in named.items():
        assert [p.batches for p in twin[key].phases] == [p.batches for p in program.phases]


def test_literal_options_of_variants_exist() -> None:
    """A renamed option would leave a variant untested."""
    for name, variants in VARIANTS.items():
        hints = get_type_hints(ALGORITHMS[name].cls)
        for hyper in variants:
            for key, value in hyper.items():
                assert key in hints and (not isinstance(value, str) or value in get_args(hints[key])), (name, key)


def test_a_program_without_a_name_is_refused_with_the_remedy(tmp_path: Any) -> None:
    from tests.flower.memory import Memory, remote, shards

    it = experiment("fedavg")
    federation = remote(it, Memory(shards(tmp_path, it, [[0, 1, 2, 3, 4]])), tmp_path)
    nameless = Program(lambda task, down, kept: {}, (), lambda task, down, c: ({}, c))
    with pytest.raises(InputError, match="a program without a name"):
        federation.clients.name_of(Order(nameless, np.array([0]), {}, {}, 0))
    train = federation.algorithm.train  # type: ignore[attr-defined]
    assert federation.clients.name_of(Order(train, np.array([0]), {}, {}, 0)) == "train"
    assert np.all(federation.clients.versions.numpy() == 0)
