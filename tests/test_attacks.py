"""Attacks: what of every method's uploads is replaced and what stays honest, who attacks, and who is scored."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from tests.test_contract import CLASSES, assert_close, assert_same, federate, make_data, snapshot

from bespokefl.algorithms import ALGORITHMS
from bespokefl.core import Cohort, InputError, OneModel, Phase, Program, RunError, Task, Training
from bespokefl.core.trees import leaves, tree_map
from bespokefl.data import FederatedData
from bespokefl.engines import Sequential, Vectorized
from bespokefl.federation import Federation
from bespokefl.federation.attacks import Attack, flip_labels

MALICIOUS = 1
COHORT = [0, 1, 3]

# By hand, from the methods' papers: the uploads that are models, with the download that each is trained from, and those
# that are updates. All others are losses, counts, weights, statistics of classes or of normalisation.
MODELS: dict[str, dict[str, str]] = {
    **{name: {"x": "w"} for name in ("fedavg", "fedprox", "fedsam", "feddyn", "fedmgda+", "fedfv", "fedhkd", "ditto")},
    "fedavg-steps": {"x": "w"},
    **{name: {"w": "w"} for name in ("apfl", "per-fedavg", "pfedme")},
    **{name: {"phi": "phi"} for name in ("fedper", "fedrep", "fedalt", "fedsim", "fedbabu", "fedbn", "lg-fedavg")},
    "plgu-grep": {"phi": "phi"},
    "fedrod": {"w": "w", "nu": "nu"},
    "splitgp": {"x": "w"},
    "fedamp": {"w": "u"},
    "fedfomo": {"theta": "what the server has of the client"},
    "l2sgd": {"x": "what the server has of all"},
    "pgfed": {"theta": "w"},
    "pgfedmo": {"theta": "w"},
}
UPDATES: dict[str, list[str]] = {
    "plgu-lf": ["delta"],
    "lg-mix": ["dw"],
    "pfedhn": ["delta"],
    "plgu-ghn": ["delta"],
    "fedpg": ["g"],
    "s-fedpg": ["g"],
    "pgfed": ["grad"],
    "pgfedmo": ["grad"],
}


class Exchange(NamedTuple):
    ids: list[int]
    down: dict[str, Any]  # shared and per client
    shared: set[str]
    up: dict[str, Any]
    states: Any  # of those asked, afterwards


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """What goes between server and clients, in order."""
    seen: list[Exchange] = []
    run = Cohort.run

    def recorded(self: Cohort, program: Program, shared: Any = None, per_client: Any = None, **options: Any) -> Any:
        up = run(self, program, shared, per_client, **options)
        down = {**(shared or {}), **(per_client or {})}
        states = tree_map(torch.clone, self.clients.states.gather(up.ids))
        seen.append(Exchange(up.ids.tolist(), down, set(shared or {}), up._values, states))
        return up

    monkeypatch.setattr(Cohort, "run", recorded)
    return seen


def first_exchange(name: str, seen: list[Exchange], kind: str = "none", **options: Any) -> Exchange:
    """With the malicious client in it; the others that a round may have are not looked at."""
    seen.clear()
    attack = Attack(kind, clients=[MALICIOUS], **options)  # type: ignore[arg-type]
    federation = federate(name, Sequential(), "batchnorm", schedule=[COHORT], attack=attack)
    federation.round()
    return next(exchange for exchange in seen if MALICIOUS in exchange.ids)


def test_every_method_is_in_the_lists() -> None:
    assert {*MODELS, *UPDATES, "local"} == set(ALGORITHMS)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_what_is_replaced_and_what_is_not(name: str, exchanges: list[Exchange]) -> None:
    honest = first_exchange(name, exchanges)
    buffers = {k for k in federate(name, Sequential(), "batchnorm").task.buffer_names}
    assert buffers
    for kind, factor in (("scale", 7.0), ("signs", -1.0), ("noise", None)):
        attacked = first_exchange(name, exchanges, kind, factor=7.0, sigma=3.0)
        row = honest.ids.index(MALICIOUS)
        others = [k for k in range(len(honest.ids)) if k != row]
        drawn: list[np.ndarray] = []
        assert attacked.up.keys() == honest.up.keys()
        for upload, tree in honest.up.items():
            model, update = MODELS.get(name, {}).get(upload), upload in UPDATES.get(name, [])
            for old, new, path in zip(leaves(tree), leaves(attacked.up[upload]), names(tree), strict=True):
                assert torch.equal(old[others], new[others]), f"{upload}.{path}: an honest client"
                if path in buffers or (model is None and not update):
                    assert torch.equal(old[row], new[row]), f"{upload}.{path} is not the attack's matter"
                elif factor is None:
                    drawn.append(new[row].numpy().ravel())
                else:
                    w = torch.zeros_like(old[row]) if update else start_of(name, model, path, honest, row)
                    torch.testing.assert_close(new[row], w + factor * (old[row] - w), rtol=1e-12, atol=1e-12)
        # What a client keeps is what honest training gave.
        for a, b in zip(leaves(attacked.states), leaves(honest.states), strict=True):
            assert torch.equal(a, b)
        if factor is None and name != "local":
            values = np.concatenate(drawn)
            assert len(values) > 50 and 2.2 < values.std() < 3.8 and abs(values.mean()) < 1.2
            assert len(np.unique(values)) == len(values)


def names(tree: Any) -> list[str]:
    return list(tree) if isinstance(tree, Mapping) else [""] * len(leaves(tree))


def start_of(name: str, download: str | None, path: str, exchange: Exchange, row: int) -> torch.Tensor:
    if download in exchange.down:
        sent: torch.Tensor = exchange.down[download][path]
        return sent if download in exchange.shared else sent[row]
    initial: torch.Tensor = federate(name, Sequential(), "batchnorm").task.initial[path]
    return initial  # in the first round all that the server has is the initial model


@pytest.mark.parametrize(("name", "reference"), [("fedfomo", "models"), ("l2sgd", "x_bar")])
def test_models_without_a_download_are_measured_from_what_the_server_has(
    name: str, reference: str, exchanges: list[Exchange]
) -> None:
    federation = federate(name, Sequential(), schedule=[range(3), COHORT], attack=Attack("signs", clients=[MALICIOUS]))
    federation.round()
    server, before = federation.server, len(exchanges)
    known = server[reference] if isinstance(server, dict) else getattr(server, reference)
    federation.round()
    exchange = exchanges[before]
    row = exchange.ids.index(MALICIOUS)
    kept = federation.clients.states.gather(np.array([MALICIOUS])) if name == "fedfomo" else tree_row(exchange, row)
    for k, v in exchange.up["theta" if name == "fedfomo" else "x"].items():
        w = known[k][MALICIOUS] if name == "fedfomo" else known[k]
        trained = kept.x[k][0] if name == "fedfomo" else kept.x[k]
        torch.testing.assert_close(v[row], 2 * w - trained, rtol=1e-12, atol=1e-12)


def tree_row(exchange: Exchange, row: int) -> Any:
    return tree_map(lambda v: v[row], exchange.states)


def test_further_exchanges_of_a_round_stay_honest_where_they_are_scalars(exchanges: list[Exchange]) -> None:
    federation = federate("s-fedpg", Sequential(), schedule=[range(7)], attack=Attack("noise", clients=[MALICIOUS]))
    federation.round()
    gradients, *rest = exchanges
    assert {"g", "loss"} <= set(gradients.up)
    trials = [exchange for exchange in rest if exchange.up]
    assert trials and all(set(exchange.up) == {"loss"} for exchange in trials)
    state = federation.clients.states.gather(np.array([MALICIOUS]))
    task, w, d = federation.task, tree_map(lambda v: v[0], state.w), tree_map(lambda v: v[0], state.d)
    own = torch.as_tensor(federation.data.splits["train"][MALICIOUS])
    e = trials[0].down["e"]
    x = {k: v + e * d.get(k, 0.0) for k, v in w.items()}
    batch_loss = torch.nn.functional.cross_entropy(outputs(task, x, federation.data.x[own]), federation.data.y[own])
    told = trials[0].up["loss"][trials[0].ids.index(MALICIOUS)]
    torch.testing.assert_close(told, batch_loss, rtol=1e-10, atol=1e-10)


def outputs(task: Task, x: Any, inputs: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(inputs.flatten(1) @ x["body.1.weight"].T + x["body.1.bias"])
    return hidden @ x["head.weight"].T + x["head.bias"]


def test_noise_differs_between_clients_rounds_exchanges_and_seeds(exchanges: list[Exchange]) -> None:
    def noise(seed: int) -> dict[tuple[int, int, int], torch.Tensor]:
        exchanges.clear()
        attack = Attack("noise", clients=[1, 3])
        hyper = {"form": "coin", "p": 0.5, "flips": 12}
        federation = federate("l2sgd", Sequential(), hyper=hyper, schedule=[COHORT, COHORT], attack=attack, seed=seed)
        federation.round()
        half = len(exchanges)
        federation.round()
        found = {}
        for k, exchange in enumerate(exchanges):
            for client in (1, 3):
                if "x" in exchange.up:
                    found[int(k >= half), k, client] = exchange.up["x"]["head.weight"][exchange.ids.index(client)]
        return found

    drawn, other = noise(0), noise(1)
    assert len({key[0] for key in drawn}) == 2 and len(drawn) > 4
    values = [v.flatten()[0].item() for v in (*drawn.values(), *other.values())]
    assert len(set(values)) == len(values)


# who --------------------------------------------------------------------------------------------------


def test_the_malicious_are_drawn_once_per_seed() -> None:
    ids = Attack("noise", share=0.1).malicious(100, 0)
    assert len(set(ids.tolist())) == 10 and (np.diff(ids) > 0).all()
    np.testing.assert_array_equal(ids, Attack("scale", share=0.1).malicious(100, 0))
    assert ids.tolist() != Attack("noise", share=0.1).malicious(100, 1).tolist()
    counts = [len(Attack("noise", share=s).malicious(n, 0)) for s, n in ((0.1, 25), (0.1, 3), (0.3, 10), (0.5, 7))]
    assert counts == [2, 1, 3, 4]  # rounded, half to even, at least one
    assert not len(Attack().malicious(100, 0))
    assert Attack("noise", clients=[4, 2]).malicious(7, 3).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "nois"}, "attack.kind = 'nois'.*noise"),
        ({"kind": "noise", "share": 1.0}, "attack.share = 1.0.*below 1"),
        ({"kind": "noise", "sigma": 0.0}, "attack.sigma = 0.0.*above 0"),
        ({"kind": "scale", "factor": float("inf")}, "attack.factor = inf.*finite"),
        ({"kind": "noise", "clients": [7]}, r"attack.clients = \[7\].*0 to 6"),
        ({"kind": "noise", "clients": []}, r"attack.clients = \[\].*0 to 6"),
        ({"kind": "noise", "clients": range(7)}, "attack.clients: all 7 clients would be malicious"),
    ],
)
def test_bad_attacks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate("fedavg", Sequential(), attack=Attack(**options))


# runs -------------------------------------------------------------------------------------------------

METHODS = ["fedavg", "fedrep", "pfedhn", "pgfed", "s-fedpg"]


@pytest.mark.parametrize("name", [METHODS[0], *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS[1:])])
@pytest.mark.parametrize("kind", ["noise", "labels"])
def test_engines_and_chunks_agree(name: str, kind: Any) -> None:
    attack, schedule = Attack(kind, share=0.3, sigma=0.1), [[0, 2, 3, 4, 5], range(7)]
    reference, federation = (
        federate(name, engine, schedule=schedule, attack=attack)
        for engine in (Sequential(), Vectorized("cpu", lanes=2, stack=3))
    )
    for run in (reference, federation):
        run.round()
        run.round()
    assert_close(snapshot(federation), snapshot(reference), 1e-9, nan_alike=True)


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_attack_is_bit_equal(name: str) -> None:
    def fresh() -> Federation:
        return federate(name, Sequential(), attack=Attack("noise", share=0.3, sigma=0.1))

    straight = fresh()
    straight.round()
    tensors, meta = straight.state()
    tensors = {k: v.clone() for k, v in tensors.items()}
    straight.round()
    resumed = fresh()
    resumed.restore(tensors, meta)
    resumed.round()
    assert_same(resumed.state()[0], straight.state()[0])


def test_an_upload_that_is_not_finite_is_left_out_as_ever() -> None:
    attack = Attack("scale", clients=[MALICIOUS], factor=1e308)
    federation = federate("fedavg", Sequential(), attack=attack, hyper={"lr": 100.0, "momentum": 0.0})
    record = federation.round(COHORT)
    assert list(record.failed) == [MALICIOUS] and "not finite" in record.failed[MALICIOUS]
    silent = federate("fedavg", Sequential(), hyper={"lr": 100.0, "momentum": 0.0})
    silent.round(COHORT, silent=[MALICIOUS])
    assert_same(federation.state()[0], silent.state()[0])


class Undeclared(OneModel):
    """Uploads a model and does not say so."""

    def round(self, server: Any, cohort: Cohort) -> Any:
        up = cohort.run(Program(self.begin, (Phase(self.step, self.epochs),), self.finish), shared=server)
        return {"w": {k: v.mean(0) for k, v in up.y.items()}}

    def begin(self, task: Task, down: Any, kept: Any) -> Training:
        return Training(down.w, self.opt.init(task.params(down.w)))

    def step(self, task: Task, down: Any, c: Training, batch: Any) -> Training:
        return self.descend(c, task.grad(c.x, batch))

    def finish(self, task: Task, down: Any, c: Training) -> Any:
        return {"y": c.x}, {}


class FromNowhere(Undeclared):
    sends: ClassVar = {"y": "u"}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Undeclared, "uploads parameters under 'y' and does not say"),
        (FromNowhere, "started from 'u', which is neither"),
    ],
)
def test_an_algorithm_of_ones_own_has_to_say_what_it_sends(method: Any, message: str) -> None:
    task = Task(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, CLASSES)), dtype=torch.float64)
    Federation(task, make_data(), method(), engine="sequential").round(COHORT)
    federation = Federation(task, make_data(), method(), engine="sequential", attack=Attack("scale", clients=[1]))
    with pytest.raises((InputError, RunError), match=message):
        federation.round(COHORT)


# labels -----------------------------------------------------------------------------------------------


def test_flipped_labels_are_the_train_labels_of_the_malicious_only() -> None:
    data = make_data()
    flipped = flip_labels(data, np.array([1, 4]))
    for split in ("train", "test", "val"):
        for c in range(data.clients):
            old, new = data.y[data.splits[split][c]], flipped.y[flipped.splits[split][c]]
            assert torch.equal(new, CLASSES - 1 - old if split == "train" and c in (1, 4) else old)
    assert flipped.x is data.x and torch.equal(data.y, make_data().y)


def test_a_row_that_others_use_keeps_its_label_for_them() -> None:
    data = make_data()
    shared = data.splits["train"][1][:3]
    splits = {k: list(v) for k, v in data.splits.items()}
    splits["train"][0] = np.concatenate([splits["train"][0], shared])
    splits["test"][2] = np.concatenate([splits["test"][2], shared[:1]])
    mixed = FederatedData(
        data.x, data.y, {k: tuple(v) for k, v in splits.items()}, data.classes, data.client_names, data.record
    )
    flipped = flip_labels(mixed, np.array([1]))
    for split, c, sign in (("train", 0, 1), ("test", 2, 1), ("train", 1, -1)):
        old, new = mixed.splits[split][c], flipped.splits[split][c]
        assert torch.equal(flipped.x[new], mixed.x[old])
        wanted = mixed.y[old] if sign > 0 else CLASSES - 1 - mixed.y[old]
        assert torch.equal(flipped.y[new], wanted)


def test_labels_of_a_regression_cannot_be_flipped() -> None:
    data = FederatedData.from_arrays([(np.zeros((8, 2)), np.zeros(8)) for _ in range(3)])
    with pytest.raises(InputError, match=r"attack.kind = 'labels'.*regression"):
        flip_labels(data, np.array([0]))


# scores -----------------------------------------------------------------------------------------------


def test_malicious_clients_are_not_scored_unless_asked_for() -> None:
    attacked = federate("ditto", Sequential(), attack=Attack("noise", clients=[1, 4]))
    history = attacked.run(rounds=1)
    found = history.evaluations[1]
    assert found.clients.tolist() == list(range(7))
    assert np.flatnonzero(np.isnan(found.accuracy)).tolist() == [1, 4] == np.flatnonzero(found.n == 0).tolist()
    assert np.isfinite(attacked.evaluate(clients=[1, 4]).accuracy).all()
    assert history.summary()["mean"] == pytest.approx(attacked.evaluate(clients=[0, 2, 3, 5, 6]).accuracy.mean())
    assert np.flatnonzero(np.isnan(attacked.evaluate(model="global").accuracy)).tolist() == [1, 4]
