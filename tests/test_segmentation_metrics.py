import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import directed_hausdorff

from bespokefl.errors import InputError
from bespokefl.evaluation.metrics import averages
from bespokefl.evaluation.segmentation_metrics import boundary, class_masks, dice, hausdorff, segmentation_scores

pairs = st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(
    lambda shape: st.tuples(arrays(np.bool_, shape), arrays(np.bool_, shape))
)


def rim(mask: np.ndarray) -> list[tuple[int, int]]:
    """Pixel by pixel: in the mask, with one of four neighbours outside of it or of the image."""
    inside = {(int(r), int(c)) for r, c in np.argwhere(mask)}
    return [(r, c) for r, c in inside if not {(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)} <= inside]


def by_brute_force(a: np.ndarray, b: np.ndarray) -> float:
    rim_a, rim_b = rim(a), rim(b)
    there = max(min(math.dist(p, q) for q in rim_b) for p in rim_a)
    back = max(min(math.dist(p, q) for q in rim_a) for p in rim_b)
    return max(there, back)


def square(top: int, left: int, size: int, image: int = 20) -> np.ndarray:
    mask = np.zeros((image, image), dtype=bool)
    mask[top : top + size, left : left + size] = True
    return mask


@given(pairs)
def test_hausdorff_is_brute_force_and_scipy(masks: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = masks
    if not a.any() or not b.any():
        expected = math.hypot(*a.shape) if a.any() or b.any() else 0
    else:
        expected = by_brute_force(a, b)
        points = [np.array(rim(mask)) for mask in masks]
        assert max(directed_hausdorff(*points)[0], directed_hausdorff(*points[::-1])[0]) == pytest.approx(expected)
    assert hausdorff(a, b) == pytest.approx(expected, abs=1e-12)
    assert hausdorff(b, a) == hausdorff(a, b)
    assert (hausdorff(a, b) == 0) == np.array_equal(a, b)


def test_hausdorff_of_large_images_is_scipys() -> None:
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:256, :256]
    for _ in range(5):
        centre, other, (r, s) = rng.integers(60, 200, 2), rng.integers(60, 200, 2), rng.integers(10, 80, 2)
        a = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < r**2
        b = np.maximum(abs(rows - other[0]), abs(columns - other[1])) < s
        points = [np.argwhere(boundary(mask)) for mask in (a, b)]
        expected = max(directed_hausdorff(*points)[0], directed_hausdorff(*points[::-1])[0])
        assert hausdorff(a, b) == pytest.approx(expected, abs=1e-12)


def test_hausdorff_is_of_boundaries_not_of_masks() -> None:
    full = square(2, 2, 15)
    hollow = full & ~square(9, 9, 1)
    # From the hole's rim, 6 pixels inside, to the outer boundary; every pixel of one mask is within 1 of the other's.
    assert hausdorff(full, hollow) == 6


def test_hausdorff_by_hand() -> None:
    assert hausdorff(square(3, 3, 4), square(6, 7, 4)) == 5  # shifted by 3 and 4
    assert hausdorff(square(2, 2, 1), square(2, 2, 10)) == pytest.approx(9 * math.sqrt(2))
    assert hausdorff(square(4, 4, 10), square(7, 7, 4)) == pytest.approx(3 * math.sqrt(2))


@pytest.mark.parametrize("swap", [False, True])
def test_an_empty_mask_is_a_diagonal_away(swap: bool) -> None:
    masks = np.zeros((256, 256), dtype=bool), square(100, 90, 5, image=256)
    a, b = masks[::-1] if swap else masks
    assert hausdorff(a, b) == pytest.approx(362.04, abs=0.005)
    assert dice(a, b) == 0
    assert hausdorff(np.zeros((3, 4), dtype=bool), np.eye(3, 4, dtype=bool)) == 5


def test_two_empty_masks_agree() -> None:
    nothing = np.zeros((256, 256), dtype=bool)
    assert (dice(nothing, nothing), hausdorff(nothing, nothing)) == (1, 0)


def test_boundary_of_the_whole_image_is_its_frame() -> None:
    assert boundary(np.ones((4, 5), dtype=bool)).sum() == 14
    assert boundary(square(5, 5, 5)).sum() == 16
    with_diagonal_gap = square(5, 5, 5) & ~square(5, 5, 1)  # a gap at the corner makes nothing inside a boundary
    assert not boundary(with_diagonal_gap)[6, 6]


@given(pairs)
def test_dice_by_counting(masks: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = ({tuple(p) for p in np.argwhere(mask)} for mask in masks)
    expected = 2 * len(a & b) / (len(a) + len(b)) if a or b else 1
    assert dice(*masks) == pytest.approx(expected)
    assert dice(*(mask.astype(np.float32) for mask in masks)) == dice(*masks)  # 0 and 1 in any type


def test_dice_by_hand() -> None:
    assert dice(square(0, 0, 2), square(0, 1, 2)) == 2 * 2 / 8


def test_one_value_per_image_and_class() -> None:
    rng = np.random.default_rng(0)
    labels, answers = rng.integers(0, 3, size=(2, 4, 8, 9))
    truth, predicted = class_masks(labels, [1, 2]), class_masks(answers, [1, 2])
    assert truth.shape == (4, 2, 8, 9)
    for metric in (dice, hausdorff):
        table = metric(predicted, truth)
        assert table.shape == (4, 2)
        for image, k in np.ndindex(4, 2):
            assert table[image, k] == metric(answers[image] == k + 1, labels[image] == k + 1)


def test_clients_count_the_same_whatever_their_number_of_images() -> None:
    blob, away, nothing = square(3, 3, 4), square(6, 7, 4), np.zeros((20, 20), dtype=bool)
    truth = [np.stack([blob, nothing])[:, None], blob[None, None], np.zeros((0, 1, 20, 20))]
    predicted = [np.stack([away, nothing])[:, None], blob[None, None], np.zeros((0, 1, 20, 20))]
    scores = segmentation_scores(predicted, truth)
    np.testing.assert_allclose(scores.dice, [(0 + 1) / 2, 1, np.nan])
    np.testing.assert_allclose(scores.hausdorff, [(5 + 0) / 2, 0, np.nan])
    figures = averages(scores._asdict())
    assert figures["dice"] == (0.75, 0.25, 1)
    assert figures["hausdorff"] == (1.25, 1.25, 1)


def test_refusals() -> None:
    mask = np.ones((4, 4), dtype=bool)
    with pytest.raises(InputError, match=r"\(4, 4\) against \(4, 3\)"):
        dice(mask, mask[:, :3])
    with pytest.raises(InputError, match="height and width"):
        hausdorff(mask[0], mask[0])
    with pytest.raises(InputError, match="0 and 1 only"):
        dice(mask * 0.7, mask)
    with pytest.raises(InputError, match="0 and 1 only"):
        hausdorff(mask, mask * 2)
    with pytest.raises(InputError, match="2 clients against the truth of 1"):
        segmentation_scores([mask, mask], [mask])
    with pytest.raises(InputError, match="height and width"):
        class_masks([0, 1], [1])
