"""Synthetic digits: the same for the same seed, balanced, readable."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import label
from scipy.spatial.distance import cdist
from sklearn.linear_model import LogisticRegression
from torch import nn
from typer.testing import CliRunner

from bespokefl.cli import app
from bespokefl.data import SOURCES, load, load_dataset, synth_digits
from bespokefl.data.synthdigits import backgrounds, colours, skeletons, typefaces
from bespokefl.errors import InputError

PINNED_LABELS = [8, 5, 9]
PINNED_QUARTERS = [  # of the colours red, green, blue
    [120.7, 130.0, 122.1, 121.8, 168.1, 152.5, 177.4, 151.2, 86.2, 121.8, 77.2, 103.0],
    [143.0, 65.7, 169.7, 107.2, 67.8, 70.3, 68.6, 78.5, 78.1, 71.7, 81.9, 84.2],
    [167.7, 151.9, 128.4, 149.2, 110.6, 133.2, 98.2, 135.1, 81.7, 139.0, 135.8, 145.8],
]
FACES = {face.name: face for face in typefaces.TYPEFACES}


# drawing --------------------------------------------------------------------------------------------


def test_images_and_labels() -> None:
    x, y = synth_digits(40, seed=3, size=24)
    assert x.shape == (40, 3, 24, 24) and x.dtype == np.uint8
    assert y.shape == (40,) and y.dtype == np.int64
    for ten in range(4):
        assert sorted(y[10 * ten : 10 * ten + 10]) == list(range(10))
    orders = {tuple(y[10 * ten : 10 * ten + 10]) for ten in range(4)}
    assert len(orders) == 4  # the digit cannot be told from the image's number


def test_the_first_images_do_not_depend_on_how_many_there_are() -> None:
    few, few_labels = synth_digits(7, seed=1)
    many, many_labels = synth_digits(23, seed=1)
    np.testing.assert_array_equal(few, many[:7])
    np.testing.assert_array_equal(few_labels, many_labels[:7])


def test_other_seeds_give_other_images() -> None:
    seen = np.concatenate([synth_digits(20, seed)[0] for seed in range(3)])
    assert len({image.tobytes() for image in seen}) == 60


def test_the_images_stay_those_that_they_were() -> None:
    """Means over quarters of the first images; loose, as a sine's or a filter's last bit may differ by machine."""
    x, y = synth_digits(3, seed=0)
    quarters = x.reshape(3, 3, 2, 16, 2, 16).mean(axis=(3, 5)).reshape(3, 12)
    assert y.tolist() == PINNED_LABELS
    np.testing.assert_allclose(quarters, PINNED_QUARTERS, atol=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "n = 0: the number of images must be at least 1"),
        ((5, -1), "seed = -1: must not be negative"),
        ((5, 0, 8), "size = 8: allowed are 16 to 512 pixels"),
    ],
)
def test_what_cannot_be_drawn(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        synth_digits(*arguments)


# the parts ------------------------------------------------------------------------------------------


def test_a_round_pen_measures_the_distance_to_the_lines() -> None:
    """The one of `sans`: two straight lines, distances by projection."""
    corners = np.array([[10, 24], [34, 0], [34, 100]], dtype=float)
    points = np.random.default_rng(0).uniform([-20, -20], [80, 120], (200, 2))
    nearest = np.full(200, np.inf)
    for a, b in pairwise(corners):
        along = ((points - a) @ (b - a) / ((b - a) @ (b - a))).clip(0, 1)
        nearest = np.minimum(nearest, np.linalg.norm(points - a - along[:, None] * (b - a), axis=1))
    found = typefaces.distances(FACES["sans"], 1, points[:, 0], points[:, 1])
    np.testing.assert_allclose(found, nearest, atol=0.7)  # points of the field are 2 apart, those of a line 1


@pytest.mark.parametrize(("name", "metric"), [("octagon", "chebyshev"), ("segments", "cityblock")])
def test_pens_that_are_not_round(name: str, metric: str) -> None:
    points = np.random.default_rng(1).uniform([-20, -20], [80, 120], (100, 2))
    for digit in (2, 8):
        line = skeletons.points_of(FACES[name].paths[digit])
        found = typefaces.distances(FACES[name], digit, points[:, 0], points[:, 1])
        np.testing.assert_allclose(found, cdist(points, line, metric).min(axis=1), atol=1.5)


def test_a_flat_pen_draws_thin_horizontals_and_thick_verticals() -> None:
    roman = FACES["roman"]  # the foot of its one lies at y = 100, the stem at x = 33
    beside, below = typefaces.distances(roman, 1, np.array([38.0, 20.0]), np.array([50.0, 105.0]))
    assert below / beside == pytest.approx(roman.flatness, rel=0.02)


@pytest.mark.parametrize("face", typefaces.TYPEFACES, ids=lambda face: face.name)
def test_typefaces_fill_their_box_with_ten_different_digits(face: typefaces.Typeface) -> None:
    assert len(face.paths) == 10 and face.weights[0] < face.weights[1]
    x, y = np.meshgrid(np.arange(-10.0, 71.0), np.arange(-10.0, 111.0))
    drawn = np.array([typefaces.distances(face, digit, x, y) < face.weights[1] for digit in range(10)])
    for digit, path in enumerate(face.paths):
        line = skeletons.points_of(path)
        assert line.min() >= -6 and (line.max(axis=0) <= [66, 106]).all(), digit
        assert np.ptp(line[:, 1]) > 80, digit
    differing = [(a != b).mean() for i, a in enumerate(drawn) for b in drawn[:i]]
    assert min(differing) > 0.015


@pytest.mark.parametrize("face", [face for face in typefaces.TYPEFACES if face.hollow], ids=lambda face: face.name)
def test_strokes_hold_together_and_leave_holes_open(face: typefaces.Typeface) -> None:
    holes = [1, 0, 0, 0, 0 if face.paths is skeletons.HAND else 1, 0, 1, 0, 2, 1]
    x, y = np.meshgrid(np.arange(-30.0, 91.0), np.arange(-30.0, 131.0))
    for weight in face.weights:
        for digit in range(10):
            drawn = typefaces.distances(face, digit, x, y) < weight
            assert label(drawn, np.ones((3, 3)))[1] == 1, (digit, weight)
            assert label(~drawn)[1] == holes[digit] + 1, (digit, weight)


def test_colours_keep_their_distance() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        ground, contrast = rng.random(3), 0.2 + 0.3 * rng.random()
        other = colours.contrasting(ground, contrast, rng)
        assert other.min() >= 0 and other.max() <= 1
        assert abs(colours.brightness(other) - colours.brightness(ground)) == pytest.approx(contrast)
    assert colours.brightness(colours.contrasting(np.full(3, 0.4), 0.9, rng)) == pytest.approx(1)  # no more room


@pytest.mark.parametrize("pattern", backgrounds.PATTERNS, ids=lambda pattern: pattern.__name__)
def test_patterns_mix_from_0_to_1(pattern: backgrounds.Pattern) -> None:
    drawn = np.array([pattern(20, np.random.default_rng(seed)) for seed in range(8)])
    assert drawn.shape == (8, 20, 20) and drawn.min() >= 0 and drawn.max() <= 1
    assert (len(np.unique(drawn, axis=0)) == 8) is (pattern is not backgrounds.plain)


# learning -------------------------------------------------------------------------------------------


def edge_directions(x: np.ndarray, cells: int = 8) -> np.ndarray:
    """Histograms of the edges' directions in cells of the image: plain features that ignore colour."""
    grey = x.mean(axis=1)
    down, right = np.gradient(grey, axis=1), np.gradient(grey, axis=2)
    strength, direction = np.hypot(down, right), (np.arctan2(down, right) % np.pi / np.pi * 8).astype(int) % 8
    n, side = len(x), x.shape[2] // cells
    planes = np.stack([np.where(direction == k, strength, 0) for k in range(8)], axis=1)
    found = planes.reshape(n, 8, cells, side, cells, side).sum(axis=(3, 5)).reshape(n, -1)
    return np.sqrt(found / found.sum(axis=1, keepdims=True))


