"""What a silo keeps of one run on its disk: its clients' states by version, and the last answer.

A state never changes. A request names the version that it starts from, and what comes of it is a new version, whose
number is a digest of the request. So the server decides which of them count: an answer that came too late, was refused,
or was lost with the server leaves a version that nobody names again, and a request that is repeated finds its answer.

The manifest is written last and atomically: what it does not name does not count, and is removed.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from bespokefl.core import trees
from bespokefl.core.tree_io import pack, unpack
from bespokefl.core.trees import Tree
from bespokefl.errors import RunError
from bespokefl.experiments.checkpoint import separate
from bespokefl.flower.refusal import Refused
from bespokefl.flower.transport.envelope import Envelope
from bespokefl.results.files import read_json, write_atomically

INITIAL = 0  # the version of a client that has not taken part yet
ROUNDS_KEPT = 2  # a restarted server goes back to the beginning of its last round, or of the one before
MANIFEST = "manifest.json"
LOST = "this state is not kept here"  # an error after which the server asks what there is


class StateStore:
    """States of a silo's clients in one run."""

    def __init__(self, folder: Path, initial: Tree, classes: Mapping[str, type]) -> None:
        self.folder, self._initial, self._classes = folder, initial, classes
        self._loaded: dict[int, tuple[list[int], Tree]] = {}  # by version: clients, and a row for each
        stored = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
        self._held: dict[int, list[int]] = {int(c): list(v) for c, v in stored.get("held", {}).items()}
        # By client, the version with which it began its last rounds.
        self._begun: dict[int, dict[int, int]] = {
            int(c): {int(r): v for r, v in rounds.items()} for c, rounds in stored.get("begun", {}).items()
        }
        self._answer: dict[str, Any] = stored.get("answer", {})
        self._remove_unnamed()

    def held(self, client: int) -> list[int]:
        """The versions that there are of a client's state, the newest last."""
        return [INITIAL, *self._held.get(client, [])]

    def gather(self, clients: Sequence[int], versions: Sequence[int]) -> Tree:
        """The states of some clients, stacked."""
        if not trees.leaves(self._initial):
            return self._initial
        return trees.stack([self._row(client, version) for client, version in zip(clients, versions, strict=True)])

    def answer(self, version: int) -> Envelope | None:
        """The answer that was given with this version, if it was the last one."""
        if self._answer.get("version") != version:
            return None
        tensors, _ = _read(self.folder / _answer_file(version))
        return Envelope(self._answer["header"], {name: value.numpy() for name, value in tensors.items()})

    def add(
        self,
        version: int,
        clients: Sequence[int],
        states: Tree,
        parents: Mapping[int, int],
        round: int,
        begins: bool,
        answer: Envelope,
    ) -> None:
        """Keeps a new version of some clients' states, and the answer that goes with it.

        ``parents`` has the version that each client started from, also of those that failed; ``begins`` says that it
        is the first of its round.
        """
        held, begun = dict(self._held), dict(self._begun)
        for client, parent in parents.items():
            rounds = {r: v for r, v in begun.get(client, {}).items() if r <= round}
            if begins or round not in rounds:
                rounds[round] = parent
            begun[client] = {r: rounds[r] for r in sorted(rounds)[-ROUNDS_KEPT:]}
            wanted = {parent, *begun[client].values()}
            old = [v for v in held.get(client, []) if v in wanted and v != version]
            held[client] = [*old, *([version] if client in clients else [])]
        told = {"version": version, "header": dict(answer.header)}
        structure, tensors = pack(states, "state")
        note = {"clients": json.dumps(list(clients)), "structure": json.dumps(structure)}
        try:
            _write(self.folder / _state_file(version), tensors, note)
            _write(self.folder / _answer_file(version), _as_tensors(answer), {})
            content = {"held": held, "begun": begun, "answer": told}
            write_atomically(self.folder / MANIFEST, json.dumps(content))
        except OSError as error:
            self._remove_unnamed()
            raise RunError(
                f"the silo could not keep its state in {self.folder} ({error}); all is as it was before the request"
            ) from error
        self._held, self._begun, self._answer = held, begun, told
        self._loaded[version] = (list(clients), states)
        self._remove_unnamed()

    def _row(self, client: int, version: int) -> Tree:
        if version == INITIAL:
            return self._initial
        if version not in self._held.get(client, []):
            raise Refused(f"client {client}: {LOST} (version {version})")
        if version not in self._loaded:
            tensors, note = _read(self.folder / _state_file(version))
            rows = unpack(json.loads(note["structure"]), tensors, self._classes)
            self._loaded[version] = json.loads(note["clients"]), rows
        clients, rows = self._loaded[version]
        device = trees.leaves(self._initial)[0].device
        return trees.tree_map(lambda v: v[clients.index(client)].to(device), rows)

    def _remove_unnamed(self) -> None:
        """Files of versions that nobody can ask for, and what a killed process left behind."""
        named = {v for versions in self._held.values() for v in versions}
        kept = {_state_file(v) for v in named} | {_answer_file(self._answer.get("version", 0))}
        for path in [*self.folder.glob("state-*"), *self.folder.glob("answer-*"), *self.folder.glob(".*.unfinished")]:
            if path.name not in kept:
                path.unlink(missing_ok=True)
        self._loaded = {v: rows for v, rows in self._loaded.items() if v in named}


def _as_tensors(answer: Envelope) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in answer.arrays.items()}


def _write(path: Path, tensors: Mapping[str, torch.Tensor], note: dict[str, str]) -> None:
    write_atomically(path, save(separate(tensors), note))


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read ({error}); the silo has lost this state") from error


def _state_file(version: int) -> str:
    return f"state-{version:016x}.safetensors"


def _answer_file(version: int) -> str:
    return f"answer-{version:016x}.safetensors"
