"""A silo: its own data, what stays in its folder, and what it refuses to do for a server."""

import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.flower.memory import SMALL, Memory, Notes, experiment, from_bytes, remote, shards, to_bytes
from tests.flower.test_contract import assert_alike, simulated

from bespokefl.core import InputError
from bespokefl.flower.server.serve import serve
from bespokefl.flower.silo.silo import Silo, open_silo
from bespokefl.flower.transport.codec import packed
from bespokefl.flower.transport.envelope import Envelope, Handler
from bespokefl.results import files

HOSTED = [[0, 3], [4], [1, 2]]


def own_silo(folder: Path, k: int, labels: list[int]) -> tuple[Path, Path]:
    """A file of 30 samples of some classes."""
    rng = np.random.default_rng(k)
    y = np.resize(np.array(labels), 30)
    x = (rng.normal(size=(30, 6)) + y[:, None]).astype(np.float32)
    np.savez(folder / f"hospital-{k}.npz", x=x, y=y)
    return folder / f"silo-{k}", folder / f"hospital-{k}.npz"


def test_silos_with_data_of_their_own(tmp_path: Path) -> None:
    made = [own_silo(tmp_path, k, labels) for k, labels in enumerate(([0, 1], [1, 2], [0, 2, 3]))]
    transport = Memory(
        {10 * k: open_silo(home, data=data, device="cpu", limits=SMALL) for k, (home, data) in enumerate(made)}
    )
    it = experiment(["ditto", "fedbn"], rounds=3, data={"test": 0.2}, train={"lr": 0.1})
    notes = Notes()
    outcome = serve(it, tmp_path / "out", transport, nodes=3, resume=False, reporter=notes)
    assert len(outcome.finished) == 2 and outcome.failed == []
    table = files.read_csv(outcome.finished[0] / "clients.csv", texts=("name",))
    assert table["name"].tolist() == ["hospital-0", "hospital-1", "hospital-2"]
    assert table["n_train"].tolist() == [21, 21, 21] and table["n_test"].tolist() == [6, 6, 6]  # 10 % validate
    assert np.nanmean(table["accuracy"]) > 0.6
    everything = "".join(
        p.read_text() for p in (tmp_path / "out").rglob("*.*") if p.suffix in (".json", ".jsonl", ".csv")
    )
    assert str(made[0][1]) not in everything
    for k, (home, _) in enumerate(made):
        (model,) = home.glob(f"runs/ditto-seed-0-*/personal/client-{k}.safetensors")
        about = json.loads((model.parents[1] / "run.json").read_text())
        assert about["classes"] == ["0", "1", "2", "3"] and about["reading"]["normalize"] == "unit"
        assert list(json.loads((home / "silo.json").read_text())["federations"].values()) == [k]


def test_ids_stay_with_their_silo_whatever_the_order(tmp_path: Path) -> None:
    made = [own_silo(tmp_path, k, [0, 1]) for k in range(3)]
    it = experiment("fedavg", rounds=1)
    first = Memory({k: open_silo(home, data=data, device="cpu", limits=SMALL) for k, (home, data) in enumerate(made)})
    serve(it, tmp_path / "out", first, nodes=3, resume=False, reporter=Notes())
    turned = Memory(
        {50 - k: open_silo(home, data=data, device="cpu", limits=SMALL) for k, (home, data) in enumerate(made)}
    )
    it = experiment(["fedavg", "local"], rounds=1)
    outcome = serve(it, tmp_path / "out", turned, nodes=3, resume=True, reporter=Notes())
    names = files.read_csv(outcome.finished[1] / "clients.csv", texts=("name",))["name"]
    assert names.tolist() == ["hospital-0", "hospital-1", "hospital-2"]


def test_a_folder_of_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    silos = {}
    for k in range(2):
        for name in ("cat", "dog"):
            folder = tmp_path / f"images-{k}" / name
            folder.mkdir(parents=True)
            for i in range(8):
                grey = rng.integers(0, 255, (12, 10), dtype=np.uint8)
                Image.fromarray(grey).save(folder / f"{i}.png")
        silos[k] = open_silo(tmp_path / f"silo-{k}", data=tmp_path / f"images-{k}", device="cpu", limits=SMALL)
    it = experiment("fedavg", rounds=1, data={"source": "images", "size": 8, "mode": "L"})
    outcome = serve(it, tmp_path / "out", Memory(silos), nodes=2, resume=False, reporter=Notes())
    assert len(outcome.finished) == 1
    about = json.loads(next((tmp_path / "silo-0").glob("runs/*/run.json")).read_text())
    assert about["input_shape"] == [1, 8, 8] and about["reading"]["image"] == {"size": 8, "mode": "L"}


def test_data_that_cannot_be_read_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"should be a \.npz file"):
        open_silo(tmp_path / "silo", data=tmp_path / "nothing.csv")
    with pytest.raises(InputError, match="an experiment and clients"):
        open_silo(tmp_path / "silo")


