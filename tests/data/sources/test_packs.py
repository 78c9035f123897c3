"""The real data packs, where they are present: counts and pixel statistics published with them."""

import numpy as np
import pytest

from bespokefl.data import load, load_dataset

TRAIN, TEST = 0, 1
COUNTS = {
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "usps": ([1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644], [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]),
    "svhn": ([484, 1371, 1075, 846, 748, 710, 603, 601, 520, 480], [121, 388, 298, 194, 177, 184, 139, 130, 107, 122]),
    "mnistm": ([493, 571, 495, 541, 492, 451, 475, 489, 478, 515], [159, 179, 159, 142, 146, 144, 138, 144, 136, 153]),
    "organamnist": (
        [255, 183, 168, 196, 502, 478, 849, 517, 511, 378, 463],
        [96, 53, 61, 62, 193, 159, 272, 137, 153, 148, 166],
    ),
}
SHAPES = {"mnist": (1, 28, 28), "usps": (1, 16, 16), "svhn": (3, 32, 32), "mnistm": (3, 32, 32)}


@pytest.mark.parametrize("source", COUNTS)
def test_class_counts(pack, source):
    data = load_dataset(source, pack)
    assert np.bincount(data.y[~data.is_test]).tolist() == COUNTS[source][TRAIN]
    assert np.bincount(data.y[data.is_test]).tolist() == COUNTS[source][TEST]
    assert data.x.shape[1:] == SHAPES.get(source, (1, 28, 28)) and data.x.dtype == np.uint8
    if source == "mnist":
        train = data.x[~data.is_test] / 255
        assert (train.mean(), train.std()) == pytest.approx((0.13066, 0.30811), abs=1e-5)


def test_cifar10(pack):
    data = load_dataset("cifar10", pack)
    assert np.bincount(data.y[~data.is_test]).tolist() == [5000] * 10
    assert np.bincount(data.y[data.is_test]).tolist() == [1000] * 10
    assert data.classes[:2] == ("airplane", "automobile")
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(3):
        share = np.bincount(data.x[:50000, channel].ravel(), minlength=256) / (50000 * 1024)
        means.append(share @ values)
        stds.append(np.sqrt(share @ values**2 - means[-1] ** 2))
    assert means == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)
    assert stds == pytest.approx([0.24703, 0.24349, 0.26159], abs=1e-5)


def test_office_caltech10(pack):
    data = load_dataset("office-caltech10", pack)
    counts = [np.bincount(data.y[data.domain == domain]).tolist() for domain in range(4)]
    assert data.domains == ("amazon", "caltech", "dslr", "webcam") and data.x.shape == (2533, 3, 64, 64)
    assert counts == [
        [92, 82, 94, 99, 100, 100, 99, 100, 94, 98],
        [151, 110, 100, 138, 85, 128, 133, 94, 87, 97],
        [12, 21, 12, 13, 10, 24, 22, 12, 8, 23],
        [29, 21, 31, 27, 27, 30, 43, 30, 27, 30],
    ]


def test_digits5_as_clients(pack):
    data = load("digits5", partition="domain", root=pack, per_domain=500)
    assert data.client_names == ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST-M")
    assert data.input_shape == (3, 28, 28)
    assert data.sizes("train").tolist() == [300] * 5 and data.sizes("val").tolist() == [100] * 5
    assert data.record["source"]["note"] == "SynthDigits is drawn (source synth-digits), not the published set"
