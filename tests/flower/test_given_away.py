"""What a silo gives away: every program of every method, asked for in every way, against the table in the docs."""

import gc
import importlib.util
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.flower.memory import Memory, Notes, experiment, remote, shards

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.core import Exchange, InputError, RunError, trees
from bespokefl.data.splits import SPLITS
from bespokefl.flower.server.serve import serve
from bespokefl.flower.silo.silo import Silo, open_silo
from bespokefl.flower.silo.silo_run import Workshop
from bespokefl.flower.silo.terms import Limits, leaves, parse_limits, told
from bespokefl.flower.transport.codec import leaves_by_name
from bespokefl.flower.transport.envelope import Envelope, Handler

ROOT = Path(__file__).parents[2]
FIGURES = {"n", "accuracy", "loss"}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedpg": [{"pers_backtrack": True}, {"pm_base": "persistent"}],
    "fedrod": [{"head": "hyper"}],
    "l2sgd": [{"form": "coin", "p": 0.4, "flips": 4}],
    "pfedhn": [{"private_head": True}],
    "pfedme": [{"train_all": True}],
    "fedavg": [{"opt_state": "keep", "momentum": 0.9}],
}
CASES = [(name, hyper) for name in ALGORITHMS for hyper in ({}, *VARIANTS.get(name, []))]


def documented() -> dict[str, set[str]]:
    """By method, the names of what it sends, as the page has them."""
    page = (ROOT / "docs" / "federation.md").read_text(encoding="utf-8").partition("### What leaves a silo")[2]
    found: dict[str, set[str]] = {}
    for line in page.partition("<!-- end")[0].splitlines():
        cells = line.split("|")
        if len(cells) > 3 and "`" in cells[1]:
            sent = set(re.findall(r"`(\w+)`:", cells[2]))
            found |= dict.fromkeys(re.findall(r"`([\w+-]+)`", cells[1]), sent)
    return found


class Tap:
    """A federation in memory of one silo, and all that went through the line."""

    def __init__(self, folder: Path, method: dict[str, Any], **more: Any) -> None:
        it = experiment([method], clients=3, rounds=20, train={"participation": 1.0, "local_epochs": 1}, **more)
        self.asked: list[Envelope] = []
        self.came: list[Envelope] = []
        transport = Memory(shards(folder, it, [[0, 1, 2]]), tamper=self._hear)
        self.federation = remote(it, transport, folder)
        silo = transport.handlers[100]
        assert isinstance(silo, Silo)
        self.silo = silo

    def _hear(self, node: int, request: Envelope, answer: Envelope) -> Envelope:
        if request.header["kind"] in ("run", "score", "keep"):
            self.asked.append(request)
            self.came.append(answer)
        return answer

    @property
    def shop(self) -> Workshop:
        """Of the run, from the silo's folder where it is over."""
        return self.silo._workshop({"run": self.federation.clients.run_id})

    def versions(self, client: int) -> list[int]:
        return self.shop.vault.held(client)


def ways(tap: Tap) -> Iterator[Envelope]:
    """Every program by every kind of request, with every download that there was, in this round and the next."""
    newest = max(request.header["round"] for request in tap.asked)
    downloads = {repr(r.header["trees"]) + str(sorted(r.arrays)): r for r in tap.asked}
    more: list[dict[str, Any]] = [{"kind": "keep"}]
    more += [{"kind": "run", "write": w, "mean": m} for w, m in ((True, None), (False, None), (False, "uniform"))]
    more += [{"kind": "score", "split": s, "model": m} for s in SPLITS for m in ("personal", "global")]
    for program in tap.shop.algorithm.programs():
        for request in downloads.values():
            for extra in more:
                for round in (newest, newest + 1):
                    ids = request.header["clients"]
                    versions = [tap.versions(c)[-1] for c in ids]
                    about = {"program": program, "round": round, "exchange": 0, "versions": versions, **extra}
                    base = {k: v for k, v in request.header.items() if k not in ("write", "mean", "split", "model")}
                    base.pop("closer", None)
                    yield Envelope({**base, **about}, request.arrays)


def contents(messages: list[Envelope]) -> list[np.ndarray[Any, Any]]:
    """Every row of every array."""
    return [np.asarray(row) for m in messages for a in m.arrays.values() for row in (a, *(a if a.ndim else ()))]


def occurs(value: np.ndarray[Any, Any], among: list[np.ndarray[Any, Any]]) -> bool:
    same = (other for other in among if other.shape == value.shape)
    return any(np.allclose(other, value, rtol=1e-9, atol=1e-12) for other in same)


