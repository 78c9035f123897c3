"""Partitions: which client owns which sample of a pooled dataset.

Each partition gives every row an owner (or none), so that no row can be used twice. Splitting a client's rows into
train, validation and test is `splits.py`'s work; a partition only says the default fractions.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from bespokefl.core.rng import stream
from bespokefl.data.dataset import Dataset, IntArray
from bespokefl.data.options import NoOptions
from bespokefl.data.released import released_draw
from bespokefl.errors import InputError

UNUSED = -1  # owner of a row that no client gets
MAX_REDRAWS = 1000


@dataclass(frozen=True)
class Assignment:
    """The result of a partition."""

    owner: IntArray  # (rows,) the client of each row, or UNUSED
    details: dict[str, Any] = field(default_factory=dict)  # for the record, e.g. the number of redraws
    names: tuple[str, ...] = ()  # the clients' names where they have some
    drawn: tuple[IntArray, ...] | None = None  # each client's rows as its split takes them; None: split by streams


def _twenty_clients(data: Dataset, options: Any) -> int:
    return 20


@dataclass(frozen=True)
class Partition:
    """An entry of the registry."""

    name: str
    description: str
    assign: Callable[[Dataset, int, int, Any], Assignment]  # (dataset, clients, seed, options)
    options: type[Any] = NoOptions
    test: float | None = 0.25  # default test fraction; None: the dataset's official test share, else 0.25
    val: float = 0.0  # default validation fraction
    stratified: bool = False  # split each of a client's classes in the same proportions
    by_label: bool = False  # needs one label per sample
    default_clients: Callable[[Dataset, Any], int] = _twenty_clients  # (dataset, options)


def rows_by_owner(owner: IntArray, clients: int) -> list[IntArray]:
    """Each client's rows, ascending."""
    order = np.argsort(owner, kind="stable")
    order = order[np.count_nonzero(owner == UNUSED) :]
    sizes = np.bincount(owner[order], minlength=clients)
    return [rows.astype(np.int64) for rows in np.split(order, np.cumsum(sizes)[:-1])]


def _shuffled_classes(data: Dataset, seed: int) -> list[IntArray]:
    """The rows of each class, each class shuffled by a stream of its own."""
    by_class = rows_by_owner(data.labels, len(data.classes))
    return [stream(seed, "partition-class", label).permutation(rows) for label, rows in enumerate(by_class)]


