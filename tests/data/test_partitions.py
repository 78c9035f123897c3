import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bespokefl.core import InputError, stream
from bespokefl.data import PARTITIONS, federate
from bespokefl.data.partitions import label_incidence


@pytest.fixture
def ten_classes(make_dataset):
    """6,000 rows, 600 per class, a sixth of them official test rows, five domains."""
    y = np.random.default_rng(1).permutation(np.arange(6000) % 10)
    domain = np.sort(np.arange(6000) % 5)
    return make_dataset(
        y, 10, is_test=np.arange(6000) >= 5000, domain=domain, domains=("amber", "blue", "coral", "dun", "ebony")
    )


def label_sets(data):
    return [set(np.flatnonzero(row)) for row in data.counts("train") + data.counts("test")]


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_row_once_and_the_same_for_the_same_seed(ten_classes, name):
    first, again, other = (federate(ten_classes, partition=name, seed=seed) for seed in (0, 0, 1))
    used = np.concatenate([rows for split in first.splits.values() for rows in split])
    assert len(set(used)) == len(used) == 6000
    for split in first.splits:
        assert all((a == b).all() for a, b in zip(first.splits[split], again.splits[split], strict=True))
    differs = [set(a) != set(b) for a, b in zip(first.splits["train"], other.splits["train"], strict=True)]
    assert all(differs)
    assert first.sizes("train").min() >= 1 and first.sizes("test").min() >= 1
    assert first.record["partition"]["name"] == name and first.record["partition"]["seed"] == 0


def test_iid_is_even_in_size_and_labels(ten_classes):
    data = federate(ten_classes, 7, "iid")
    sizes = data.sizes("train") + data.sizes("test")
    assert set(sizes) <= {857, 858}
    assert np.abs((data.counts("train") / data.sizes("train")[:, None]) - 0.1).max() < 0.05


def reference_dirichlet(y, clients, alpha, least, seed):
    """The published procedure with plain lists."""
    for attempt in range(1000):
        rng = stream(seed, "partition", attempt)
        held = [[] for _ in range(clients)]
        for label in range(y.max() + 1):
            rows = stream(seed, "partition-class", label).permutation(np.flatnonzero(y == label))
            share = rng.dirichlet([alpha] * clients)
            share = np.array([p * (len(own) < len(y) / clients) for p, own in zip(share, held, strict=True)])
            cuts = (np.cumsum(share / share.sum()) * len(rows)).astype(int)[:-1]
            held = [own + part.tolist() for own, part in zip(held, np.split(rows, cuts), strict=True)]
        if min(len(own) for own in held) >= least:
            return held, attempt
    raise AssertionError("no draw")


