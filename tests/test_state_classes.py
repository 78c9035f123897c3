"""Classes of a state by their full names: two of one name in a state come back as themselves, or are refused."""

import json
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bespokefl.algorithms import fedavg
from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import Cohort, InputError, Model, RunError, Setup, Task, Tree
from bespokefl.core.tree_io import pack, unpack
from bespokefl.data import FederatedData
from bespokefl.federation import Federation


class Kept(NamedTuple):
    """What the server keeps here; FedAvg's clients keep a ``Kept`` of another kind, of as many fields."""

    count: Tensor
    before: Model
    last: Tensor


@dataclass(frozen=True)
class Counting(FedAvg):
    """FedAvg whose server counts, and keeps the model before."""

    class Note(NamedTuple):
        """Kept inside the class: its full name tells it from others."""

        text: str

    def init(self, task: Task, x0: Model, setup: Setup) -> Tree:
        return {"w": x0, "kept": Kept(torch.zeros(()), x0, torch.ones(())), "note": self.Note("at first")}

    def round(self, server: Tree, cohort: Cohort) -> Tree:
        w, kept = super().round(server, cohort)["w"], server["kept"]
        return {"w": w, "kept": Kept(kept.count + 1, server["w"], kept.last), "note": self.Note("later")}


def make(algorithm: FedAvg) -> Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    clients = [{"train": (x[k : k + 15], y[k : k + 15]), "test": (x[k : k + 15], y[k : k + 15])} for k in (0, 20, 40)]
    torch.manual_seed(0)
    return Federation(nn.Linear(3, 2), FederatedData.from_arrays(clients), algorithm)


def stored(federation: Federation) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, meta = federation.state()
    return {k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(meta))


def test_two_classes_of_one_name_in_one_state_come_back_as_themselves() -> None:
    ours, again = (make(Counting(lr=0.1, local_epochs=1, batch_size=5)) for _ in range(2))
    ours.run(2)
    again.restore(*stored(ours))
    assert type(again.server["kept"]) is Kept and type(again.server["note"]) is Counting.Note
    assert type(again.clients.states.rows()) is fedavg.Kept
    ours.run(2)
    again.run(2)
    assert again.server["kept"].count == 4
    for name, value in ours.state()[0].items():
        assert torch.equal(again.state()[0][name], value), name


def with_bare_names(meta: Any) -> Any:
    """As checkpoints had them before."""
    if isinstance(meta, dict):
        named = {"named": meta["named"].rpartition(":")[2].rpartition(".")[2]} if "named" in meta else {}
        return {k: with_bare_names(v) for k, v in meta.items()} | named
    return [with_bare_names(v) for v in meta] if isinstance(meta, list) else meta


def test_an_old_checkpoint_is_read_where_its_names_say_enough() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "batch_size": 5}
    ours, again = make(FedAvg(**settings)), make(FedAvg(**settings))
    ours.run(1)
    tensors, meta = stored(ours)
    again.restore(tensors, with_bare_names(meta))
    assert type(again.clients.states.rows()) is fedavg.Kept
    ours, again = make(Counting(**settings)), make(Counting(**settings))
    ours.run(1)
    tensors, meta = stored(ours)
    with pytest.raises(RunError, match=r"'Kept'.*bespokefl\.algorithms\.fedavg:Kept.*test_state_classes:Kept"):
        again.restore(tensors, with_bare_names(meta))


def test_a_checkpoint_is_read_after_a_file_of_ours_has_moved() -> None:
    ours, again = (make(FedAvg(lr=0.1, local_epochs=1, batch_size=5)) for _ in range(2))
    ours.run(1)
    tensors, meta = stored(ours)
    moved = json.loads(json.dumps(meta).replace("bespokefl.algorithms.fedavg:", "bespokefl.elsewhere.long_ago:"))
    assert moved != meta
    again.restore(tensors, moved)
    assert type(again.clients.states.rows()) is fedavg.Kept


def test_a_class_that_is_not_there_or_has_changed_is_named() -> None:
    structure, tensors = pack({"a": Kept(torch.zeros(1), {}, torch.ones(1))}, "server")
    name = f"{__name__}:Kept"
    with pytest.raises(RunError, match=f"{name}.*moved or renamed"):
        unpack(structure, tensors, {})
    fewer = namedtuple("Kept", "count")
    with pytest.raises(RunError, match=f"{name}.*3 values.*count"):
        unpack(structure, tensors, {name: fewer})


def test_two_classes_with_one_full_name_are_refused_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fields in (("First", "a b"), ("Second", "b a")):
        monkeypatch.setattr(fedavg, name, namedtuple("Twin", fields), raising=False)
    with pytest.raises(InputError, match=r"two classes.*Twin"):
        make(FedAvg(lr=0.1))
