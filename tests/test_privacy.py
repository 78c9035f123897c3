"""Client-level differential privacy: clipping, the level of the noise, what it guarantees, and where it is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower.memory import Memory, Notes, experiment, remote, shards
from tests.test_contract import MODELS, make_data

from bespokefl import assembly
from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.engines import Sequential, Vectorized
from bespokefl.errors import InputError
from bespokefl.experiment import run_experiment
from bespokefl.federation import Federation
from bespokefl.flower.server import serve
from bespokefl.privacy import Privacy, PrivacySettings
from bespokefl.task import Task
from bespokefl.trees import flat

SETTINGS = {"lr": 0.05, "local_epochs": 2, "batch_size": 8, "weights": "uniform"}
TINY = 1e-13  # noise that leaves float64 as good as alone


def federate(name: str, privacy: PrivacySettings | None, *, lr: float = 0.05, **options: Any) -> Federation:
    torch.manual_seed(1)
    algorithm = build_algorithm(name, SETTINGS | {"lr": lr}, options.pop("hyper", {}))
    task = Task(MODELS["mlp"](), dtype=torch.float64)
    return Federation(task, make_data(), algorithm, privacy=privacy, **{"engine": Sequential(), **options})


def vector(model: dict[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    return torch.cat([v.flatten() for v in model.values()]).numpy()


def test_updates_are_clipped_one_by_one() -> None:
    """By hand, from the models that clients trained: those are in their states."""
    clip = 0.28
    private, plain = federate("fedavg", PrivacySettings(clip, TINY)), federate("fedavg", None)
    w = vector(plain.server["w"])
    private.round()
    plain.round()
    trained = flat(plain.site.states.gather(np.arange(7)).x).numpy()
    updates = trained - w
    lengths = np.linalg.norm(updates, axis=1)
    assert lengths.min() < clip < lengths.max()  # some are, some are not
    clipped = updates * np.minimum(1, clip / lengths)[:, None]
    np.testing.assert_allclose(vector(private.server["w"]) - w, clipped.mean(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(name for name in ALGORITHMS if build_algorithm(name).averaged()))
def test_without_clipping_or_noise_it_is_the_method(name: str) -> None:
    private, plain = federate(name, PrivacySettings(1e6, 1e-20)), federate(name, None)
    for _ in range(2):
        private.round()
        plain.round()
    ours, theirs = private.state()[0], plain.state()[0]
    for key in ours:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("clients", [3, 7])
def test_the_noise_has_the_promised_level(clients: int) -> None:
    """Clients that do not move at all: what the model moves is noise, of deviation z C over their number."""
    clip, z = 2.0, 1.5
    federation = federate("fedavg", PrivacySettings(clip, z), lr=0.0, clients_per_round=clients)
    moves = []
    for _ in range(20):
        before = vector(federation.server["w"])
        federation.round()
        moves.append(vector(federation.server["w"]) - before)
    drawn = np.concatenate(moves) * clients / (z * clip)
    n = len(drawn)
    assert n > 5000
    assert abs(drawn.mean()) < 4 / math.sqrt(n) and abs(drawn.std() - 1) < 4 / math.sqrt(2 * n)
    assert abs(np.corrcoef(moves[0], moves[1])[0, 1]) < 4 / math.sqrt(len(moves[0]))


def test_a_simulation_repeats_itself_on_every_engine() -> None:
    runs = [federate("ditto", PrivacySettings(0.3, 1.0), engine=e) for e in (Sequential(), Vectorized("cpu", stack=3))]
    for run in runs:
        run.round()
        run.round()
    np.testing.assert_allclose(vector(runs[0].server["w"]), vector(runs[1].server["w"]), rtol=1e-9, atol=1e-11)


def make(z: float, clients: int, cohort: int, delta: float = 1e-5) -> Privacy:
    return Privacy(1.0, z, delta, clients, cohort, {}, 0)


@pytest.mark.parametrize(("z", "clients", "cohort", "rounds"), [(1.0, 100, 10, 50), (2.0, 1000, 20, 300)])
def test_epsilon_is_that_of_dp_accounting(z: float, clients: int, cohort: int, rounds: int) -> None:
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(cohort / clients, dp_accounting.GaussianDpEvent(z))
    accountant = dp_accounting.rdp.RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    assert make(z, clients, cohort).epsilon(rounds) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)


def test_a_schedule_is_no_sampling() -> None:
    """Nobody is drawn at random, so nothing is gained by it: epsilon is that of full participation."""
    schedule = [[0, 1, 2]] * 3
    drawn = federate("fedavg", PrivacySettings(1.0, 1.0), clients_per_round=3).privacy
    listed = federate("fedavg", PrivacySettings(1.0, 1.0), clients_per_round=3, schedule=schedule).privacy
    everyone = federate("fedavg", PrivacySettings(1.0, 1.0)).privacy
    assert listed.epsilon(3) == everyone.epsilon(3) > drawn.epsilon(3)  # type: ignore[union-attr]


def test_epsilon_of_full_participation_by_hand() -> None:
    """Renyi divergence of Gaussians, T alpha / (2 z^2), turned into epsilon (Canonne, Kamath, Steinke 2020)."""
    z, rounds, delta = 4.0, 30, 1e-6
    alpha = np.array([1 + x / 10.0 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024])
    bound = rounds * alpha / (2 * z**2) + np.log1p(-1 / alpha) - np.log(delta * alpha) / (alpha - 1)
    assert make(z, 50, 50, delta).epsilon(rounds) == pytest.approx(bound.min(), rel=1e-3)
    assert make(z, 50, 50, delta).epsilon(2 * rounds) > make(z, 50, 50, delta).epsilon(rounds)


@pytest.mark.parametrize(
    ("name", "hyper", "words"),
    [
        ("pgfed", {}, "does more with its clients' uploads"),
        ("fedhkd", {}, "does more with its clients' uploads"),
        ("s-fedpg", {}, "does more with its clients' uploads"),
        ("fedamp", {}, "does more with its clients' uploads"),
        ("fedavg", {"aggregation": "median"}, "does more with its clients' uploads"),
        ("fedavg", {"weights": "sample"}, "count alike; set it to 'uniform'"),
    ],
)
def test_where_it_would_be_no_guarantee_it_is_refused(name: str, hyper: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        federate(name, PrivacySettings(1.0, 1.0), hyper=hyper)


def test_running_statistics_and_a_large_delta_are_refused() -> None:
    algorithm = build_algorithm("fedavg", SETTINGS)
    with pytest.raises(InputError, match="running statistics"):
        Federation(Task(MODELS["batchnorm"]()), make_data(), algorithm, privacy=PrivacySettings(1.0, 1.0))
    with pytest.raises(InputError, match="below one over the number of clients, 7"):
        federate("fedavg", PrivacySettings(1.0, 1.0, 0.2))


def test_two_means_in_a_round_are_refused() -> None:
    federation = federate("l2sgd", PrivacySettings(1.0, 1.0), hyper={"form": "coin", "p": 0.5, "flips": 12})
    with pytest.raises(InputError, match="more than once in a round"):
        federation.round()


def test_the_section_needs_both_and_says_epsilon_in_the_summary(tmp_path: Path) -> None:
    method = {"name": "ditto", "weights": "uniform"}
    it = experiment([method], rounds=3, privacy={"clip": 1.0, "noise": 0.8}, train={"participation": 0.4})
    run_experiment(it, tmp_path / "a", resume=False, reporter=Notes())
    summary = json.loads((tmp_path / "a" / "ditto" / "seed-0" / "summary.json").read_text())
    assert summary["epsilon"] == make(0.8, 5, 2).epsilon(3) and summary["delta"] == 1e-5
    assert summary["privacy_sampling"] == "poisson (approximated)"
    alone = experiment([method], privacy={"clip": 1.0})
    with pytest.raises(InputError, match=r"privacy\.clip stands alone; privacy\.noise is needed"):
        assembly.make_privacy(alone)


def test_between_machines(tmp_path: Path) -> None:
    """Each client's own row is clipped, and the noise is the server's secret."""
    method = {"name": "ditto", "weights": "uniform"}
    quiet = experiment([method], privacy={"clip": 0.1, "noise": TINY})
    data = assembly.load_data(quiet, 0)
    here = assembly.make_federation(quiet, assembly.make_kit(quiet, quiet.algorithms[0], data), 0, data)
    there = remote(quiet, Memory(shards(tmp_path, quiet, [[0, 1, 2], [3, 4]])), tmp_path)
    here.round()
    there.round()
    np.testing.assert_allclose(vector(there.server["w"]), vector(here.server["w"]), rtol=1e-9, atol=1e-11)
    loud = experiment([method], rounds=1, privacy={"clip": 0.1, "noise": 1.0})
    models = []
    for k in range(2):
        home = tmp_path / str(k)
        federation = remote(loud, Memory(shards(home, loud, [[0, 1, 2], [3, 4]])), home)
        federation.round()
        models.append(vector(federation.server["w"]))
    assert np.abs(models[0] - models[1]).max() > 0.01
    outcome = serve(
        loud,
        tmp_path / "out",
        Memory(shards(tmp_path / "s", loud, [[0, 1, 2, 3, 4]])),
        nodes=1,
        resume=False,
        reporter=Notes(),
    )
    assert json.loads((outcome.finished[0] / "summary.json").read_text())["epsilon"] == make(1.0, 5, 5).epsilon(1)


def test_without_the_package_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'bespokefl\[privacy\]'"):
        federate("fedavg", PrivacySettings(1.0, 1.0))
