"""Figures of a paper's table, from what a run leaves, computed again by hand."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bespokefl.errors import InputError
from bespokefl.reproduce.measures import MEASURES, check, in_table_units, measure
from bespokefl.results.files import StoredRun

ACCURACY = np.array([0.5, 0.7, 0.9, np.nan])
CLIENTS = {
    "accuracy": ACCURACY,
    "global_accuracy": np.array([0.2, 0.4, 0.9, np.nan]),
    "s_accuracy": np.full(4, np.nan),
    "auc": np.array([0.8, 0.6, np.nan, np.nan]),
    "hausdorff": np.array([3.0, 5.0, 7.0, np.nan]),
    "name": np.array(["A", "B", "C", "D"]),
}
SUMMARY = {
    "mean": 0.7,
    "gm_acc": None,
    "rounds": 4,
    "train_seconds": 10.0,
    "peak_memory_bytes": 3_000_000,
    "rounds_to_target": 12,
    "new_clients": {"best": 0.66, "last": 0.6},
}


def run(clients: dict[str, np.ndarray] = CLIENTS) -> StoredRun:
    return StoredRun(Path("x/seed-0"), "x", 0, [], SUMMARY, clients, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean", 70),
        ("gm_acc", None),
        ("gm_mean", 50),
        ("gm_worst5", 20),
        ("gm_top5", 90),
        ("l_acc_std", 100 * np.std([0.5, 0.7, 0.9])),
        ("s_acc_std", None),
        ("g_acc_std", None),
        ("auc", 70),
        ("auc_std", 10),
        ("hausdorff", 5),
        ("rounds_to_target", 12),
        ("seconds", 2.5),
        ("memory", 3),
        ("new_clients", 66),
        ("new_clients_last", 60),
        ("gain_over_global", 20),
        ("gain_over_global_std", 100 * np.std([0.3, 0.3, 0.0])),
        ("a_rows", None),
        ("client:B", 70),
        ("client:Z", None),
    ],
)
def test_a_figure(name: str, expected: float | None) -> None:
    found = measure(name).value(run(), None)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_of_spreads_the_lower_is_better() -> None:
    spreads = [name for name in MEASURES if name.endswith("_std")]
    assert {"auc_std", "gain_std", "s_acc_std"} < set(spreads)
    assert not any(MEASURES[name].higher_is_better for name in spreads)


def test_gain_needs_local() -> None:
    local = run(CLIENTS | {"accuracy": ACCURACY - [0.1, 0.3, 0.2, 0.0]})
    assert MEASURES["gain"].value(run(), local) == pytest.approx(20)
    assert MEASURES["gain_std"].value(run(), local) == pytest.approx(np.std([10, 30, 20]))
    assert MEASURES["gain"].value(run(), None) is None


def test_units_of_the_paper() -> None:
    assert in_table_units("l_acc", 0.897, "fraction") == pytest.approx(89.7)
    assert in_table_units("l_acc", 89.7, "percent") == 89.7
    assert in_table_units("hausdorff", 3.5, "fraction") == 3.5


def test_unknown_metrics() -> None:
    with pytest.raises(InputError, match=r"paper\.metrics = 'mea' is not known\. Did you mean mean"):
        check(["mean", "mea"])
    with pytest.raises(InputError, match="once"):
        check(["mean", "mean"])


def test_the_change_of_a_against_the_clients_sizes(tmp_path: Path) -> None:
    n, rng = np.array([10.0, 40.0, 20.0, 70.0]), np.random.default_rng(0)
    first, last = rng.random((2, 4, 4))
    (tmp_path / "facts").mkdir()
    for round_, matrix in ((1, first), (2, rng.random((4, 4))), (10, last)):
        save_file({"A": matrix}, tmp_path / "facts" / f"{round_:06}.safetensors")
    stored = StoredRun(tmp_path, "x", 0, [], SUMMARY, {"n_train": n}, None)
    for name, means in (
        ("a_columns", [sum(last[i][j] - first[i][j] for i in range(4)) / 4 for j in range(4)]),
        ("a_rows", [sum(last[i][j] - first[i][j] for j in range(4)) / 4 for i in range(4)]),
    ):
        x, y = n - n.mean(), np.array(means) - np.mean(means)
        assert measure(name).value(stored, None) == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))
    same = StoredRun(tmp_path, "x", 0, [], SUMMARY, {"n_train": np.full(4, 3.0)}, None)
    assert measure("a_rows").value(same, None) is None
