"""What each client's data look like: labels per client, of every seed."""

from bespokefl.report.gather import Comparison, Problem
from bespokefl.report.tables import Table, plain, stack
from bespokefl.results.partition import Partition, read_partition


def labels_table(comparison: Comparison) -> tuple[Table, list[Problem]]:
    """A row for each seed, client and label that the client has; and what could not be read."""
    parts, problems = [], []
    for path in sorted(comparison.folder.glob("partition-seed-*.csv")):
        seed = path.stem.rpartition("-")[2]
        if not seed.isdecimal():
            continue
        try:
            partition = read_partition(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            problems.append(Problem(f"partition of seed {seed}", f"{path.name} is damaged ({error}); it is not drawn."))
            continue
        if partition.labels:
            parts.append(_rows(partition, int(seed), comparison.malicious.get(int(seed), set())))
    return stack(parts), problems


def _rows(partition: Partition, seed: int, malicious: set[int]) -> Table:
    clients, labels = partition.total.nonzero()
    return {
        "seed": [seed] * len(clients),
        "client": plain(clients),
        "name": [_name(partition.names[client], int(client), client in malicious) for client in clients],
        "label": [partition.labels[label] for label in labels],
        "samples": plain(partition.total[clients, labels]),
        **{
            split: plain(partition.splits[split][clients, labels])
            if split in partition.splits
            else [None] * len(clients)
            for split in ("train", "test")
        },
    }


def _name(name: str, client: int, malicious: bool) -> str:
    shown = str(client) if name in (str(client), f"{client}.0") else f"{client} {name}"
    return f"{shown} (attacks)" if malicious else shown