# restarts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["pgfedmo", "lg-mix"])
def test_silos_that_restart_in_between_change_nothing(name: str, tmp_path: Path) -> None:
    it = experiment(name)
    here, transport = simulated(it), Memory(shards(tmp_path, it, HOSTED))
    there = remote(it, transport, tmp_path)
    for _ in range(3):
        here.round()
        there.round()
        transport.handlers = shards(tmp_path, it, HOSTED)  # new processes on the same folders
    assert_alike(here, there, 1e-9)


def a_request(tmp_path: Path, name: str = "ditto") -> tuple[Silo, Envelope]:
    """A silo with an open run, and the request of its first exchange."""
    it = experiment(name)
    seen: list[Envelope] = []
    transport = Memory(shards(tmp_path, it, [[0, 1, 2, 3, 4]]), before=lambda node, request: seen.append(request))
    federation = remote(it, transport, tmp_path)
    federation.round()
    federation.round()
    silo = transport.handlers[100]
    assert isinstance(silo, Silo)
    return silo, [request for request in seen if request.header["kind"] == "run"][-1]


class CountingEngine:
    def __init__(self, engine: Any) -> None:
        self.engine, self.runs = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run(self, job: Any) -> Any:
        self.runs += 1
        return self.engine.run(job)


def counted(silo: Silo) -> CountingEngine:
    (shop,) = silo._open.values()
    shop.engine = CountingEngine(shop.engine)  # type: ignore[assignment]
    return shop.engine  # type: ignore[return-value]


def assert_equal(a: Envelope, b: Envelope) -> None:
    assert a.header == b.header and a.arrays.keys() == b.arrays.keys()
    for name in a.arrays:
        np.testing.assert_array_equal(a.arrays[name], b.arrays[name])


def test_a_repeated_request_has_the_same_answer_without_training(tmp_path: Path) -> None:
    silo, request = a_request(tmp_path)
    engine = counted(silo)
    first = silo.handle(request)
    assert "error" not in first.header and engine.runs == 0
    again = shards(tmp_path, experiment("ditto"), [[0, 1, 2, 3, 4]])[100]  # also after a restart
    assert_equal(again.handle(request), first)
    other = Envelope({**request.header, "round": 7}, request.arrays)
    assert silo.handle(other).header["version"] != first.header["version"] and engine.runs == 1


def folder_of(silo: Silo) -> Path:
    (shop,) = silo._open.values()
    return shop.folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_silo_killed_while_it_writes_loses_nothing(nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silo, request = a_request(tmp_path)
    later = Envelope(
        {**request.header, "round": 2, "versions": [silo.handle(request).header["version"]] * 5}, request.arrays
    )
    before = snapshot(folder_of(silo))

    class Killed(BaseException):
        pass

    calls = 0
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        silo.handle(later)
    monkeypatch.undo()
    fresh = shards(tmp_path, experiment("ditto"), [[0, 1, 2, 3, 4]])[100]
    assert isinstance(fresh, Silo)
    repeated = fresh.handle(request)  # opens the folder again: what was there is there, leftovers are gone
    assert "error" not in repeated.header and snapshot(folder_of(fresh)) == before
    answer = fresh.handle(later)
    assert answer.header["clients"] == [0, 1, 2, 3, 4]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write larger ones, as it does on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more_is_said_and_nothing_is_half_written(tmp_path: Path) -> None:
    silo, request = a_request(tmp_path)
    version = silo.handle(request).header["version"]
    later = Envelope({**request.header, "round": 2, "versions": [version] * 5}, request.arrays)
    before = snapshot(folder_of(silo))
    with files_of_at_most(1000):
        answer = silo.handle(later)
    assert "could not keep its state" in answer.header["error"] and "File too large" in answer.header["error"]
    assert snapshot(folder_of(silo)) == before
    assert silo.handle(later).header["clients"] == [0, 1, 2, 3, 4]  # once there is room again


# what a silo refuses -------------------------------------------------------------------------------------------------
def opening(tmp_path: Path) -> tuple[Handler, Envelope]:
    it = experiment("fedavg")
    seen: list[Envelope] = []
    transport = Memory(shards(tmp_path, it, [[0, 1, 2, 3, 4]]), before=lambda node, request: seen.append(request))
    remote(it, transport, tmp_path)
    fresh = open_silo(tmp_path / "fresh", experiment=it, clients=range(5), device="cpu")
    return fresh, from_bytes(to_bytes(seen[-1]))


AGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "code for a method": ({"algorithm": "os:system"}, "never taken from a server"),
    "an unknown method": ({"algorithm": "../../fedavg"}, "not registered"),
    "an unknown hyper-parameter": ({"hyper": {"command": "x"}}, "command"),
    "endless training": ({"hyper": {"local_epochs": 10**9}}, "at most 10000"),
    "code for a model": ({"model": {"name": "os:system", "head": None, "options": {}}}, "never taken from a server"),
    "a giant model": ({"model": {"name": "mlp", "head": None, "options": {"hidden": [2**20, 2**20]}}}, "parameters"),
    "an unknown option": ({"model": {"name": "mlp", "head": None, "options": {"x": 1}}}, "model.x"),
    "another shape": ({"input_shape": [1, 9, 9]}, "shape"),
    "other clients": ({"clients": [0, 1]}, "the experiment here has others"),
    "too many clients": ({"of": 10**9}, "too large"),
    "a wrong type": ({"seed": "0"}, "seed of the run is a str"),
    "a missing key": ({"seed": None}, "seed of the run"),
    "an unknown loss": ({"loss": "eval"}, "not known"),
}