@pytest.mark.parametrize(("clients", "alpha", "seed"), [(20, 0.3, 0), (20, 0.3, 1), (50, 1.0, 0), (5, 0.1, 2)])
def test_dirichlet_is_the_published_procedure(ten_classes, clients, alpha, seed):
    data = federate(ten_classes, clients, "dirichlet", seed=seed, alpha=alpha)
    least = min(40, 6000 // (4 * clients))
    expected, redraws = reference_dirichlet(ten_classes.y, clients, alpha, least, seed)
    for client, rows in enumerate(expected):
        own = np.concatenate([data.splits["train"][client], data.splits["test"][client]])
        assert sorted(own) == sorted(rows)
    assert data.record["partition"]["min_samples"] == least
    assert data.record["partition"]["redraws"] == redraws
    np.testing.assert_array_equal(
        data.sizes("train"), [int(0.75 * len(rows)) for rows in expected]
    )  # 75/25, train rounded down


def test_dirichlet_train_and_test_have_the_same_distribution(ten_classes):
    data = federate(ten_classes, 10, "dirichlet", alpha=1.0)
    train = data.counts("train") / data.sizes("train")[:, None]
    test = data.counts("test") / data.sizes("test")[:, None]
    apart = np.abs(train[:, None] - test[None]).sum(-1)  # total variation of every train to every test distribution
    assert (apart.argmin(axis=1) == np.arange(10)).all()
    assert np.diag(apart).max() < 0.3 < np.median(apart)


def test_dirichlet_redraws_are_bounded_and_top_up_fills_small_clients(ten_classes):
    with pytest.raises(
        InputError, match=r"data\.clients = 100.*data\.min_samples = 55.*data\.alpha = 0\.05.*data\.top_up"
    ):
        federate(ten_classes, 100, "dirichlet", alpha=0.05, min_samples=55)
    data = federate(ten_classes, 100, "dirichlet", alpha=0.05, min_samples=55, top_up=True)
    sizes = data.sizes("train") + data.sizes("test")
    assert sizes.min() >= 55 and sizes.sum() == 6000
    assert data.record["partition"]["moved"] > 0
    with pytest.raises(InputError, match=r"data\.min_samples = 61.*needs 6100.*has 6000"):
        federate(ten_classes, 100, "dirichlet", min_samples=61)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_incidence_margins(data):
    classes = data.draw(st.integers(1, 30))
    per_client = data.draw(st.integers(1, classes))
    clients = data.draw(st.integers(1, 60))
    incidence = label_incidence(clients, classes, per_client, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert set(np.unique(incidence)) <= {0, 1}
    assert (incidence.sum(axis=1) == per_client).all()
    assert np.ptp(incidence.sum(axis=0)) <= 1


def test_labels_are_exact_equal_and_random_looking(ten_classes):
    data = federate(ten_classes, 100, "labels", labels_per_client=3)
    owned = label_sets(data)
    assert all(len(labels) == 3 for labels in owned)
    assert set(Counter(label for labels in owned for label in labels).values()) == {30}
    assert set(data.sizes("train") + data.sizes("test")) == {60}
    assert ((data.counts("test") > 0) == (data.counts("train") > 0)).all()  # stratified: test shows the same labels
    assert set(data.counts("test")[data.counts("test") > 0]) == {5}
    assert len({frozenset(labels) for labels in owned}) > 50


def test_labels_leave_classes_without_owner_unused(ten_classes):
    data = federate(ten_classes, 2, "labels", labels_per_client=3)
    assert data.record["partition"]["unused_samples"] == 4 * 600
    assert (data.sizes("train") + data.sizes("test")).tolist() == [1800, 1800]


def test_pathological_code_hands_classes_to_contiguous_clients(ten_classes):
    data = federate(ten_classes, 20, "pathological")
    pairs = [{0, 1}] * 4 + [{2, 3}] * 4 + [{4, 5}] * 4 + [{6, 7}] * 4 + [{8, 9}] * 4
    assert label_sets(data) == pairs
    assert set(data.sizes("train")) == {250} and set(data.sizes("test")) == {50}  # the official 5/6 and 1/6
    assert data.record["split"]["test"] == pytest.approx(1 / 6)


def test_pathological_code_gives_the_last_clients_fewer_labels_when_it_does_not_divide(ten_classes, make_dataset):
    three = make_dataset(np.arange(90) % 3, 3)
    assert label_sets(federate(three, 4, "pathological")) == [{0, 1}, {0, 1}, {2}, {2}]  # 2 * 4 // 3 clients a class
    with pytest.raises(InputError, match=r"data\.clients = 18 .* leaves 3 clients without a label"):
        federate(ten_classes, 18, "pathological")


def test_pathological_shards_are_two_sorted_pieces(ten_classes):
    data = federate(ten_classes, 100, "pathological", variant="shards")
    assert set(data.sizes("train") + data.sizes("test")) == {60}
    assert max(len(labels) for labels in label_sets(data)) == 2
    assert len({frozenset(labels) for labels in label_sets(data)}) > 20


def test_domain_is_one_client_each_60_20_20(ten_classes):
    data = federate(ten_classes, partition="domain")
    assert data.client_names == ("amber", "blue", "coral", "dun", "ebony")
    for client in range(5):
        parts = [data.splits[split][client] for split in ("train", "val", "test")]
        assert [len(part) for part in parts] == [720, 240, 240]
        assert set(ten_classes.domain[np.concatenate(parts)]) == {client}
    cut = federate(ten_classes, 15, "domain", clients_per_domain=3)
    assert cut.client_names[:4] == ("amber-0", "amber-1", "amber-2", "blue-0")
    assert set(cut.sizes("train")) == {240}


@pytest.mark.parametrize(
    ("clients", "partition", "options", "message"),
    [
        (3001, "iid", {}, r"data\.clients = 3001.*allowed: 1 to 3000"),
        (0, "iid", {}, r"data\.clients = 0"),
        (4, "domain", {}, r"data\.clients = 4, but toy has 5 domains .*allowed: 5"),
        (10, "labels", {"labels_per_client": 11}, r"data\.labels_per_client = 11.*allowed: 1 to 10"),
        (10, "pathological", {"labels_per_client": 11}, r"data\.labels_per_client = 11"),
        (4, "pathological", {}, r"data\.clients = 4 .* without a label"),
        (3000, "labels", {"labels_per_client": 3}, r"data\.clients = 3000: class '0' has 600 samples for the 900"),
        (3000, "pathological", {"variant": "shards", "labels_per_client": 3}, "9000 shards"),
        (10, "dirichlet", {"alpha": 0}, r"data\.alpha = 0 .*greater than 0"),
        (10, "dirichlet", {"min_samples": "many"}, r"data\.min_samples = 'many'"),
        (10, "pathological", {"variant": "cod"}, r"data\.variant = 'cod'.*'code' or 'shards'"),
        (10, "iid", {"alpha": 1}, r"data\.alpha = 1: .*partition 'iid'.*Allowed: none"),
        (10, "dirichlett", {}, r"data\.partition = 'dirichlett'.*Did you mean dirichlet"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(ten_classes, clients, partition, options, message):
    with pytest.raises(InputError, match=message):
        federate(ten_classes, clients, partition, **options)


def test_domain_needs_domains(make_dataset):
    with pytest.raises(InputError, match=r"data\.partition = 'domain' needs data with domains, but toy has none"):
        federate(make_dataset(np.arange(20) % 2, 2), partition="domain")


@pytest.mark.parametrize(
    ("partition", "options"),
    [("iid", {}), ("dirichlet", {"top_up": True}), ("labels", {}), ("pathological", {})],
)
def test_ten_thousand_clients_take_seconds(make_dataset, partition, options):
    data = make_dataset(np.random.default_rng(0).integers(0, 10, 200_000), 10)
    start = time.process_time()
    federated = federate(data, 10_000, partition, **options)
    assert (federated.counts("train") + federated.counts("test")).sum() == 200_000
    assert time.process_time() - start < 10