def _equal_cuts(count: int, owners: IntArray) -> IntArray:
    """Owners of `count` rows in a row: contiguous pieces whose sizes differ by at most one."""
    return owners[np.arange(count) * len(owners) // count] if count else owners[:0]


# iid -------------------------------------------------------------------------------------------------


def assign_iid(data: Dataset, clients: int, seed: int, options: NoOptions) -> Assignment:
    """Shuffle, then cut into equal parts."""
    owner = np.empty(len(data), dtype=np.int64)
    owner[stream(seed, "partition").permutation(len(data))] = _equal_cuts(len(data), np.arange(clients))
    return Assignment(owner)


# dirichlet -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DirichletOptions:
    """Label skew by Dirichlet proportions, as in PGFed."""

    alpha: Annotated[float, Field(gt=0)] = 0.3  # concentration: small is skewed, large is even
    min_samples: Annotated[int, Field(ge=2)] | None = None  # every client's least; None: min(40, samples / (4 clients))
    top_up: bool = False  # one draw, then fill small clients from the largest: for so many clients that no draw is good
    draw: Literal["streams", "released"] = "streams"  # released: as PGFed's generator draws, whose data.seed is 1


def assign_dirichlet(data: Dataset, clients: int, seed: int, options: DirichletOptions) -> Assignment:
    """Per class, Dirichlet proportions over the clients that are not full; redraw until no client is too small."""
    least = options.min_samples or max(2, min(40, len(data) // (4 * clients)))
    if least * clients > len(data):
        raise InputError(
            f"data.min_samples = {least} for data.clients = {clients} needs {least * clients} samples, but the dataset "
            f"has {len(data)}: lower one of the two."
        )
    if options.draw == "released":
        return _assign_released(data, clients, seed, options, least)
    class_sizes = np.bincount(data.y, minlength=len(data.classes))
    for redraws in range(MAX_REDRAWS):
        counts = _dirichlet_counts(class_sizes, clients, options.alpha, stream(seed, "partition", redraws))
        if options.top_up or counts.sum(axis=1).min() >= least:
            break
    else:
        raise _no_draw(clients, options.alpha, least, ", or data.top_up = true, which fills small clients")
    owner = np.empty(len(data), dtype=np.int64)
    for rows, count in zip(_shuffled_classes(data, seed), counts.T, strict=True):
        owner[rows] = np.repeat(np.arange(clients), count)
    moved = _top_up(owner, clients, least, stream(seed, "partition-top-up")) if options.top_up else 0
    return Assignment(owner, {"min_samples": least, "redraws": redraws, "moved": moved})


def _assign_released(data: Dataset, clients: int, seed: int, options: DirichletOptions, least: int) -> Assignment:
    if options.top_up:
        raise InputError(
            "data.top_up = True beside data.draw = 'released': the released generator draws again instead of filling "
            "small clients; leave data.top_up out, or take data.draw = 'streams'."
        )
    found = released_draw(data.labels, len(data.classes), clients, options.alpha, least, seed, MAX_REDRAWS)
    if found is None:
        raise _no_draw(clients, options.alpha, least)
    owner = np.empty(len(data), dtype=np.int64)
    for client, rows in enumerate(found.rows):
        owner[rows] = client
    return Assignment(owner, {"min_samples": least, "redraws": found.redraws, "moved": 0}, drawn=found.rows)


def _no_draw(clients: int, alpha: float, least: int, other: str = "") -> InputError:
    return InputError(
        f"No draw out of {MAX_REDRAWS} gave each of data.clients = {clients} clients data.min_samples = {least} "
        f"samples at data.alpha = {alpha}: use fewer clients, a lower data.min_samples, a larger data.alpha{other}."
    )


def _dirichlet_counts(sizes: IntArray, clients: int, alpha: float, rng: np.random.Generator) -> IntArray:
    """Samples per client and class of one draw; a client that holds total / clients gets nothing more."""
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for label, size in enumerate(sizes):
        share = rng.dirichlet(np.full(clients, alpha)) * (held < sizes.sum() / clients)
        if share.sum() == 0:  # a tiny alpha put all the weight on full clients: no usable draw
            return np.zeros_like(counts)
        cuts = (np.cumsum(share / share.sum()) * size).astype(np.int64)
        cuts[-1] = size
        counts[:, label] = np.diff(cuts, prepend=0)
        held += counts[:, label]
    return counts


def _top_up(owner: IntArray, clients: int, least: int, rng: np.random.Generator) -> int:
    """Give clients below `least` random samples of whoever is the largest; the number of samples moved."""
    held = [rng.permutation(rows).tolist() for rows in rows_by_owner(owner, clients)]
    largest = [(-len(rows), client) for client, rows in enumerate(held)]
    heapq.heapify(largest)
    missing = [(client, least - len(rows)) for client, rows in enumerate(held) if len(rows) < least]
    for client, count in missing:
        for _ in range(count):
            negative_size, donor = largest[0]
            owner[held[donor].pop()] = client
            heapq.heapreplace(largest, (negative_size + 1, donor))
    return sum(count for _, count in missing)


# labels ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelsOptions:
    """Each client owns a fixed number of labels, as in PLGU."""

    labels_per_client: Annotated[int, Field(ge=1)] = 3


def assign_labels(data: Dataset, clients: int, seed: int, options: LabelsOptions) -> Assignment:
    """A random incidence of clients and labels with even margins, then each class cut equally among its owners."""
    _check_labels_per_client(options.labels_per_client, data)
    incidence = label_incidence(clients, len(data.classes), options.labels_per_client, stream(seed, "partition"))
    return _deal(data, clients, seed, [np.flatnonzero(column) for column in incidence.T])


def label_incidence(clients: int, classes: int, labels_per_client: int, rng: np.random.Generator) -> IntArray:
    """0/1 matrix, clients by classes: row sums labels_per_client, column sums that differ by at most one.

    Each client takes the labels with the fewest owners so far, ties at random; client order is shuffled at the end.
    """
    incidence = np.zeros((clients, classes), dtype=np.int64)
    owners = np.zeros(classes)
    for row in incidence:
        chosen = np.argsort(owners + rng.random(classes) / 2)[:labels_per_client]
        row[chosen] = 1
        owners[chosen] += 1
    return rng.permutation(incidence)


def _deal(data: Dataset, clients: int, seed: int, owners: list[IntArray]) -> Assignment:
    """Cut each class equally among its owners; a class without owners stays unused."""
    owner = np.full(len(data), UNUSED, dtype=np.int64)
    for label, (rows, own) in enumerate(zip(_shuffled_classes(data, seed), owners, strict=True)):
        if len(rows) < len(own):
            raise InputError(
                f"data.clients = {clients}: class {data.classes[label]!r} has {len(rows)} samples for the "
                f"{len(own)} clients that own it; use fewer clients or fewer labels per client."
            )
        if len(own):
            owner[rows] = _equal_cuts(len(rows), own)
    return Assignment(owner, {"unused_samples": int((owner == UNUSED).sum())})


def _check_labels_per_client(labels_per_client: int, data: Dataset) -> None:
    if labels_per_client > len(data.classes):
        raise InputError(
            f"data.labels_per_client = {labels_per_client}, but {data.name} has {len(data.classes)} classes; "
            f"allowed: 1 to {len(data.classes)}."
        )


# pathological ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PathologicalOptions:
    """Two labels per client, as in FedPG and its sibling papers."""

    labels_per_client: Annotated[int, Field(ge=1)] = 2
    variant: Literal["code", "shards"] = "code"  # the authors' code, or McMahan's sorted shards as their text says


def assign_pathological(data: Dataset, clients: int, seed: int, options: PathologicalOptions) -> Assignment:
    """`code`: classes in order to the first clients that lack labels. `shards`: random shards of sorted labels."""
    _check_labels_per_client(options.labels_per_client, data)
    if options.variant == "shards":
        return _assign_shards(data, clients, seed, options.labels_per_client)
    per_class = clients * options.labels_per_client // len(data.classes)
    lacking = np.full(clients, options.labels_per_client)
    owners = []
    for _ in data.classes:
        chosen = np.flatnonzero(lacking)[:per_class]
        lacking[chosen] -= 1
        owners.append(chosen)
    empty = int((lacking == options.labels_per_client).sum())
    if empty:
        raise InputError(
            f"data.clients = {clients} with data.labels_per_client = {options.labels_per_client} leaves {empty} "
            f"clients without a label, because each of the {len(data.classes)} classes goes to {per_class}: make "
            "clients x labels_per_client a multiple of the number of classes, or use data.variant = 'shards'."
        )
    return _deal(data, clients, seed, owners)


def _assign_shards(data: Dataset, clients: int, seed: int, shards_per_client: int) -> Assignment:
    rows = np.concatenate(_shuffled_classes(data, seed))
    shards = clients * shards_per_client
    if shards > len(rows):
        raise InputError(f"data.clients = {clients}: {shards} shards need as many samples, but there are {len(rows)}.")
    client_of_shard = stream(seed, "partition").permutation(shards) // shards_per_client
    owner = np.empty(len(data), dtype=np.int64)
    owner[rows] = _equal_cuts(len(rows), client_of_shard)
    return Assignment(owner)


# domain ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DomainOptions:
    """One source of data, one client, as in LG-Mix."""

    clients_per_domain: Annotated[int, Field(ge=1)] = 1  # cut each domain at random into so many equal clients


def _all_domains(data: Dataset, options: DomainOptions) -> int:
    return max(1, len(data.domains)) * options.clients_per_domain


def assign_domain(data: Dataset, clients: int, seed: int, options: DomainOptions) -> Assignment:
    """Client d * k + j is the j-th of the k parts of domain d."""
    parts = options.clients_per_domain
    if data.domain is None:
        raise InputError(f"data.partition = 'domain' needs data with domains, but {data.name} has none.")
    if clients != parts * len(data.domains):
        raise InputError(
            f"data.clients = {clients}, but {data.name} has {len(data.domains)} domains ({', '.join(data.domains)}) "
            f"and data.clients_per_domain = {parts}; allowed: {parts * len(data.domains)}."
        )
    owner = np.empty(len(data), dtype=np.int64)
    for domain, rows in enumerate(rows_by_owner(data.domain, len(data.domains))):
        shuffled = stream(seed, "partition", domain).permutation(rows)
        owner[shuffled] = _equal_cuts(len(rows), domain * parts + np.arange(parts))
    names = data.domains if parts == 1 else tuple(f"{name}-{part}" for name in data.domains for part in range(parts))
    return Assignment(owner, names=names)


# ----------------------------------------------------------------------------------------------------------------------

PARTITIONS: dict[str, Partition] = {
    partition.name: partition
    for partition in (
        Partition("iid", "equal random parts", assign_iid),
        Partition(
            "dirichlet",
            "label skew by Dirichlet(alpha) proportions (PGFed)",
            assign_dirichlet,
            DirichletOptions,
            by_label=True,
        ),
        Partition(
            "labels",
            "a fixed number of labels per client, even (PLGU)",
            assign_labels,
            LabelsOptions,
            stratified=True,
            by_label=True,
        ),
        Partition(
            "pathological",
            "two labels per client (FedPG)",
            assign_pathological,
            PathologicalOptions,
            test=None,
            by_label=True,
        ),
        Partition(
            "domain",
            "one domain per client (LG-Mix)",
            assign_domain,
            DomainOptions,
            test=0.2,
            val=0.2,
            default_clients=_all_domains,
        ),
    )
}