def test_a_classifier_learns_to_read_images_of_another_seed() -> None:
    x, y = synth_digits(2000, seed=0)
    unseen, truth = synth_digits(500, seed=1)
    model = LogisticRegression(C=30, max_iter=200).fit(edge_directions(x), y)
    right = model.predict(edge_directions(unseen)) == truth
    assert right.mean() > 0.85
    assert min(right[truth == digit].mean() for digit in range(10)) > 0.6  # chance: 0.1


@pytest.mark.slow
def test_a_network_reads_nearly_all() -> None:
    torch.manual_seed(0)
    x, y = (torch.from_numpy(values) for values in synth_digits(8000, seed=0))
    unseen, truth = (torch.from_numpy(values) for values in synth_digits(1000, seed=1))
    channels = (3, 32, 64, 96)
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
        for i, o in pairwise(channels)
    ]
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(96 * 16, 10))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(4):
        for rows in torch.randperm(len(y)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows] / 255 - 0.5), y[rows]).backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        assert (net(unseen / 255 - 0.5).argmax(1) == truth).float().mean() > 0.93


# the source -----------------------------------------------------------------------------------------


def test_the_source_draws_the_same_images() -> None:
    data = load_dataset("synth-digits", samples=30, size=20, draw_seed=4)
    x, y = synth_digits(30, 4, 20)
    np.testing.assert_array_equal(data.x, x)
    np.testing.assert_array_equal(data.y, y)
    assert data.classes == tuple("0123456789") and data.is_test is None


