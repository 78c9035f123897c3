"""PGFed's partition, drawn as its released generator draws it, against facts that its code gave when it was run."""

import hashlib

import numpy as np
import pytest

from bespokefl.data import federate
from bespokefl.errors import InputError

# Run on 60,000 labels 0, 1, ..., classes - 1, 0, 1, ...: the generator's seed 1, Dirichlet(0.3), least 40 samples,
# train share 0.75. (classes, clients): mean share of a client's largest class, sizes of the first clients, smallest and
# largest client, train sizes, and the digest of all sorted train rows (int64, one client after the other).
RECORDED = {
    (10, 25): (0.4647, [1743, 1959, 1220, 2535, 2639, 3981], 66, 3981, [1307, 1469, 915, 1901], "b6a90659109c91f1"),
    (10, 50): (0.4923, [1150, 642, 2043, 556, 526, 1395], 145, 3105, [862, 481, 1532, 417], "174a25941727f2ac"),
    (10, 100): (0.5293, [457, 806, 705, 338, 330, 614], 86, 1514, [342, 604, 528, 253], "8087d188cb1bdeb0"),
    (100, 25): (0.1050, [2327, 2514, 2456, 2480, 2502, 2457], 1919, 2820, [1745, 1885, 1842, 1860], "b11be025972eabd1"),
    (100, 50): (0.1084, [848, 1084, 1247, 1204, 1224, 1260], 848, 1355, [636, 813, 935, 903], "11d254e776f7bfd3"),
    (100, 100): (0.1155, [762, 471, 605, 623, 612, 600], 405, 762, [571, 353, 453, 467], "6a370e491a342d9b"),
}


def released(dataset, clients, **options):
    return federate(dataset, clients, "dirichlet", draw="released", **({"seed": 1, "min_samples": 40} | options))


@pytest.mark.parametrize(("classes", "clients"), RECORDED)
def test_it_is_the_released_partition(make_dataset, classes, clients):
    share, sizes, least, most, train, digest = RECORDED[classes, clients]
    data = released(make_dataset(np.arange(60_000) % classes, classes), clients)
    counts = data.counts("train") + data.counts("test")
    assert (counts.max(1) / counts.sum(1)).mean() == pytest.approx(share, abs=5e-5)
    held = counts.sum(1)
    assert held[:6].tolist() == sizes and (held.min(), held.max()) == (least, most)
    assert data.sizes("train")[:4].tolist() == train
    rows = b"".join(np.sort(rows).astype("<i8").tobytes() for rows in data.splits["train"])
    assert hashlib.sha256(rows).hexdigest()[:16] == digest


def test_sizes_and_shares_do_not_depend_on_the_order_of_labels(make_dataset):
    mixed = make_dataset(np.random.default_rng(0).permutation(60_000) % 10, 10)
    data = released(mixed, 100)
    counts = data.counts("train") + data.counts("test")
    assert (counts.max(1) / counts.sum(1)).mean() == pytest.approx(0.5293, abs=5e-5)
    assert len(np.unique(np.concatenate([*data.splits["train"], *data.splits["test"]]))) == 60_000


def test_small_clients_are_drawn_again_further_along_the_stream(make_dataset):
    labels = np.arange(600) % 6
    data = released(make_dataset(labels, 6), 10, alpha=0.2, min_samples=15, seed=3)
    rng, draws = np.random.RandomState(3), 0
    while True:
        held = [[] for _ in range(10)]
        for label in range(6):
            rows = [row for row in range(600) if labels[row] == label]
            rng.shuffle(rows)
            p = rng.dirichlet([0.2] * 10)
            p = [v if len(own) < 60 else 0.0 for v, own in zip(p, held, strict=True)]
            ends = [int(v * len(rows)) for v in np.cumsum(np.array(p) / sum(p))]
            for own, start, end in zip(held, [0, *ends[:-1]], [*ends[:-1], len(rows)], strict=True):
                own += rows[start:end]
        if min(map(len, held)) >= 15:
            break
        draws += 1
    assert draws > 0 and data.record["partition"]["redraws"] == draws
    for own, train, test in zip(held, data.splits["train"], data.splits["test"], strict=True):
        order = [own[k] for k in rng.permutation(len(own))]
        n_test = len(own) - int(0.75 * len(own))
        assert sorted(order[:n_test]) == test.tolist() and sorted(order[n_test:]) == train.tolist()


def test_what_does_not_go_with_it_is_refused(make_dataset):
    data = make_dataset(np.arange(600) % 6, 6)
    with pytest.raises(InputError, match=r"data.top_up = True beside data.draw = 'released'.*leave data.top_up out"):
        released(data, 10, top_up=True)
    with pytest.raises(InputError, match=r"data.min_samples = 60.*data.alpha = 0.01: use fewer clients"):
        released(data, 10, alpha=0.01, min_samples=60)
    with pytest.raises(InputError, match=r"data\.draw = 'other'"):
        federate(data, 10, "dirichlet", draw="other")
