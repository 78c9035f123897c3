"""Clients that join a trained federation: every method's own way, against numbers that are worked out beside it."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.algorithms import small
from tests.algorithms.numpy_hypernetwork import write
from tests.test_contract import LAYOUTS, every_algorithm, federate, make_data

from bespokefl.algorithms import ALGORITHMS, Algorithm, build_algorithm
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.algorithms.fedrep import FedRep
from bespokefl.algorithms.local import Local
from bespokefl.core import Batch, InputError, Model, stream
from bespokefl.core.acting import ALWAYS, conditions
from bespokefl.data import FederatedData
from bespokefl.engines.sequential import Sequential
from bespokefl.engines.vectorized import Vectorized
from bespokefl.federation import Federation
from bespokefl.federation.new_clients import Joined, Joining, join

LR, EPOCHS = 0.2, 3


def new_client() -> tuple[small.Array, NDArray[np.int64]]:
    rng = np.random.default_rng(21)
    return rng.normal(size=(7, 2)) - 0.5, np.array([2, 0, 1, 1, 2, 0, 0])


def data_of(xy: tuple[small.Array, NDArray[np.int64]]) -> FederatedData:
    return FederatedData.from_arrays([{"train": xy, "test": xy}], classes=("a", "b", "c"))


def trained(algorithm: Algorithm, rounds: int = 2) -> Federation:
    federation = small.federate(algorithm)
    for _ in range(rounds):
        federation.round()
    return federation


def as_weights(model: Model) -> small.Weights:
    return {k: v.numpy().copy() for k, v in model.items()}


def one(joined: Joined) -> Model:
    return {k: v[0] for k, v in joined.models.items()}


def batches_of_epoch(epoch: int, client: int, n: int, size: int) -> list[NDArray[np.int64]]:
    order = stream(11, "newcomer", epoch, client, 0).permutation(n)
    return [order[k : k + size] for k in range(0, n, size)]


# every method ----------------------------------------------------------------------------------------


def joined_with(name: str, engine: Any, model: str) -> Joined:
    federation = federate(name, engine, model)
    federation.round()
    return join(federation, make_data(), Joining(epochs=2))


@pytest.mark.parametrize("model", ["mlp", pytest.param("batchnorm", marks=pytest.mark.slow)])
@every_algorithm
def test_every_method_lets_clients_join(name: str, model: str) -> None:
    """Finite models that fit the clients' samples no worse than where they started; the same from both engines."""
    slow = joined_with(name, Sequential(), model)
    fast = joined_with(name, LAYOUTS["one stack"](), model)
    assert slow.finite.all() and slow.how and slow.how == fast.how
    for k, v in slow.models.items():
        torch.testing.assert_close(fast.models[k], v, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(fast.train_loss, slow.train_loss, rtol=1e-10)
    np.testing.assert_allclose(fast.accuracy, slow.accuracy, rtol=1e-10)
    weight = make_data().sizes("train")
    before, after = ((slow.train_loss[k] * weight).sum() / weight.sum() for k in (0, -1))
    # a hypernetwork of one round hardly tells clients apart, and their running statistics move all the same
    assert after < before + (1e-4 if name in ("pfedhn", "plgu-ghn") else 0)
    assert slow.accuracy.shape == (3, len(weight))


@every_algorithm
def test_joining_changes_nothing_of_the_run(name: str) -> None:
    federation = federate(name, Sequential())
    federation.round()
    before = {k: v.clone() for k, v in federation.state()[0].items()}
    for start in ("method", "global"):
        join(federation, make_data(), Joining(epochs=1, start=start))  # type: ignore[arg-type]
    after, _ = federation.state()
    assert before.keys() == after.keys() and all(torch.equal(before[k], v) for k, v in after.items())


@every_algorithm
def test_settings_of_new_clients_reach_the_steps(name: str) -> None:
    """With a step size of nearly nothing nobody moves, whatever the method calls it."""
    federation = federate(name, Sequential())
    federation.round()
    still = join(federation, make_data(), Joining(epochs=1, lr=1e-300))
    np.testing.assert_allclose(still.train_loss[1], still.train_loss[0], rtol=1e-12)
    lr, *_, batch_size = still.settings.values()
    assert (lr, batch_size) == (1e-300, 8)


# what stays, and where it starts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "moving"),
    [
        ("fedrep", "head"),
        ("fedper", "head"),
        ("fedalt", "head"),
        ("fedsim", "head"),
        ("plgu-grep", "head"),
        ("lg-fedavg", "body"),
        ("fedbn", "norms"),
        ("splitgp", "side"),
        ("fedrod", "personal"),
        ("fedbabu", "all"),
        ("fedavg", "all"),
        ("ditto", "all"),
        ("pfedhn", "all"),
    ],
)
def test_what_is_the_server_s_stays_bit_for_bit(name: str, moving: str) -> None:
    federation = federate(name, Sequential(), "batchnorm")
    federation.round()
    task = federation.task
    start = join(federation, make_data(), Joining(epochs=0))
    end = join(federation, make_data(), Joining(epochs=2))
    moves = {
        "head": set(task.head),
        "body": set(task.initial) - set(task.head),
        "norms": set(task.norm_names),
        "side": set(task.initial) - set(task.head) | {"kappa.weight", "kappa.bias"},
        "personal": {f"personal.{k}" for k in task.head},
        "all": set(task.initial),
    }[moving]
    moved = {k for k, v in end.models.items() if not torch.equal(v, start.models[k])}
    assert moved == moves


