"""Against scikit-learn, client by client, while all clients are computed at once."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn.metrics import accuracy_score, f1_score, recall_score, roc_auc_score

from bespokefl.errors import InputError
from bespokefl.evaluation.binary_metrics import auc, binary_scores
from bespokefl.evaluation.classification_metrics import accuracy, confusion, f1, pad, recall
from bespokefl.evaluation.metrics import averages


class Client(NamedTuple):
    logits: np.ndarray
    y: np.ndarray


# Quarters: many ties, and differences that every formula of a softmax keeps apart.
quarters = st.integers(-60, 60).map(lambda k: k / 4)


@st.composite
def clients(draw: st.DrawFn) -> Client:
    samples = draw(st.lists(st.tuples(quarters, quarters, st.integers(0, 1)), max_size=12))
    table = np.array(samples, dtype=np.float64).reshape(-1, 3)
    return Client(table[:, :2], table[:, 2].astype(np.int64))


federations = st.lists(clients(), min_size=1, max_size=5)


def scores_of(federation: list[Client]):
    logits, mask = pad([client.logits for client in federation])
    y, _ = pad([client.y for client in federation])
    return binary_scores(logits, y, mask)


@given(federations)
def test_against_scikit_learn(federation: list[Client]) -> None:
    scores = scores_of(federation)
    for k, (logits, y) in enumerate(federation):
        if not len(y):
            assert all(np.isnan(column[k]) for column in scores)
            continue
        predicted = (logits[:, 1] > logits[:, 0]).astype(int)
        assert scores.accuracy[k] == pytest.approx(accuracy_score(y, predicted))
        assert scores.sensitivity[k] == pytest.approx(recall_score(y, predicted, zero_division=0))
        assert scores.specificity[k] == pytest.approx(recall_score(y, predicted, pos_label=0, zero_division=0))
        macro = f1_score(y, predicted, labels=[0, 1], average="macro", zero_division=0)
        assert scores.f1[k] == pytest.approx(macro)
        if len(set(y)) < 2:
            assert np.isnan(scores.auc[k])
        else:
            assert scores.auc[k] == pytest.approx(roc_auc_score(y, softmax(logits, axis=-1)[:, 1]), abs=1e-12)


@given(st.lists(st.tuples(quarters | st.floats(-1, 1), st.integers(0, 1)), min_size=2, max_size=40))
def test_auc_against_scikit_learn_on_given_scores(samples: list[tuple[float, int]]) -> None:
    score, y = (np.array(column) for column in zip(*samples, strict=True))
    if 0 < y.sum() < len(y):
        assert auc(score, y) == pytest.approx(roc_auc_score(y, score), abs=1e-12)
        assert auc(-score, y) == pytest.approx(1 - auc(score, y), abs=1e-12)


@given(federations)
def test_accuracy_lies_between_sensitivity_and_specificity(federation: list[Client]) -> None:
    scores = scores_of([*federation, Client(np.array([[0.0, 1.0]]), np.array([0]))])
    tested = ~np.isnan(scores.accuracy)
    both = np.stack([scores.sensitivity, scores.specificity])[:, tested]
    assert (both.min(0) - 1e-15 <= scores.accuracy[tested]).all()
    assert (scores.accuracy[tested] <= both.max(0) + 1e-15).all()


def test_means_over_clients_need_not_lie_between() -> None:
    mostly_positive = Client(np.array([[0.0, 1.0]] * 10), np.array([1] * 9 + [0]))  # everything taken for class 1
    mostly_negative = Client(np.array([[1.0, 0.0]] * 10), np.array([0] * 9 + [1]))
    figures = averages(scores_of([mostly_positive, mostly_negative])._asdict())
    assert [figures[name].mean for name in ("accuracy", "sensitivity", "specificity")] == [0.9, 0.5, 0.5]


def test_by_hand() -> None:
    """TP 2, FN 1, FP 1, TN 1: and of 6 pairs 4 are in order, 1 is tied."""
    logits = [[0, 3], [0, 1], [1, 0], [0, 1], [2, 0]]
    scores = binary_scores(logits, [1, 1, 1, 0, 0])
    assert scores.accuracy == 3 / 5
    assert scores.sensitivity == pytest.approx(2 / 3)
    assert scores.specificity == 1 / 2
    assert scores.f1 == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert scores.auc == pytest.approx(4.5 / 6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sure", [20, 40, 800])
def test_the_auc_orders_samples_of_which_the_model_is_sure(dtype: type, sure: float) -> None:
    """Probabilities of class 1 would tie at 1: from a difference of 17 on in float32, of 37 in float64."""
    logits = np.array([[0, sure], [0, sure + 1], [-sure, sure], [sure, -sure]], dtype=dtype)
    assert binary_scores(logits, [0, 1, 1, 0]).auc == 1
    assert binary_scores(logits, [1, 0, 0, 0]).auc == pytest.approx(1 / 3)


def test_auc_by_hand() -> None:
    assert auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert auc([0.5, 0.5, 0.5], [0, 1, 0]) == 0.5
    assert auc([0.2, 0.1], [0, 1]) == 0


def test_equal_logits_are_class_0_however_close() -> None:
    assert binary_scores([[1.0, 1.0]], [0]).accuracy == 1
    assert binary_scores([[0.0, 1e-300]], [1]).accuracy == 1  # though its probability rounds to one half


def test_division_by_zero_gives_0_and_no_auc() -> None:
    scores = binary_scores([[[0.0, 1.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 2.0]]], [[1, 1], [0, 0]])
    assert scores.sensitivity.tolist() == [1, 0]
    assert scores.specificity.tolist() == [0, 0.5]
    assert scores.f1 == pytest.approx([0.5, 1 / 3])  # the class that neither occurs nor is predicted has F1 0
    assert np.isnan(scores.auc).all()


def test_averages_weigh_clients_the_same_and_count_those_left_out() -> None:
    federation = [
        Client(np.array([[0.0, 1.0]] * 3 + [[1.0, 0.0]]), np.array([1, 1, 1, 0])),  # all right
        Client(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([0, 1])),  # all wrong
        Client(np.array([[0.0, 1.0]]), np.array([1])),  # one class
        Client(np.zeros((0, 2)), np.zeros(0, dtype=int)),  # no samples
    ]
    figures = averages(scores_of(federation)._asdict())
    assert figures["accuracy"] == pytest.approx((2 / 3, np.std([1, 0, 1]), 1))
    assert figures["auc"] == (0.5, 0.5, 2)
    assert figures["specificity"] == pytest.approx((1 / 3, np.std([1, 0, 0]), 1))
    assert figures["f1"] == pytest.approx((1.5 / 3, np.std([1, 0, 0.5]), 1))


def test_a_metric_that_no_client_has() -> None:
    figure = averages({"auc": [np.nan, np.nan]})["auc"]
    assert np.isnan(figure.mean) and np.isnan(figure.std) and figure.left_out == 2


@given(federations, st.integers(1, 4), st.sampled_from([np.nan, np.inf, 7.0]))
def test_padding_does_not_count_whatever_it_holds(federation: list[Client], more: int, junk: float) -> None:
    logits, mask = pad([client.logits for client in federation])
    y, _ = pad([client.y for client in federation])
    expected = binary_scores(logits, y, mask)
    logits[~mask] = junk
    y[~mask] = -1
    logits = np.concatenate([np.full((len(logits), more, 2), junk), logits], axis=1)
    y = np.concatenate([np.full((len(y), more), 9), y], axis=1)
    mask = np.concatenate([np.zeros((len(mask), more), dtype=bool), mask], axis=1)
    np.testing.assert_array_equal(binary_scores(logits, y, mask), expected)


def test_leading_axes_are_kept() -> None:
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(3, 4, 9, 2)), rng.integers(0, 2, size=(3, 4, 9))
    scores = binary_scores(logits, y)
    for k in np.ndindex(3, 4):
        np.testing.assert_array_equal([column[k] for column in scores], binary_scores(logits[k], y[k]))


@pytest.mark.parametrize(
    ("logits", "y", "mask", "says"),
    [
        (np.zeros((4, 3)), np.zeros(4, int), None, r"shape \(4, 3\); their last axis must be the two classes"),
        (np.zeros((4, 2)), np.zeros(3, int), None, "one prediction per label"),
        (np.zeros((2, 2)), np.array([0, 2]), None, "labels must be whole numbers from 0 to 1"),
        (np.zeros((2, 2)), np.array([0, -1]), None, "labels must be whole numbers from 0 to 1"),
        (np.zeros((2, 2)), np.array([0.0, 1.0]), None, "labels must be whole numbers from 0 to 1"),
        (np.zeros((2, 2)), np.array([0, 1]), [1, 1], "mask is int64"),
        (np.zeros((2, 2)), np.array([0, 1]), [True], r"bool of shape \(2,\)"),
        (np.array([[0, np.nan], [0, 1]]), np.array([0, 1]), None, "not finite"),
        (np.array([[np.inf, np.inf], [0, 1]]), np.array([0, 1]), None, "not finite"),
    ],
)
def test_refusals(logits: np.ndarray, y: np.ndarray, mask: list | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        binary_scores(logits, y, mask)


def test_refusals_of_auc() -> None:
    with pytest.raises(InputError, match="one score per label"):
        auc([0.1, 0.2], [1])
    with pytest.raises(InputError, match="0 or 1"):
        auc([0.1, 0.2], [1, 2])


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_many_classes_against_scikit_learn(more: int, pairs: list[tuple[int, int]]) -> None:
    y, predicted = (np.array(column) for column in zip(*pairs, strict=True))
    classes = list(range(4 + more))
    counts = confusion(y, predicted, len(classes))
    assert counts.sum() == len(y) and counts[y[0], predicted[0]] == pairs.count(pairs[0])
    assert accuracy(counts) == pytest.approx(accuracy_score(y, predicted))
    assert recall(counts) == pytest.approx(recall_score(y, predicted, labels=classes, average=None, zero_division=0))
    assert f1(counts) == pytest.approx(f1_score(y, predicted, labels=classes, average=None, zero_division=0))


def test_confusion_by_hand() -> None:
    y, predicted = np.array([[0, 1, 2, 2], [2, 2, 2, 0]]), np.array([[0, 2, 2, 1], [0, 0, 2, 1]])
    mask = np.array([[True] * 4, [True, True, True, False]])
    first, second = [[1, 0, 0], [0, 0, 1], [0, 1, 1]], [[0, 0, 0], [0, 0, 0], [2, 0, 1]]
    assert confusion(y, predicted, 3, mask).tolist() == [first, second]


def test_pad_needs_samples_of_one_shape() -> None:
    values, mask = pad([[1, 2, 3], [4]])
    assert values.tolist() == [[1, 2, 3], [4, 0, 0]] and mask.sum(1).tolist() == [3, 1]
    for wrong in ([], [np.zeros((2, 3)), np.zeros((2, 4))], [np.float64(1)]):
        with pytest.raises(InputError, match="only the first axis may differ"):
            pad(wrong)