@pytest.mark.parametrize("what", AGREEMENTS)
def test_a_run_that_no_silo_should_agree_to(what: str, tmp_path: Path) -> None:
    silo, good = opening(tmp_path)
    change, words = AGREEMENTS[what]
    agreement = {**good.header["agreement"], **change}
    answer = silo.handle(Envelope({**good.header, "agreement": agreement}, good.arrays))
    assert words in answer.header["error"], answer.header
    assert not (tmp_path / "fresh" / "runs").exists() or not list((tmp_path / "fresh").rglob("*.safetensors"))
    assert "error" not in silo.handle(good).header


def test_the_initial_model_is_checked(tmp_path: Path) -> None:
    silo, good = opening(tmp_path)
    for change, words in [
        (lambda a: a.update({"x0.head.bias": np.full(10, np.nan)}), "not finite"),
        (lambda a: a.update({"x0.head.bias": np.zeros(11)}), "not of the described kind"),
        (lambda a: a.update({"x0.head.bias": np.zeros(10, dtype=np.float32)}), "not of the described kind"),
        (lambda a: a.pop("x0.head.bias"), "missing x0.head.bias"),
    ]:
        arrays = dict(good.arrays)
        change(arrays)
        assert words in silo.handle(Envelope(good.header, arrays)).header["error"]


Change = Callable[[dict[str, Any], dict[str, Any]], Any]
REQUESTS: dict[str, tuple[Change, str]] = {
    "no kind": (lambda h, a: h.pop("kind"), "kind"),
    "an unknown kind": (lambda h, a: h.update(kind="delete"), "not known"),
    "an unknown run": (lambda h, a: h.update(run="../../../etc"), "unknown run"),
    "a private method": (lambda h, a: h.update(program="__init__"), "has no program"),
    "a property that is no program": (lambda h, a: h.update(program="opt"), "has no program"),
    "other clients": (lambda h, a: h.update(clients=[0, 99], versions=[0, 0]), "clients of this silo"),
    "clients twice": (lambda h, a: h.update(clients=[0, 0], versions=[0, 0]), "ascending"),
    "no clients": (lambda h, a: h.update(clients=[], versions=[]), "list of whole numbers"),
    "no versions": (lambda h, a: h.update(versions=[0]), "ascending"),
    "a version that is gone": (lambda h, a: h.update(versions=[5] * 5), "not kept here"),
    "a negative round": (lambda h, a: h.update(round=-1), "whole number"),
    "a text for a round": (lambda h, a: h.update(round="1"), "whole number"),
    "NaN": (lambda h, a: a.update({"shared.w.head.bias": np.full(10, np.nan)}), "not finite"),
    "a wrong shape": (lambda h, a: a.update({"shared.w.head.bias": np.zeros(3)}), "the model's is (10,)"),
    "an extra array": (lambda h, a: a.update(more=np.zeros(3)), "extra more"),
    "too much": (lambda h, a: a.update({"shared.w.head.bias": np.zeros(2**17)}), "bytes of arrays"),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_requests_that_are_refused(what: str, tmp_path: Path) -> None:
    silo, good = a_request(tmp_path)
    from bespokefl.flower.silo.terms import Limits

    silo._limits = Limits(message_bytes=2**20)
    before = snapshot(folder_of(silo))
    header, arrays = dict(good.header), dict(good.arrays)
    change, words = REQUESTS[what]
    change(header, arrays)
    answer = silo.handle(Envelope(header, arrays))
    assert words in answer.header["error"]
    assert snapshot(folder_of(silo)) == before


def test_endless_work_is_refused(tmp_path: Path) -> None:
    it = experiment([{"name": "fedavg", "local_epochs": 3000}])
    federation = remote(it, Memory(shards(tmp_path, it, [[0, 1, 2, 3, 4]])), tmp_path)
    answer = federation.clients.run(order_of(federation))
    assert all("passes" in str(error) for error in answer.failed.values()) and len(answer.failed) == 5


def order_of(federation: Any) -> Any:
    from bespokefl.core.program import Order

    return Order(federation.algorithm.train, np.arange(5), {"w": federation.server["w"]}, {}, 0, True)


def test_a_message_of_bfloat16_and_no_state(tmp_path: Path) -> None:
    """What has no state at all (Per-FedAvg) keeps versions, too."""
    silo, request = a_request(tmp_path, "per-fedavg")
    first = silo.handle(request)
    assert first.header["clients"] == [0, 1, 2, 3, 4]
    header, arrays = packed({"shared": {"w": torch.ones(3, dtype=torch.bfloat16)}, "per_client": {}})
    assert header["bfloat16"] == ["shared.w"] and arrays["shared.w"].dtype == np.uint16
