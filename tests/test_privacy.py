"""Client-level differential privacy: clipping, the level of the noise, what it guarantees, and where it is refused."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower.memory import Memory, Notes, experiment, remote, shards
from tests.test_contract import MODELS, make_data

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.core import InputError, Order, Task, Transfer
from bespokefl.core.clients import Ledger
from bespokefl.core.trees import flat
from bespokefl.engines import Sequential, Vectorized
from bespokefl.experiments import resolve
from bespokefl.experiments.running import run_experiment
from bespokefl.federation import Federation
from bespokefl.federation.privacy import Privacy, PrivacySettings
from bespokefl.federation.secret import chosen, normal_numbers
from bespokefl.flower.server.remote_federation import RemoteFederation
from bespokefl.flower.server.serve import serve

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
    trained = flat(plain.clients.states.gather(np.arange(7)).x).numpy()
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


def make(z: float, clients: int, cohort: int, delta: float = 1e-5, *, hidden: bool = False) -> Privacy:
    return Privacy(1.0, z, delta, clients, cohort, {}, None if hidden else 0, hidden)


@pytest.mark.parametrize(("z", "clients", "cohort", "rounds"), [(1.0, 100, 10, 50), (2.0, 1000, 20, 300)])
def test_epsilon_is_that_of_dp_accounting(z: float, clients: int, cohort: int, rounds: int) -> None:
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(cohort / clients, dp_accounting.GaussianDpEvent(z))
    accountant = dp_accounting.rdp.RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    hidden = make(z, clients, cohort, hidden=True)
    assert hidden.epsilon(rounds) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    text = hidden.summary([[0]] * rounds)["privacy_account"]
    assert f"epsilon {hidden.epsilon(rounds):.4g} at delta 1e-05" in text and "Poisson sampling" in text
    assert "an approximation" in text and "adding or removing one client" in text


def test_a_cohort_that_everybody_may_know_is_no_sampling() -> None:
    """z = 1, N = 100, m = 10, T = 100: 10 rounds of a client are composed as they are, whoever else took part."""
    import dp_accounting

    known, hidden = make(1.0, 100, 10), make(1.0, 100, 10, hidden=True)
    accountant = dp_accounting.rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(1.0), 10)
    assert known.epsilon(100, 10) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert known.epsilon(100, 10) > 2 * hidden.epsilon(100, 10) == 2 * hidden.epsilon(100)
    cohorts = [[10 * t % 100 + k for k in range(10)] for t in range(99)] + [[0]]
    told = known.summary(cohorts)
    assert told["epsilon"] == known.epsilon(100, 11)  # client 0 took part in the last round as well
    assert "most did in 11 of 100 rounds" in told["privacy_account"] and "for studies only" in told["privacy_account"]


def test_a_simulation_and_a_schedule_have_no_amplification() -> None:
    """Their cohorts are those of the seed, or of a list: epsilon is that of the rounds in which a client took part."""
    schedule = [[0, 1, 2]] * 3
    drawn = federate("fedavg", PrivacySettings(1.0, 1.0), clients_per_round=3).privacy
    listed = federate("fedavg", PrivacySettings(1.0, 1.0), clients_per_round=3, schedule=schedule).privacy
    everyone = federate("fedavg", PrivacySettings(1.0, 1.0)).privacy
    assert listed is not None and drawn is not None and everyone is not None
    assert listed.epsilon(3) == everyone.epsilon(3) == drawn.epsilon(3) > drawn.epsilon(3, 1)


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
    text = (tmp_path / "a" / "ditto" / "seed-0" / "rounds.jsonl").read_text()
    rounds = [json.loads(line) for line in text.splitlines()]
    most = int(np.bincount([client for line in rounds for client in line["clients"]]).max())
    assert summary["epsilon"] == make(0.8, 5, 2).epsilon(3, most) and summary["delta"] == 1e-5
    assert f"took part most did in {most} of 3 rounds" in summary["privacy_account"]
    alone = experiment([method], privacy={"clip": 1.0})
    with pytest.raises(InputError, match=r"privacy\.clip stands alone; privacy\.noise is needed"):
        resolve.make_privacy(alone)


def test_between_machines(tmp_path: Path) -> None:
    """Each client's own row is clipped, and the noise is the server's secret."""
    method = {"name": "ditto", "weights": "uniform"}
    quiet = experiment([method], privacy={"clip": 0.1, "noise": TINY})
    data = resolve.load_data(quiet, 0)
    here = resolve.make_federation(quiet, resolve.make_resources(quiet, quiet.algorithms[0], data), 0, data)
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


def test_the_cohort_is_a_secret_of_the_server_that_its_checkpoint_repeats(tmp_path: Path) -> None:
    """Not what the seed draws, which every silo is told."""
    method = {"name": "fedavg", "weights": "uniform"}
    it = experiment([method], clients=8, train={"participation": 0.25}, privacy={"clip": 1.0, "noise": 1.0})

    def start(name: str, **federation: str) -> RemoteFederation:
        changed = replace(it, federation=it.federation.model_copy(update=federation))
        return remote(changed, Memory(shards(tmp_path / name, it, [list(range(8))])), tmp_path / name)

    def cohorts(federation: RemoteFederation) -> list[list[int]]:
        return [federation.participation.of(t).tolist() for t in range(40)]

    one, other, seeded = start("a"), start("b"), start("c", cohort="seed")
    data = resolve.load_data(it, 0)
    here = resolve.make_federation(it, resolve.make_resources(it, it.algorithms[0], data), 0, data)
    by_seed = [here.participation.of(t).tolist() for t in range(40)]
    assert (
        cohorts(seeded) == by_seed and by_seed not in (cohorts(one), cohorts(other)) and cohorts(one) != cohorts(other)
    )
    one.round()
    tensors, meta = one.state()
    other.restore(tensors, json.loads(json.dumps(meta)))
    assert cohorts(other) == cohorts(one)
    assert one.privacy is not None and one.privacy.amplified and not seeded.privacy.amplified  # type: ignore[union-attr]
    assert set(map(len, cohorts(one))) == {2} and {c for ids in cohorts(one) for c in ids} == set(range(8))


def test_every_cohort_is_as_likely_as_another() -> None:
    drawn = Counter(tuple(chosen("a key", t, 5, 2).tolist()) for t in range(4000))
    assert len(drawn) == 10 and max(abs(n - 400) for n in drawn.values()) < 5 * math.sqrt(400)


def test_noise_of_a_federation_is_not_from_a_generator_that_can_be_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("numpy's generator is not for secrets")

    federation = federate("fedavg", PrivacySettings(1.0, 1.0))
    privacy = replace(federation.privacy, seed=None)  # type: ignore[type-var]
    w = federation.server["w"]
    order = Order(federation.algorithm.train, np.arange(2), {"w": w}, {}, 0)  # type: ignore[attr-defined]
    uploads = {"x": {k: torch.stack([v, v]) for k, v in w.items()}}
    monkeypatch.setattr(np.random, "default_rng", refused)
    monkeypatch.setattr(np.random, "Generator", refused)
    transfers = (Transfer(order, {}, Ledger()) for _ in range(2))
    first, second = (privacy.accepted(one, uploads, np.arange(2))["x"] for one in transfers)  # type: ignore[union-attr]
    assert all(not torch.equal(first[k], second[k]) for k in w)


def test_secret_noise_is_standard_normal() -> None:
    from scipy.stats import kstest

    drawn = normal_numbers((3, 100_001))
    assert drawn.shape == (3, 100_001) and kstest(drawn.ravel(), "norm").pvalue > 1e-6
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.02 and not np.isin(drawn[0], drawn[1]).any()
    assert normal_numbers((0,)).shape == (0,) and normal_numbers(()).shape == ()


def test_without_the_package_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'bespokefl\[privacy\]'"):
        federate("fedavg", PrivacySettings(1.0, 1.0))
