"""The one call from a dataset's name to the clients' data."""

from dataclasses import asdict, replace

import numpy as np
import torch

from bespokefl.data.dataset import Dataset
from bespokefl.data.federated import FederatedData
from bespokefl.data.held_out import HoldOut
from bespokefl.data.normalisation import NORMALISATIONS, normalise_and_tell
from bespokefl.data.options import lookup, option_names, parse_options, unknown_option
from bespokefl.data.partitions import PARTITIONS, Partition, rows_by_owner
from bespokefl.data.sources import SOURCES, load_dataset
from bespokefl.data.splits import split_clients
from bespokefl.errors import InputError


def load(
    source: str = "digits",
    clients: int | None = None,
    partition: str = "dirichlet",
    *,
    root: str | None = None,
    seed: int = 0,
    normalize: str = "unit",
    test: float | None = None,
    val: float | None = None,
    max_samples: int | None = None,
    held_out: HoldOut | None = None,
    **options: object,
) -> FederatedData:
    """Load a dataset and cut it into clients.

    `clients` is 20 unless given (partition `domain`: as many as there are domains); `test` and `val` are fractions of
    each client's samples, the partition's own unless given; `max_samples` thins the pooled data first; `held_out` keeps
    clients out, which are in the result's field of that name. Further options belong to the source or the partition:
    `SOURCES[name].options` and `PARTITIONS[name].options` list them.

    >>> data = bfl.load("digits", clients=5, partition="labels", labels_per_client=2, max_samples=300)
    >>> data.clients, data.input_shape
    (5, (1, 8, 8))
    """
    source_keys = option_names(lookup("data.source", source, SOURCES).options)
    partition_keys = option_names(lookup("data.partition", partition, PARTITIONS).options)
    lookup("data.normalize", normalize, NORMALISATIONS)
    for key, value in options.items():
        if key not in source_keys + partition_keys:
            owner = f"source {source!r} or partition {partition!r}"
            raise unknown_option(key, value, owner, source_keys + partition_keys)
    of_partition = {key: value for key, value in options.items() if key in partition_keys}
    of_source = {key: value for key, value in options.items() if key in source_keys}

    dataset = load_dataset(source, root, **of_source)
    if max_samples is not None:
        dataset = dataset.sample(max_samples, seed)
    keys = {"seed": seed, "normalize": normalize, "test": test, "val": val, "held_out": held_out}
    data = federate(dataset, clients, partition, **keys, **of_partition)  # type: ignore[arg-type]
    data.record["source"] |= {"kind": source, "options": of_source, "max_samples": max_samples}
    return data


def federate(
    dataset: Dataset,
    clients: int | None = None,
    partition: str = "dirichlet",
    *,
    seed: int = 0,
    normalize: str = "unit",
    test: float | None = None,
    val: float | None = None,
    held_out: HoldOut | None = None,
    **options: object,
) -> FederatedData:
    """Cut a dataset that is already in memory into clients; arguments as in `load`."""
    scheme = lookup("data.partition", partition, PARTITIONS)
    chosen = parse_options(scheme.options, options, f"partition {partition!r}")
    if scheme.by_label and dataset.has_masks:
        allowed = ", ".join(other.name for other in PARTITIONS.values() if not other.by_label)
        raise InputError(
            f"data.partition = {partition!r} deals samples by their label, but those of {dataset.name} are masks; "
            f"allowed: {allowed}."
        )
    count = scheme.default_clients(dataset, chosen) if clients is None else clients
    _check_client_count(count, dataset)
    assignment = scheme.assign(dataset, count, seed, chosen)
    names = assignment.names or tuple(str(client) for client in range(count))
    test_used, val_used = _fractions(scheme, dataset, test, val)
    rows = assignment.drawn or rows_by_owner(assignment.owner, count)
    labels = dataset.labels if scheme.stratified else None
    shuffled = assignment.drawn is not None
    splits = split_clients(rows, names, test_used, val_used, seed, labels, shuffled=shuffled)
    record = {
        "source": {"name": dataset.name, "samples": len(dataset), "note": dataset.note},
        "partition": {"name": partition, "clients": count, "seed": seed} | asdict(chosen) | assignment.details,
        "split": {"test": test_used, "val": val_used, "stratified": scheme.stratified},
        "normalize": normalize,
    }
    new = np.arange(0) if held_out is None else held_out.ids(count, seed)
    train = np.delete(np.arange(count), new)
    x, moments = normalise_and_tell(dataset.x, normalize, np.concatenate([splits["train"][i] for i in train]))
    record |= {"moments": moments, "training": train.tolist(), "held_out": new.tolist()}
    y = torch.from_numpy(dataset.y)
    whole = FederatedData(x, y, splits, dataset.classes, names, record, inputs=dataset.inputs)
    return whole if held_out is None else replace(whole.only(train), held_out=whole.only(new))


def _check_client_count(clients: int, dataset: Dataset) -> None:
    if not 1 <= clients <= len(dataset) // 2:
        raise InputError(
            f"data.clients = {clients}: {dataset.name} has {len(dataset)} samples and every client needs one to train "
            f"and one to test; allowed: 1 to {len(dataset) // 2}."
        )


def _fractions(scheme: Partition, dataset: Dataset, test: float | None, val: float | None) -> tuple[float, float]:
    """The test and validation fractions: given, else the partition's, else the dataset's official test share."""
    official = 0.25 if dataset.is_test is None or not dataset.is_test.any() else float(dataset.is_test.mean())
    default = official if scheme.test is None else scheme.test
    return default if test is None else test, scheme.val if val is None else val
