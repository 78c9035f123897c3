"""Callbacks: when they are called, what of them survives a kill, and how they end a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.data import FederatedData
from bespokefl.errors import Diverged
from bespokefl.experiments.callbacks.checkpoints import Checkpoints
from bespokefl.federation import Callback, Federation, Rounds


def make(lr: float = 0.1) -> Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 3)), np.arange(80) % 2
    clients = [{"train": (x[k : k + 15], y[k : k + 15]), "test": (x[k : k + 15], y[k : k + 15])} for k in (0, 20, 40)]
    torch.manual_seed(0)
    return Federation(
        nn.Linear(3, 2), FederatedData.from_arrays(clients), FedAvg(lr=lr, local_epochs=1), engine="sequential"
    )


class Noting(Callback):
    """Writes down what it meets, and adds up the rounds' losses."""

    def __init__(self, dies_in: int = 0) -> None:
        self.met: list[Any] = []
        self.total, self.sum, self._dies_in = 0, torch.zeros(()), dies_in

    def on_start(self, run: Rounds) -> None:
        self.met.append(("start", run.done, run.until))

    def on_evaluation(self, run: Rounds) -> None:
        assert set(run.scores) == {"test"} and run.federation.rounds_done == run.newest.round
        self.met.append(("scores", run.newest.round))

    def on_round(self, run: Rounds) -> None:
        if run.newest.round == self._dies_in:
            raise ArithmeticError("killed on purpose")
        self.met.append(("round", run.newest.round, bool(run.scores)))
        self.total += run.newest.round
        self.sum = self.sum + run.federation.global_model()["weight"].sum()  # type: ignore[index]

    def on_end(self, run: Rounds) -> None:
        self.met.append(("end", run.newest.round))

    def close(self) -> None:
        self.met.append("closed")

    def state(self) -> dict[str, Any]:
        return {"total": self.total, "sum": self.sum}

    def restore(self, state: dict[str, Any]) -> None:
        self.total, self.sum = state["total"], state["sum"]


def test_callbacks_meet_every_round_in_order() -> None:
    noting = Noting()
    history = make().run(3, evaluate_every=2, callbacks=[noting])
    rounds = [("round", 1, False), ("scores", 2), ("round", 2, True), ("scores", 3), ("round", 3, True)]
    assert noting.met == [("start", 0, 3), *rounds, ("end", 3), "closed"]
    assert list(history.evaluations) == [2, 3] and len(history.rounds) == 3


def test_a_second_call_goes_on_and_evaluates_from_its_own_beginning() -> None:
    federation, noting = make(), Noting()
    federation.run(1)
    federation.run(2, evaluate_every=2, callbacks=[noting])
    assert noting.met[:3] == [("start", 1, 3), ("round", 2, False), ("scores", 3)]


@pytest.mark.parametrize("dies_in", [1, 2, 3, 4])
def test_state_survives_a_kill(dies_in: int, tmp_path: Path) -> None:
    whole, one = make(), Noting()
    whole.run(5, callbacks=[one])

    def save() -> Checkpoints:
        return Checkpoints(tmp_path / "checkpoints", every=1)

    with pytest.raises(ArithmeticError):
        make().run(5, callbacks=[first := Noting(dies_in), save()])
    assert first.met[-1] == "closed"
    again, other = make(), Noting()
    again.go(5, [other, save()], lambda r: True)
    assert other.met[0] == ("start", dies_in - 1, 5)
    assert other.total == one.total == 15 and torch.equal(other.sum, one.sum)
    for name, value in whole.state()[0].items():
        assert torch.equal(again.state()[0][name], value), name


class Early(Callback):
    """Ends the run after a round, as finished."""

    def on_evaluation(self, run: Rounds) -> None:
        if run.newest.round == 2:
            run.until = 2


def test_a_callback_ends_the_run_as_finished() -> None:
    federation, noting = make(), Noting()
    history = federation.run(9, callbacks=[Early(), noting])
    assert federation.rounds_done == 2 and len(history.rounds) == 2 and ("end", 2) in noting.met


class Lost(Callback):
    def on_evaluation(self, run: Rounds) -> None:
        if run.newest.round == 3:
            raise Diverged("lost on purpose")


def test_an_early_end_is_told_to_all_and_keeps_the_whole_rounds(tmp_path: Path) -> None:
    noting = Noting()
    with pytest.raises(Diverged, match="lost on purpose"):
        make().run(9, callbacks=[Lost(), noting, Checkpoints(tmp_path, every=2)])
    assert noting.met[-2:] == [("end", 3), "closed"] and noting.total == 3
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["round-000002.json"]