def test_a_new_fedrep_client_has_the_server_s_body_and_the_initial_head() -> None:
    federation = trained(FedRep(lr=LR, momentum=0.0, weight_decay=0.0, batch_size=3))
    model = one(join(federation, data_of(new_client()), Joining(epochs=5)))
    for k in small.BODY:
        assert torch.equal(model[k], federation.server["phi"][k])
    start = one(join(federation, data_of(new_client()), Joining(epochs=0)))
    np.testing.assert_array_equal(start["head.weight"].numpy(), small.start()["head.weight"])


# by hand -----------------------------------------------------------------------------------------------


def plain_sgd(w: small.Weights, client: int, opt_state: str, momentum: float, pull: float = 0.0) -> small.Weights:
    x, y = new_client()
    start, m = dict(w), {}
    for epoch in range(1, EPOCHS + 1):
        m = {} if opt_state == "reset" else m
        for rows in batches_of_epoch(epoch, client, len(y), 3):
            g = small.gradient(w, x[rows], y[rows])
            w, m = small.sgd(w, {k: v + pull * (w[k] - start[k]) for k, v in g.items()}, m, LR, momentum)
    return w


@pytest.mark.parametrize("opt_state", ["reset", "keep"])
@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_a_new_fedavg_client_is_plain_sgd_from_w(opt_state: Any, engine: Any) -> None:
    federation = trained(FedAvg(lr=LR, momentum=0.9, batch_size=3))
    federation.engine = engine("cpu")
    w = federation.global_model()
    assert w is not None
    joined = join(federation, data_of(new_client()), Joining(epochs=EPOCHS, opt_state=opt_state), np.array([5]))
    expected = plain_sgd(as_weights(w), 5, opt_state, 0.9)
    small.assert_models(one(joined), expected)
    logits = small.forward(expected, new_client()[0])[0]
    assert joined.accuracy[-1, 0] == pytest.approx((logits.argmax(1) == new_client()[1]).mean())
    assert joined.train_loss[-1, 0] == pytest.approx(small.loss(expected, *new_client()))
    assert joined.train_loss[0, 0] == pytest.approx(small.loss(as_weights(w), *new_client()))


def test_a_new_ditto_client_is_pulled_to_w() -> None:
    federation = trained(build_algorithm("ditto", {"lr": LR, "batch_size": 3}, {"lam": 0.7}))
    w = federation.global_model()
    assert w is not None
    joined = join(federation, data_of(new_client()), Joining(epochs=EPOCHS))
    small.assert_models(one(joined), plain_sgd(as_weights(w), 2, "reset", 0.0, pull=0.7))