def test_as_clients() -> None:
    data = load("synth-digits", 3, "iid", samples=60)
    assert data.input_shape == (3, 32, 32) and data.sizes("train").tolist() == [15] * 3


@pytest.mark.parametrize(("option", "value"), [("size", 8), ("samples", 0), ("draw_seed", -1)])
def test_options_out_of_range(option: str, value: int) -> None:
    with pytest.raises(InputError, match=rf"data\.{option} = {value}"):
        load_dataset("synth-digits", **{option: value})


def test_a_run_says_that_a_domain_is_drawn(tmp_path: Path) -> None:
    x, y = synth_digits(30, seed=9, size=28)
    np.savez(tmp_path / "mnist.npz", x_train=x[:20, 0], y_train=y[:20], x_test=x[20:, 0], y_test=y[20:])
    keys = ["data.source=digits5", f"data.root={tmp_path}", "data.partition=domain", "data.per_domain=20"]
    keys += ["data.clients=2", "model.name=linear", "train.rounds=1", "algorithms=[fedavg]", "seeds=[0]"]
    options = [word for key in keys for word in ("--set", key)]
    done = CliRunner().invoke(app, ["run", *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "out" / "fedavg" / "seed-0" / "summary.json").read_text())
    note = "SynthDigits is drawn (source synth-digits), not the published set"
    assert summary["data_note"] == f"{note}; domains not found and left out: SVHN, USPS, MNIST-M"
    assert f"data: {note}" in done.output + done.stderr


def test_digits5_takes_the_first_domains_that_are_asked_for(tmp_path: Path) -> None:
    x, y = synth_digits(30, seed=9, size=28)
    for name in ("mnist", "usps"):
        np.savez(tmp_path / f"{name}.npz", x_train=x[:20, 0], y_train=y[:20], x_test=x[20:, 0], y_test=y[20:])
    source = SOURCES["digits5"]
    options = source.options(per_domain=20, domains=4)
    with pytest.raises(InputError, match=r"data\.domains = 4 asks for MNIST, SVHN, USPS, SynthDigits.*svhn"):
        source.load(tmp_path, options)
    every = source.load(tmp_path, source.options(per_domain=20))
    assert every.domains == ("MNIST", "USPS", "SynthDigits")
