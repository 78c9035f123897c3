"""A silo: it answers the server's requests, and keeps its clients' states and personal models in its folder.

``silo.json`` says who it is; each run has a folder of its own in ``runs/``: what was agreed (run.json and
initial.safetensors), the clients' states (`vault`), and their personal models with all that `bespoke predict` needs.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from bespokefl import __version__
from bespokefl.core import trees
from bespokefl.core.model_programs import network_outputs
from bespokefl.core.program import Order
from bespokefl.core.trees import Model, Tree
from bespokefl.data.splits import SPLITS
from bespokefl.engines import build_engine
from bespokefl.errors import BespokeError, InputError
from bespokefl.experiments.schema import Experiment
from bespokefl.flower import limits
from bespokefl.flower.refusal import Refused
from bespokefl.flower.silo.silo_data import Holdings, Own, Simulated
from bespokefl.flower.silo.silo_run import Agreement, Workshop, check_samples
from bespokefl.flower.silo.terms import SIMULATED, Limits, parse_limits, told
from bespokefl.flower.transport.codec import KEYS, digest, packed, unpacked
from bespokefl.flower.transport.envelope import Array, Envelope
from bespokefl.plain import one_line
from bespokefl.results.files import read_json, write_atomically, write_json
from bespokefl.results.model_file import write_model

PROTOCOL = 3  # 3: a run says how many rounds it has, and which are evaluated
SILO, RUNS, RUN, INITIAL_MODEL, PERSONAL = "silo.json", "runs", "run.json", "initial.safetensors", "personal"
UNKNOWN_RUN = "unknown run"  # an error that the server answers by opening the run again
NO_TRAIN_SCORES = "this silo tells no scores of its train split (--train-scores)"  # the server then goes on without
SPLIT = "split.npz"  # which samples it trains on, as it was in the first run
ASKED_FOR = ("kind", "run", "round", "exchange", "program", "clients", "versions")  # of a header, in every request
ALSO = {"run": ("write", "mean"), "score": ("split", "model", "closer"), "keep": ()}  # and in those of a kind
REPEATED = ("run", "round", "exchange")  # of a request's header, so that the server knows an old answer


def open_silo(
    folder: Path,
    *,
    data: Path | None = None,
    experiment: Experiment | None = None,
    clients: Sequence[int] | None = None,
    device: str = "auto",
    limits: Iterable[str] = (),
) -> "Silo":
    """A silo on its own ``data``, or one that hosts some ``clients`` (ids) of those that ``experiment`` simulates.

    ``limits`` are of `Limits`, as KEY=VALUE, where they are not those of such a silo.
    """
    if data is not None and clients is None:
        chosen, holdings = parse_limits(limits, Limits()), Own(data, folder / SPLIT)
        count = holdings.samples()  # data that cannot be read are a matter of now, not of the first round
        if count < chosen.fewest_samples:
            raise InputError(
                f"--data {data} has {count} samples; a silo takes part with {chosen.fewest_samples} or more "
                "to train on (--fewest-samples)"
            )
        return Silo(folder, holdings, device, chosen)
    if experiment is not None and clients is not None and data is None:
        simulated = Simulated(experiment, tuple(sorted(set(clients))))
        return Silo(folder, simulated, device, parse_limits(limits, SIMULATED))
    raise InputError("a silo has data of its own (--data), or an experiment and clients of it (--clients)")


class Silo:
    """A `Handler`; requests come one at a time."""

    def __init__(self, folder: Path, holdings: Holdings, device: str, limits: Limits) -> None:
        self.folder, self._holdings, self._limits = folder, holdings, limits
        self._device = str(build_engine("vectorized", device).device)
        self._open: dict[str, Workshop] = {}  # the last one, until it is over
        self._identity = self._load_identity()

    def handle(self, request: Envelope) -> Envelope:
        """An answer to every request: what was asked for, or ``error`` with the reason."""
        repeated = {key: request.header.get(key) for key in REPEATED}
        kinds = {"hello": self._hello, "open": self._agree, "run": self._run, "score": self._score, "keep": self._keep}
        try:
            kind = request.header.get("kind")
            if kind not in kinds:
                raise Refused(f"a request of the kind {str(kind)[:40]!r} is not known")
            answer = kinds[kind](request)
        except BespokeError as error:
            return Envelope({**repeated, "error": str(error)})
        except Exception as error:  # a request must not end the silo, whatever it holds
            said = one_line(str(error), limits.TEXT // 2)
            return Envelope({**repeated, "error": f"the request cannot be followed ({type(error).__name__}: {said})"})
        return Envelope({**answer.header, **repeated}, answer.arrays)

    def terms(self) -> list[str]:
        """For the people of the silo, before anything is done: what it gives, and what it refuses."""
        return told(self._limits)

    # who it is ---------------------------------------------------------------------------------------
    def _load_identity(self) -> dict[str, Any]:
        path = self.folder / SILO
        if path.is_file():
            return read_json(path)
        fresh = {"silo": secrets.token_hex(16), "federations": {}, "version": __version__}
        write_json(path, fresh)
        return fresh

    def _hello(self, request: Envelope) -> Envelope:
        header = request.header
        if header.get("protocol") != PROTOCOL:
            raise Refused(f"the server speaks protocol {header.get('protocol')}, this silo {PROTOCOL} ({__version__})")
        census = self._holdings.census(_whole(header, "seed"), _table(header, "data"))
        check_samples(self._limits, [client["train"] for client in census["clients"]])
        mine = self._identity["federations"].get(str(header.get("federation")))
        if mine is not None and census["clients"][0]["id"] is None:
            census["clients"][0]["id"] = mine
        return Envelope({"silo": self._identity["silo"], "kind": self._holdings.kind, **census})

    def _agree(self, request: Envelope) -> Envelope:
        """A run is opened: what it is about is checked and kept, and its clients' versions are told."""
        agreed = Agreement.checked(request.header.get("agreement"), self._limits)
        model = unpacked(request, ("x0",), {}, most_bytes=self._limits.message_bytes, finite=True)["x0"]
        if not isinstance(model, dict):
            raise Refused("the initial model is not one")
        folder = self._folder_of(agreed)
        self._check_opening(agreed, folder)
        self._close()
        workshop = self._make_workshop(agreed, model, folder)
        self._holdings.fix(agreed.data)
        write_atomically(folder / INITIAL_MODEL, save({k: v.cpu().contiguous() for k, v in workshop.x0.items()}))
        write_json(folder / RUN, {**asdict(agreed), "reading": workshop.reading})
        if self._holdings.kind == "own":
            federations = {**self._identity["federations"], str(request.header.get("federation")): agreed.clients[0]}
            self._identity = {**self._identity, "federations": federations}
            write_json(self.folder / SILO, self._identity)
        self._open = {agreed.run: workshop}
        return Envelope({"held": {str(c): workshop.vault.held(c) for c in agreed.clients}})

    def _check_opening(self, agreed: Agreement, folder: Path) -> None:
        """Refuses one run too many, and an earlier one that would be longer or scored more often than it was."""
        if (folder / RUN).is_file():
            before = read_json(folder / RUN)
            for key in ("rounds", "every"):
                if before.get(key) != getattr(agreed, key):
                    raise Refused(
                        f"this run was opened with {key} = {before.get(key)}, now it would be {getattr(agreed, key)}; "
                        "start another one, with another --out"
                    )
            return
        opened = sum(1 for _ in (self.folder / RUNS).glob(f"*/{RUN}"))
        if opened >= self._limits.runs:
            raise Refused(
                f"this silo has opened {opened} runs, as many as it does (--runs {self._limits.runs}); its people may "
                f"allow more, or remove those of {RUNS}/ in its folder that are over"
            )

    def _folder_of(self, agreed: Agreement) -> Path:
        """Of registered names and a hash only: nothing that the server chose freely becomes a path."""
        plain = re.sub(r"[^\w+-]", "", agreed.algorithm) if len(agreed.algorithm) < 40 else "method"
        return self.folder / RUNS / f"{plain}-seed-{agreed.seed}-{_hash(agreed.run)}"

    def _workshop(self, header: Mapping[str, Any]) -> Workshop:
        """That of the named run, from the silo's folder if this process has not met it yet."""
        run = header.get("run")
        if not isinstance(run, str):
            raise Refused("the request names no run")
        if run not in self._open:
            found = sorted((self.folder / RUNS).glob(f"*-{_hash(run)}/{RUN}"))
            if not found:
                raise Refused(UNKNOWN_RUN)
            stored = read_json(found[0])
            stored.pop("reading")
            agreed, x0 = Agreement.checked(stored, self._limits), load_file(found[0].parent / INITIAL_MODEL)
            self._close()
            self._open = {run: self._make_workshop(agreed, x0, found[0].parent)}
        return self._open[run]

    def _make_workshop(self, agreed: Agreement, x0: Model, folder: Path) -> Workshop:
        """Each has an engine of its own, as an engine keeps graphs of what it has run."""
        engine = build_engine("vectorized", self._device)
        return Workshop(agreed, x0, self._holdings, engine, folder, self._limits)

    def _close(self) -> None:
        """Gives back what the open run holds in memory; a further request finds the run in its folder."""
        engines = [shop.engine for shop in self._open.values()]
        self._open = {}
        for engine in engines:
            engine.release()

    # what it does ------------------------------------------------------------------------------------
    def _run(self, request: Envelope) -> Envelope:
        """A program on some clients; their new states are kept as a version that the server may name later."""
        shop, header = self._workshop(request.header), request.header
        order, versions = self._order(shop, request, upload=True)
        mean, write, name = header.get("mean"), header.get("write") is True, str(header["program"])
        keys = ("run", "round", "program", "clients", "versions", "mean", *KEYS)
        number = digest({k: header.get(k) for k in keys}, request.arrays)
        version = digest({"number": number, "write": write}, {})
        about = name, order.round, order.clients.tolist(), number
        shop.asked.check_upload(shop.algorithm.uploads(), *about)
        if write and (known := shop.vault.answer(version)) is not None:
            shop.asked.note("run", *about)
            return known
        result = shop.run(order, versions)
        shop.check_upload(name, result.uploads)
        failed = {int(c): _reason(error) for c, error in result.failed.items()}
        good = trees.finite_rows((result.uploads, result.states), len(result.positions)).numpy()
        for position in result.positions[~good]:
            failed[int(order.clients[position])] = "answered with values that are not finite"
        chosen = torch.as_tensor(np.flatnonzero(good))
        uploads, states = trees.rows((result.uploads, result.states), chosen) if len(chosen) else ({}, {})
        done = [int(c) for c in order.clients[result.positions[good]]]
        if mean is not None and done:
            uploads = _mean(shop, uploads, done, mean)
        told, arrays = packed({"uploads": uploads})
        head = {"clients": done, "failed": {str(c): why for c, why in failed.items()}, "version": version}
        answer = Envelope({**head, "computed": result.computed, "useful": result.useful, **told}, arrays)
        if write and done:
            parents = dict(zip(order.clients.tolist(), versions, strict=True))
            shop.vault.add(version, done, states, parents, order.round, header.get("exchange") == 0, answer)
        shop.asked.note("run", *about)
        return answer

    def _score(self, request: Envelope) -> Envelope:
        """Figures of the clients' models on one of their splits; nothing else leaves."""
        shop, header = self._workshop(request.header), request.header
        order, versions = self._order(shop, request, upload=False)
        split, closer, model = header.get("split"), header.get("closer") is True, header.get("model")
        if split not in SPLITS or model not in ("personal", "global"):
            raise Refused(f"split {str(split)[:40]!r} or model {str(model)[:40]!r} is not known")
        if split == "train" and not self._limits.train_scores:
            raise Refused(NO_TRAIN_SCORES)
        scored = digest({k: header.get(k) for k in ("program", "clients", "versions", *KEYS)}, request.arrays)
        about = f"{model}, {split}", order.round, order.clients.tolist(), digest({"of": [scored, split, model]}, {})
        shop.asked.check_score(shop.algorithm.uploads(), *about)
        own = shop.data.splits[split]
        look = shop.scorer.look(own, closer=closer)
        outputs = network_outputs if model == "global" else shop.algorithm.outputs
        program = shop.scorer.scoring(order.program, split, outputs, look)
        result = shop.run(Order(program, order.clients, order.shared, order.per_client, order.round), versions)
        found = shop.scorer.evaluation(result, order.clients, own, look)
        arrays: dict[str, Array] = {"n": found.n, "accuracy": found.accuracy, "loss": found.loss}
        arrays |= {f"further.{name}": values for name, values in found.further.items()}
        shop.asked.note("score", *about)
        return Envelope({"clients": order.clients.tolist()}, arrays)

    def _keep(self, request: Envelope) -> Envelope:
        """The clients' personal models go into the silo's folder; the server gets none of them."""
        shop = self._workshop(request.header)
        order, versions = self._order(shop, request, upload=False)
        result = shop.run(order, versions)
        for row, position in enumerate(result.positions):
            client = int(order.clients[position])
            note = {"client": str(client), "algorithm": shop.agreed.algorithm, "round": str(order.round)}
            path = shop.folder / PERSONAL / f"client-{client}.safetensors"
            write_model(trees.rows(result.uploads["model"], row), note, path)
        self._close()
        return Envelope({"clients": order.clients[result.positions].tolist()})

    def _order(self, shop: Workshop, request: Envelope, *, upload: bool) -> tuple[Order, list[int]]:
        header = request.header
        if more := sorted(set(header) - {*ASKED_FOR, *KEYS, *ALSO[str(header["kind"])]}):
            raise Refused(
                f"a request of the kind {header['kind']!r} holds {', '.join(map(str, more))[:80]}, unknown here"
            )
        clients, versions = shop.clients(header.get("clients"), header.get("versions"))
        found = unpacked(
            request,
            ("shared", "per_client"),
            shop.classes,
            most_bytes=self._limits.message_bytes,
            finite=True,
        )
        shop.check_downloads(found["shared"], found["per_client"], len(clients))
        round = _whole(header, "round")
        program = shop.program(header.get("program"), round, upload=upload)
        return Order(program, clients, found["shared"], found["per_client"], round), versions


def _mean(shop: Workshop, uploads: Tree, clients: list[int], kind: Any) -> Tree:
    """One row: the clients' uploads, averaged by their weights."""
    if kind not in ("sample", "uniform"):
        raise Refused(f"mean = {str(kind)[:40]!r}: clients are weighed by 'sample' or 'uniform'")
    if len(clients) == 1:
        return uploads
    n = torch.as_tensor(shop.data.sizes("train")[clients], dtype=torch.float64)
    weights = n / n.sum() if kind == "sample" else torch.full_like(n, 1 / len(n))
    return trees.tree_map(lambda v: v[None], trees.mean(uploads, weights))


def _whole(header: Mapping[str, Any], key: str) -> int:
    value = header.get(key)
    if type(value) is not int or not 0 <= value < 2**63:
        raise Refused(f"{key} of the request should be a whole number from 0")
    return value


def _table(header: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = header.get(key)
    if not isinstance(value, Mapping):
        raise Refused(f"{key} of the request should be a table")
    return value


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