@pytest.mark.parametrize("start", ["method", "global"])
def test_a_new_local_client_starts_at_the_initial_model(start: Any) -> None:
    federation = trained(Local(lr=LR, batch_size=3))
    joined = join(federation, data_of(new_client()), Joining(epochs=EPOCHS, start=start))
    small.assert_models(one(joined), plain_sgd(small.start(), 2, "reset", 0.0))


def test_the_common_model_of_methods_with_private_heads() -> None:
    """PGFed's figure 4: the averaged body under the mean of the heads by samples, divided by their total."""
    federation = trained(FedRep(lr=LR, momentum=0.0, weight_decay=0.0, batch_size=3))
    heads = federation.clients.states.gather(np.arange(2)).v
    mean = {k: (7 * heads[k][0] + 4 * heads[k][1]).numpy() / 11 for k in small.HEAD}
    body = {k: v.numpy() for k, v in federation.server["phi"].items()}
    start = one(join(federation, data_of(new_client()), Joining(epochs=0, start="global")))
    small.assert_models(start, {**body, **mean})
    joined = join(federation, data_of(new_client()), Joining(epochs=EPOCHS, start="global"))
    small.assert_models(one(joined), plain_sgd({**body, **mean}, 2, "reset", 0.0))


@pytest.mark.parametrize("name", ["fedamp", "fedfomo"])
def test_methods_without_a_global_model_start_at_the_mean_of_the_clients_models(name: str) -> None:
    federation = trained(build_algorithm(name, {"lr": LR, "batch_size": 3}))
    models = federation.personal_models()
    start = one(join(federation, data_of(new_client()), Joining(epochs=0)))
    small.assert_models(start, {k: v.numpy().mean(0) for k, v in models.items()})


# the hypernetwork --------------------------------------------------------------------------------------


def test_a_new_embedding_goes_down_the_slope_of_the_loss_and_the_hypernetwork_stays() -> None:
    settings = {"lr": 0.1, "batch_size": None, "momentum": 0.0, "weight_decay": 0.0}
    own = {"embed": 2, "width": 4, "n_hidden": 1, "embed_opt": "plain", "eta_v": 0.3}
    federation = trained(build_algorithm("pfedhn", settings, own))
    server, task, algorithm = federation.server, federation.task, federation.algorithm
    before = {k: v.clone() for k, v in server.phi.items()}
    joiner = algorithm.newcomer(server, task)
    down = type("Down", (), dict(joiner.shared))()
    x, y = new_client()
    batch = Batch(torch.tensor(x), torch.tensor(y), None, torch.tensor(0))
    carry = joiner.begin(task, down, federation.clients.states.initial)
    np.testing.assert_allclose(carry.v.numpy(), server.v.numpy().mean(0), rtol=1e-14)
    phi = {k: v.numpy() for k, v in server.phi.items()}

    def f(v: small.Array) -> float:
        return small.loss(write(phi, v, small.start()), x, y)

    for _ in range(3):
        v, step = carry.v.numpy(), 1e-6
        slope = [(f(v + step * e) - f(v - step * e)) / (2 * step) for e in np.eye(2)]
        carry = joiner.step(task, down, carry, batch)
        np.testing.assert_allclose(carry.v.numpy(), v - 0.3 * np.array(slope), rtol=1e-6, atol=1e-9)
    small.assert_models(joiner.model(task, down, carry), write(phi, carry.v.numpy(), small.start()))
    joined = join(federation, data_of((x, y)), Joining(epochs=3))
    small.assert_models(one(joined), as_weights(joiner.model(task, down, carry)))
    assert all(torch.equal(before[k], v) for k, v in federation.server.phi.items())


