"""What the nodes say that they have, and who of them can work together."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bespokefl.data.dataset import IntArray
from bespokefl.data.digest import digest_of_names
from bespokefl.flower import limits


@dataclass(frozen=True)
class RemoteCensus:
    """The clients as their silos told it."""

    client_names: tuple[str, ...]
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    target: str  # labels, masks or numbers
    inputs: str  # numbers or tokens
    counts: Mapping[str, IntArray]  # by split
    silos: tuple[str, ...]  # of each client: the silo that hosts it
    kinds: frozenset[str]  # own, simulated

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
    """What a silo's samples are."""

    input_shape: tuple[int, ...]
    target: str
    inputs: str

    def __str__(self) -> str:
        return f"shape {self.input_shape}, targets {self.target}, inputs {self.inputs}"


def kind_of(about: Mapping[str, Any]) -> Kind:
    return Kind(tuple(about["input_shape"]), about["target"], about.get("inputs", "numbers"))


def fitting(told: Mapping[int, Mapping[str, Any]]) -> tuple[dict[int, Mapping[str, Any]], dict[int, str]]:
    """The nodes that can work together, by what they say of themselves, and why the others cannot.

    A node whose samples are of another kind than those of more than half of all is left out; so is one that claims
    clients of a simulation which a node before it has, or which the simulation of more than half does not have.
    """
    kinds, sizes = Counter(map(kind_of, told.values())), Counter(about.get("of") for about in told.values())
    kind, alike = kinds.most_common(1)[0] if kinds else (None, 0)
    of, agreed = sizes.most_common(1)[0] if sizes else (None, 0)
    fit: dict[int, Mapping[str, Any]] = {}
    misfits: dict[int, str] = {}
    taken: dict[int, int] = {}
    silos: dict[str, int] = {}
    clients, classes = 0, set[str]()
    for node, about in told.items():
        ids = [entry["id"] for entry in about["clients"] if entry["id"] is not None]
        if (twin := silos.get(about["silo"])) is not None:
            misfits[node] = f"it is the same silo as node {twin} (a copied folder?); every silo needs its own"
        elif 2 * alike > len(told) and kind_of(about) != kind:
            misfits[node] = f"its samples are of another kind ({kind_of(about)}) than the others' ({kind})"
        elif 2 * agreed > len(told) and about.get("of") != of:
            misfits[node] = f"it knows of {about.get('of')} clients, the others of {of}"
        elif len(set(ids)) < len(ids) or (isinstance(of, int) and any(c >= of for c in ids)):
            misfits[node] = f"it claims clients that are not there, or one twice: {ids[:10]}"
        elif claimed := [c for c in ids if c in taken]:
            misfits[node] = f"it claims the clients {claimed[:10]}, which node {taken[claimed[0]]} has"
        elif (count := clients + len(about["clients"])) > limits.CLIENTS:
            misfits[node] = f"with it there are {count:,} clients; at most {limits.CLIENTS:,} are taken"
        elif len(union := classes | set(about["classes"])) > limits.CLASSES:
            misfits[node] = f"with it there are {len(union):,} classes; at most {limits.CLASSES:,} are taken"
        else:
            clients, classes = count, union
            fit[node], silos[about["silo"]] = about, node
            taken |= dict.fromkeys(ids, node)
    return fit, misfits


def all_classes(of_silos: list[list[str]]) -> tuple[str, ...]:
    """Those that all have, or else all that occur: by number where they are numbers, else by name."""
    if all(classes == of_silos[0] for classes in of_silos):
        return tuple(of_silos[0])
    union = {name for classes in of_silos for name in classes}
    numbers = all(name.isdecimal() for name in union)
    return tuple(sorted(union, key=lambda name: (int(name), name) if numbers else (0, name)))