def kept_at_home(tap: Tap, tree: str) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a tree of the clients' states, in every version but the initial one; constant ones are none."""
    found = {}
    for client in range(3):
        for version in tap.versions(client)[1:]:
            state = trees.rows(tap.shop.vault.gather([client], [version]), 0)
            for name, leaf in leaves_by_name(state).items():
                value = leaf.cpu().numpy()
                if f".{tree}." in f"{name}." and value.size > 1 and np.ptp(value) > 0:
                    found[f"client {client}, version {version}: {name}"] = value
    return found


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=lambda v: v if isinstance(v, str) else ",".join(map(str, v)))
def test_nothing_leaves_but_what_the_table_says(
    name: str, hyper: dict[str, Any], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tap = Tap(tmp_path, {"name": name, **hyper}, model={"norm": "batch"} if name == "fedbn" else {})
    tap.federation.round()
    tap.federation.round()
    tap.federation.evaluate()
    tap.federation.end()
    honest = {key.split(".")[1] for answer in tap.came for key in answer.arrays if key.startswith("uploads.")}
    assert honest <= documented()[name]
    known = contents([*tap.asked, *tap.came])  # what the server has by the method itself
    algorithm, tried = tap.shop.algorithm, Counter[str]()
    stays = {tree: kept_at_home(tap, tree) for tree in algorithm.stays}
    if name in ("apfl", "ditto", "fedbn", "fedper", "lg-mix", "local", "plgu-lf"):
        assert all(stays[tree] for tree in list(algorithm.stays)[:1])  # there is something to be stolen
    for tree, tensors in stays.items():
        for what, value in tensors.items():
            assert not occurs(value, known), f"{tree!r} is said to stay: {what}"
    for request in list(ways(tap)):
        answer = tap.silo.handle(request)
        tried["requests"] += 1
        if "error" in answer.header:
            tried["refused"] += 1
            continue
        program, kind = request.header["program"], request.header["kind"]
        arrays = {key for key in answer.arrays if not key.startswith("further.")}
        if kind == "run":
            assert program in algorithm.uploads()
            assert {key.split(".")[1] for key in arrays} <= documented()[name] & set(algorithm.uploads()[program].sends)
        else:
            assert program in algorithm.model_programs() and arrays == (FIGURES if kind == "score" else set())
        came = contents([answer])
        stays = {tree: kept_at_home(tap, tree) for tree in algorithm.stays}
        for tensors in stays.values():
            for what, value in tensors.items():
                tried["tensors looked for"] += 1
                assert not occurs(value, came), f"{kind} of {program!r} gave away {what}"
    assert tried["refused"] > 10
    for what, count in tried.items():  # of all methods together: docs/reliability.md
        record_property(what, count)


def test_the_table_is_that_of_the_declarations() -> None:
    spec = importlib.util.spec_from_file_location("make_federation", ROOT / "docs" / "make_federation.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = made.PAGE.read_text(encoding="utf-8")
    assert made.page(page) == page, "python docs/make_federation.py"
    assert set(documented()) == set(ALGORITHMS)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_program_has_a_kind(name: str) -> None:
    """What is no part of a round makes a model and nothing else; a batch of one step is said in the table."""
    for hyper in ({}, *VARIANTS.get(name, [])):
        algorithm = build_algorithm(name, {}, hyper)
        uploads, programs = algorithm.uploads(), algorithm.programs()
        assert uploads and set(uploads) <= set(programs)
        assert all(not e.after or set(e.after) & set(uploads) for e in uploads.values())
        for program, exchange in uploads.items():
            for phase in programs[program].phases:
                assert phase.batches.steps != 1 or exchange.shows or not exchange.sends, program


def test_a_personal_model_cannot_be_asked_for(tmp_path: Path) -> None:
    """As it could: `run` of the program that `keep` uses."""
    for name, program in (("local", "own_model"), ("fedper", "joined_parts"), ("ditto", "own_model")):
        tap = Tap(tmp_path / name, {"name": name})
        tap.federation.round()
        tap.federation.end()
        keep = tap.asked[-1]
        assert keep.header["kind"] == "keep" and keep.header["program"] == program
        for write in (True, False):
            answer = tap.silo.handle(
                Envelope({**keep.header, "kind": "run", "write": write, "mean": None}, keep.arrays)
            )
            assert "is no part of a round" in answer.header["error"] and not answer.arrays


# the order of a round --------------------------------------------------------------------------------------------
def changed(request: Envelope, by: float, **header: Any) -> Envelope:
    arrays = {k: v + by if v.dtype.kind == "f" else v for k, v in request.arrays.items()}
    return Envelope({**request.header, **header}, arrays)


def test_programs_come_in_the_order_of_a_round(tmp_path: Path) -> None:
    tap = Tap(tmp_path, {"name": "lg-mix"})
    tap.federation.round()
    tap.federation.round()
    train, mix = tap.asked[-2:]
    assert (train.header["program"], mix.header["program"]) == ("train", "mix")
    later = tap.silo.handle(changed(mix, 0.0, round=5))
    assert "'mix' out of its place: in a round it follows 'train' or 'train_anew'" in later.header["error"]
    again = tap.silo.handle(changed(mix, 0.1))
    assert "was asked for 'mix' before it in round 2" in again.header["error"]
    assert "error" not in tap.silo.handle(train).header and "error" not in tap.silo.handle(mix).header  # a repetition
    old = tap.silo.handle(changed(train, 0.0, round=0, exchange=9))
    assert "error" not in old.header
    for k in range(3):
        tap.silo.handle(changed(train, 0.0, round=7 + k))
    assert "round 2 is over" in tap.silo.handle(train).header["error"]


def test_a_round_is_answered_twice_and_no_more(tmp_path: Path) -> None:
    tap = Tap(tmp_path, {"name": "fedavg"})
    tap.federation.round()
    (request,) = tap.asked
    assert "error" not in tap.silo.handle(changed(request, 0.1)).header
    answer = tap.silo.handle(changed(request, 0.2))
    assert "with 2 different downloads in round 1, as often as this silo does (--repeats 1)" in answer.header["error"]
    assert "error" not in tap.silo.handle(request).header  # the same has the same answer, so it gives nothing away
    it = experiment("fedavg", clients=3, train={"local_epochs": 1})
    restarted = shards(tmp_path, it, [[0, 1, 2]])[100]
    assert "different downloads" in restarted.handle(changed(request, 0.3)).header["error"]


def test_a_mean_and_its_rows_are_two_requests(tmp_path: Path) -> None:
    """So clients of a node cannot be told apart by asking for the mean of fewer and fewer."""
    tap = Tap(tmp_path, {"name": "fedavg"})
    tap.federation.round()
    (request,) = tap.asked
    some = [{"clients": ids, "versions": [0] * len(ids)} for ids in ([0, 1], [0], [1])]
    errors = ["error" in tap.silo.handle(Envelope({**request.header, **ids}, request.arrays)).header for ids in some]
    assert errors == [False, True, True]


def test_what_a_method_does_not_declare_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tap = Tap(tmp_path, {"name": "fedfv"})
    monkeypatch.setattr(type(tap.shop.algorithm), "exchanges", (Exchange("train", {"x": "a model"}),))
    with pytest.raises(RunError, match="would send loss, which it does not declare"):
        tap.federation.round()


def test_unknown_keys_of_a_request_are_refused(tmp_path: Path) -> None:
    tap = Tap(tmp_path, {"name": "fedavg"})
    tap.federation.round()
    tap.federation.evaluate()
    score = tap.asked[-1]
    answer = tap.silo.handle(Envelope({**score.header, "rows": [[0]]}, score.arrays))
    assert "a request of the kind 'score' holds rows, unknown here" in answer.header["error"]


# samples ---------------------------------------------------------------------------------------------------------
def own(folder: Path, samples: int = 60, limits: tuple[str, ...] = (), seed: int = 0) -> Silo:
    rng = np.random.default_rng(seed)
    y = np.resize([0, 1], samples)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "ward.npz", x=(rng.normal(size=(samples, 6)) + y[:, None]).astype(np.float32), y=y)
    return open_silo(folder / "silo", data=folder / "ward.npz", device="cpu", limits=limits)


def run_with(folder: Path, silo: Handler, name: Any = "fedavg", rounds: int = 1, **more: Any) -> Tap:
    """Rounds of a federation of one silo with data of its own."""
    tap = Tap.__new__(Tap)
    tap.asked, tap.came = [], []
    assert isinstance(silo, Silo)
    tap.silo = silo
    it = experiment([name], **more)
    tap.federation = remote(it, Memory({1: silo}, tamper=tap._hear), folder, rounds=it.train.rounds)
    for _ in range(rounds):
        tap.federation.round()
    return tap


def test_the_server_cannot_leave_one_row_to_train_on(tmp_path: Path) -> None:
    silo = own(tmp_path)
    for data in ({"test": 0.99, "val": 0.0}, {"test": 0.97, "val": 0.0}, {"test": 0.25, "val": 0.7}):
        with pytest.raises(RunError, match="samples would be left to train on; this silo takes part with 20 or more"):
            run_with(tmp_path, silo, data=data, federation={"wait": 0.2})
    assert not (tmp_path / "silo" / "split.npz").exists()
    with pytest.raises(InputError, match=r"has 12 samples; a silo takes part with 20 or more .*--fewest-samples"):
        own(tmp_path / "small", 12)
    brave = own(tmp_path / "brave", limits=("fewest_samples=2", "smallest_batch=1"))
    run_with(tmp_path / "brave", brave, data={"test": 0.9, "val": 0.0})


def test_the_split_is_that_of_the_first_run(tmp_path: Path) -> None:
    silo = own(tmp_path)
    first = run_with(tmp_path, silo, data={"test": 0.2, "val": 0.0}).shop.data.splits
    restarted = open_silo(tmp_path / "silo", data=tmp_path / "ward.npz", device="cpu")
    for again in (silo, restarted):
        shop = run_with(tmp_path / "other", again, "ditto", data={"test": 0.6, "val": 0.05}).shop
        for split in SPLITS:
            np.testing.assert_array_equal(shop.data.splits[split][0], first[split][0])
    with pytest.raises(InputError, match=r"holds other samples than in the first run.*another --folder"):
        own(tmp_path, 61)


def test_batches_of_one_are_refused(tmp_path: Path) -> None:
    for method in ({"name": "fedavg", "batch_size": 1}, {"name": "pfedme", "batch_size": 3, "local_unit": "steps"}):
        silo = own(tmp_path / str(method["name"]))
        with pytest.raises(RunError, match="this silo trains on batches of 4 or more"):
            run_with(tmp_path / f"{method['name']} server", silo, method, federation={"retries": 0})


def test_scores_are_told_once_a_round_and_never_of_the_train_split(tmp_path: Path) -> None:
    tap = run_with(tmp_path, own(tmp_path), rounds=2)
    tap.federation.evaluate()
    score = tap.asked[-1]
    assert score.header["split"] == "test" and "error" not in tap.silo.handle(score).header
    assert "error" not in tap.silo.handle(changed(score, 0.0, closer=True)).header  # a closer look at the same model
    for k in range(5):
        answer = tap.silo.handle(changed(score, 0.01 * (k + 1)))
        assert "has told scores of 1 models (personal, test) after round 2" in answer.header["error"]
    assert "tells no scores of its train split" in tap.silo.handle(changed(score, 0, split="train")).header["error"]
    train = next(request for request in tap.asked[::-1] if request.header["kind"] == "run")
    assert "error" not in tap.silo.handle(changed(train, 0.5)).header  # the round is repeated: its model is another
    now = {"versions": tap.versions(0)[-1:]}
    assert "error" not in tap.silo.handle(changed(score, 0.3, **now)).header
    assert "as often as this silo does" in tap.silo.handle(changed(score, 0.4, **now)).header["error"]
    open_one = run_with(tmp_path / "b", own(tmp_path / "b", limits=("train_scores=true", "evaluations=3")))
    open_one.federation.evaluate(split="train")
    more = [open_one.silo.handle(changed(open_one.asked[-1], 0.1 * k)).header for k in range(5)]
    assert ["error" in header for header in more] == [False, False, False, True, True]


def test_a_server_that_wants_train_scores_goes_on_without(tmp_path: Path) -> None:
    silo, notes = own(tmp_path), Notes()
    it = experiment("fedavg", rounds=1, eval={"also": ["train"]})
    outcome = serve(it, tmp_path / "out", Memory({1: silo}), nodes=1, resume=False, reporter=notes)
    assert len(outcome.finished) == 1
    assert any("no silo tells scores of its train split" in text for text in notes.texts)


def test_methods_that_a_silo_has_not_agreed_to(tmp_path: Path) -> None:
    silo = own(tmp_path, limits=("methods=fedavg,pgfed",))
    run_with(tmp_path, silo, "fedavg")
    with pytest.raises(RunError, match="this silo agrees to fedavg, pgfed only"):
        run_with(tmp_path, silo, "fedsam", federation={"retries": 0})


def test_the_start_says_what_would_be_sent() -> None:
    lines = "\n".join(told(parse_limits(["methods=local,fedpg"], Limits())))
    assert "at least 20 training samples, in batches of 4 or more" in lines
    assert "local: nothing" in lines and "fedpg: its gradient at a known model" in lines and "fedavg" not in lines
    everything = "\n".join(told(Limits()))
    assert all(re.search(rf"(^|[ ,]){re.escape(name)}[,:]", everything, re.MULTILINE) for name in ALGORITHMS)
    assert leaves("local") == "nothing"


@pytest.mark.parametrize("text", ["methods=fedavgg", "smallest_batch=0", "repeats=x", "train_scores=1", "most=3"])
def test_limits_that_make_no_sense(text: str) -> None:
    with pytest.raises(InputError):
        parse_limits([text], Limits())


# runs ------------------------------------------------------------------------------------------------------------
def test_a_silo_opens_so_many_runs_and_no_more(tmp_path: Path) -> None:
    silo = own(tmp_path, limits=("runs=2",))
    first, second = (run_with(tmp_path / name, silo, name) for name in ("fedavg", "ditto"))
    opened = sorted(path.name for path in (tmp_path / "silo" / "runs").iterdir())
    with pytest.raises(RunError, match=r"this silo has opened 2 runs, as many as it does \(--runs 2\)"):
        run_with(tmp_path / "third", silo, "fedprox", federation={"retries": 0})
    assert sorted(path.name for path in (tmp_path / "silo" / "runs").iterdir()) == opened
    for tap in (first, second):  # those that are open go on, also as a request of a silo that was started again
        assert "error" not in tap.silo.handle(tap.asked[-1]).header
    restarted = open_silo(tmp_path / "silo", data=tmp_path / "ward.npz", device="cpu", limits=("runs=2",))
    with pytest.raises(RunError, match="as many as it does"):
        run_with(tmp_path / "fourth", restarted, "fedsam", federation={"retries": 0})
    assert "opens at most 100 runs in its folder (--runs)" in "\n".join(told(Limits()))


def test_what_a_run_held_is_given_back(tmp_path: Path) -> None:
    """When it is over, and when another one is opened: model, states, samples, and the engine's traced steps."""
    silo = own(tmp_path)

    def shop_of(tap: Tap) -> list[weakref.ref[Any]]:
        return [weakref.ref(tap.shop), weakref.ref(tap.shop.task), weakref.ref(tap.shop.vault)]

    tap = run_with(tmp_path / "a", silo, "ditto")
    held = shop_of(tap)
    tap.federation.end()
    assert tap.silo._open == {}
    held += shop_of(run_with(tmp_path / "b", silo, "fedavg"))
    run_with(tmp_path / "c", silo, "fedprox")
    gc.collect()
    assert [kept() for kept in held] == [None] * 6


def test_rounds_and_evaluations_are_those_that_the_run_was_opened_with(tmp_path: Path) -> None:
    """A server that claims later and later rounds, to have scores of models of its choice, or steps on them."""
    tap = run_with(tmp_path, own(tmp_path), rounds=4, train={"rounds": 5}, eval={"every": 2})
    tap.federation.evaluate()
    score = tap.asked[-1]
    train = next(request for request in tap.asked[::-1] if request.header["kind"] == "run")
    outside = tap.silo.handle(changed(score, 0.0, round=3)).header["error"]
    assert "this run was opened to be evaluated after every 2 of its 5 rounds" in outside
    told_of = []
    for round in range(300):
        answer = tap.silo.handle(changed(score, 0.001 * round, round=round))
        if "error" not in answer.header:
            told_of.append(round)
    assert told_of == [5], "only the last round's, beside the one that was"
    beyond = tap.silo.handle(changed(train, 0.1, round=5)).header["error"]
    assert "round 6: this run was opened with 5 rounds" in beyond
    opening = tap.federation.clients.opening
    for change in ({"rounds": 6}, {"every": 1}):
        agreement = {**opening.header["agreement"], "clients": [0], **change}
        again = tap.silo.handle(Envelope({**opening.header, "agreement": agreement}, opening.arrays))
        assert "this run was opened with" in again.header["error"]
    for change in ({"rounds": 0}, {"every": 0}, {"rounds": 10**6}):
        agreement = {**opening.header["agreement"], "clients": [0], "run": "x", **change}
        again = tap.silo.handle(Envelope({**opening.header, "agreement": agreement}, opening.arrays))
        assert "it has 1 to 100000 rounds" in again.header["error"]
    open_one = run_with(tmp_path / "b", own(tmp_path / "b", limits=("evaluations=any",)), eval={"every": 2})
    open_one.federation.evaluate()
    assert not any("error" in open_one.silo.handle(changed(open_one.asked[-1], 0.1 * k)).header for k in range(5))