def test_a_private_head_beside_the_hypernetwork_is_trained_too() -> None:
    own = {"embed": 2, "width": 4, "n_hidden": 1, "private_head": True}
    federation = trained(build_algorithm("pfedhn", {"lr": 0.1, "batch_size": None}, own))
    joined = join(federation, data_of(new_client()), Joining(epochs=5))
    assert not np.allclose(one(joined)["head.weight"].numpy(), small.start()["head.weight"])
    assert joined.train_loss[-1, 0] < joined.train_loss[0, 0]


# bad input -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    federation = trained(FedAvg(lr=LR))
    x, y = new_client()
    with pytest.raises(InputError, match=r"shape \(3,\); those of this run have \(2,\)"):
        join(federation, data_of((np.c_[x, x[:, 0]], y)), Joining())
    wide = FederatedData.from_arrays([{"train": (x, y + 1), "test": (x, y)}], classes=("a", "b", "c", "d"))
    with pytest.raises(InputError, match="label 3; this run has 3 classes"):
        join(federation, wide, Joining())
    numbers = FederatedData.from_arrays([{"train": (x, x[:, 0]), "test": (x, x[:, 0])}])
    with pytest.raises(InputError, match="targets are numbers; those of this run are class labels"):
        join(federation, numbers, Joining())
    empty = dataclasses.replace(data_of((x, y)), splits=data_of((x, y)).splits | {"train": (np.arange(0),)})
    with pytest.raises(InputError, match="no samples to train on"):
        join(federation, empty, Joining())


@dataclass(frozen=True)
class Silent(Local):
    """A method of somebody's own that has no global model and says nothing of new clients."""

    name: ClassVar[str] = "silent"
    newcomer = Algorithm.newcomer


def test_a_method_that_says_nothing_of_new_clients() -> None:
    with pytest.raises(InputError, match=r"'silent' has no global model .* newcomer\(\)"):
        join(trained(Silent(lr=LR)), data_of(new_client()), Joining())


def test_a_model_that_diverges_scores_nothing() -> None:
    federation = trained(FedAvg(lr=LR, batch_size=3, weight_decay=0.1))
    joined = join(federation, data_of(new_client()), Joining(epochs=3, lr=1e200))
    assert not joined.finite.any() and joined.accuracy[-1, 0] == 0.0 and joined.accuracy[0, 0] > 0


def test_all_methods_are_tested() -> None:
    assert len(ALGORITHMS) == 34


# what changes nothing ----------------------------------------------------------------------------------
MOVES: dict[str, Any] = {"lr": 0.03, "momentum": 0.7, "batch_size": 2, "opt_state": "keep"}


def configurations(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    if not conditions(ALGORITHMS[name].cls).get("momentum", ALWAYS).never:
        found.append({"momentum": 0.5})
    found += [] if build_algorithm(name).only_sgd else [{"optimizer": "adam"}]
    return found + ([{**config, "private_head": True} for config in found] if name in ("pfedhn", "plgu-ghn") else [])


@pytest.mark.parametrize("start", ["method", "global"])
@every_algorithm
def test_what_is_said_of_new_clients_acts_or_is_refused(name: str, start: Any) -> None:
    """Each of their settings is moved: it changes their models, or is declared, and refused, as changing nothing."""
    new = data_of(new_client())
    for config in configurations(name):
        federation = trained(build_algorithm(name, {"batch_size": 3}, config), rounds=1)
        before = one(join(federation, new, Joining(epochs=2, start=start)))
        for key, value in MOVES.items():
            joining = Joining(epochs=2, start=start, **{key: value})
            if key in joining.unused(federation.algorithm):
                with pytest.raises(InputError, match=rf"new_clients.{key} = .*changes nothing: .*Leave it out"):
                    join(federation, new, joining)
                assert joining.without_unused(federation.algorithm) == Joining(epochs=2, start=start)
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(Joining, "unused", lambda *_: {})
                    assert not differs(before, one(join(federation, new, joining))), (key, config)
            else:
                assert differs(before, one(join(federation, new, joining))), (key, config)


def differs(ours: Model, theirs: Model) -> bool:
    return any(not torch.equal(v, theirs[k]) for k, v in ours.items())
