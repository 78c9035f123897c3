"""What the nodes say that they have, and who of them can work together."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bespokefl.data.dataset import IntArray
from bespokefl.data.digest import digest_of_names
from bespokefl.flower import limits

NOBODY = ""

Abouts = Mapping[int, Mapping[str, Any]]  # what nodes say of themselves, by node
Why = Callable[[Mapping[str, Any]], str]  # of one of them: why it is left out; nothing if it is not


@dataclass(frozen=True)
class RemoteCensus:
    """The clients as their silos told it."""

    client_names: tuple[str, ...]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    target: str  # labels, masks or numbers
    inputs: str  # numbers or tokens
    counts: Mapping[str, IntArray]  # by split
    silos: tuple[str, ...]  # of each client: the silo that hosts it; NOBODY for one that is not there

    @property
    def clients(self) -> int:
        return len(self.client_names)

    @property
    def note(self) -> str:
        return ""  # silos tell sizes, classes and shapes, no more

    @property
    def has_masks(self) -> bool:
        return self.target == "masks"

    @property
    def digest(self) -> dict[str, str]:
        """Of what the silos told: they watch over their samples themselves."""
        sizes = {split: ", ".join(map(str, counts.tolist())) for split, counts in self.counts.items()}
        return {
            "inputs": str(self.input_shape),
            "labels": f"{self.target} {len(self.classes)} {digest_of_names(self.classes)}",
            "partition": digest_of_names(f"{split}: {sizes[split]}" for split in sorted(sizes)),
            "clients": digest_of_names(self.client_names),
        }

    def sizes(self, split: str) -> IntArray:
        return self.counts[split]


class Kind(NamedTuple):
    """What a node hosts: nodes work together where this is the same."""

    hosts: str  # own, simulated
    of: int | None  # clients of the simulation
    input_shape: tuple[int, ...]
    target: str
    inputs: str
    classes: tuple[str, ...]  # of the simulation; silos with samples of their own may have different ones

    def unlike(self, other: "Kind") -> str:
        """How a node of this kind differs from those of another, for people."""
        if self.hosts != other.hosts:
            return f"it hosts {_HOSTED[self.hosts]}, the others {_HOSTED[other.hosts]}"
        mine, theirs = self._samples(), other._samples()
        if mine != theirs:
            return f"its samples are of another kind ({mine}) than the others' ({theirs})"
        if self.of != other.of:
            return f"it knows of {self.of} clients, the others of {other.of}"
        return f"it has other classes ({len(self.classes)}) than the others ({len(other.classes)})"

    def _samples(self) -> str:
        return f"shape {self.input_shape}, targets {self.target}, inputs {self.inputs}"


_HOSTED = {"own": "samples of its own", "simulated": "simulated clients"}


def kind_of(about: Mapping[str, Any]) -> Kind:
    hosts, shape = about["kind"], tuple(about["input_shape"])
    simulated = hosts == "simulated"
    classes = tuple(about["classes"]) if simulated else ()
    return Kind(
        hosts, about.get("of") if simulated else None, shape, about["target"], about.get("inputs", "numbers"), classes
    )


def fitting(
    told: Abouts, unsuitable: Why = lambda about: "", misplaced: Why = lambda about: ""
) -> tuple[dict[int, Mapping[str, Any]], dict[int, str]]:
    """The nodes that can work together, by what they say of themselves, and why the others cannot.

    Nodes of one kind work together: the largest group of those that the configuration can run on, as ``unsuitable``
    tells of one node; of two as large, that whose first node was heard first (of those heard at once, the smaller
    number). Of these, a node is left out that is ``misplaced``, that is the same silo as one before it, that claims
    clients which one before it has, or nobody, or whose classes are too many beside those of the others.
    """
    misfits = {node: why for node, about in told.items() if (why := misplaced(about))}
    kind, why_not = _chosen({node: about for node, about in told.items() if node not in misfits}, unsuitable)
    fit: dict[int, Mapping[str, Any]] = {}
    taken: dict[int, int] = {}
    silos: dict[str, int] = {}
    clients = 0
    for node, about in told.items():
        if node in misfits:
            continue
        own = kind_of(about)
        ids = [entry["id"] for entry in about["clients"] if entry["id"] is not None]
        if own in why_not:
            misfits[node] = why_not[own]
        elif kind is None or own != kind:
            misfits[node] = own.unlike(kind) if kind is not None else "no node fits"
        elif (twin := silos.get(about["silo"])) is not None:
            misfits[node] = f"it is the same silo as node {twin} (a copied folder?); every silo needs its own"
        elif len(set(ids)) < len(ids) or (kind.of is not None and any(c >= kind.of for c in ids)):
            misfits[node] = f"it claims clients that are not there, or one twice: {ids[:10]}"
        elif claimed := [c for c in ids if c in taken]:
            misfits[node] = f"it claims the clients {claimed[:10]}, which node {taken[claimed[0]]} has"
        elif (count := clients + len(about["clients"])) > limits.CLIENTS:
            misfits[node] = f"with it there are {count:,} clients; at most {limits.CLIENTS:,} are taken"
        else:
            clients = count
            fit[node], silos[about["silo"]] = about, node
            taken |= dict.fromkeys(ids, node)
    too_many = _with_too_many_classes(fit, unsuitable)
    return {node: about for node, about in fit.items() if node not in too_many}, misfits | too_many


def _with_too_many_classes(told: Abouts, unsuitable: Why) -> dict[int, str]:
    """Who is left out so that the configuration can run on the classes that all name together, and why.

    First the node with the most classes that nobody else names; of two with as many, that with more classes.
    """
    named = Counter(name for about in told.values() for name in about["classes"])
    alone = {node: sum(named[name] == 1 for name in about["classes"]) for node, about in told.items()}
    left = sorted(told, key=lambda node: (alone[node], len(told[node]["classes"])))
    why_not: dict[int, str] = {}
    while left:
        union = all_classes([told[node]["classes"] for node in left])
        if len(union) > limits.CLASSES:
            why = f"with it there are {len(union):,} classes; at most {limits.CLASSES:,} are taken"
        elif not (why := unsuitable({**told[left[0]], "classes": union})):
            break
        why_not[left.pop()] = why
    return why_not


def _chosen(told: Abouts, unsuitable: Why) -> tuple[Kind | None, dict[Kind, str]]:
    """The kind of those that work together, and why larger or earlier groups cannot."""
    groups: dict[Kind, list[Mapping[str, Any]]] = {}
    for about in told.values():
        groups.setdefault(kind_of(about), []).append(about)
    why_not: dict[Kind, str] = {}
    for kind, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        if not all(unsuitable(about) for about in members):
            return kind, why_not
        why_not[kind] = unsuitable(members[0])
    return None, why_not


def all_classes(of_silos: list[list[str]]) -> tuple[str, ...]:
    """Those that all have, or else all that occur: by number where they are numbers, else by name."""
    if all(classes == of_silos[0] for classes in of_silos):
        return tuple(of_silos[0])
    union = {name for classes in of_silos for name in classes}
    numbers = all(name.isdecimal() for name in union)
    return tuple(sorted(union, key=lambda name: (int(name), name) if numbers else (0, name)))
