"""Views of stored runs: the table's numbers by hand, the pictures' bytes twice."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bespokefl.results import pictures
from bespokefl.results.files import StoredRun
from bespokefl.results.table import caption, columns, method_rows


def stored(
    label: str, seed: int, accuracy: Sequence[float], *, algorithm: str = "", gm: float | None = None
) -> StoredRun:
    values = np.array(accuracy)
    ordered = np.sort(values[~np.isnan(values)])
    summary = {
        "algorithm": algorithm or label,
        "mean": ordered.mean(),
        "worst5": ordered[0],
        "top5": ordered[-1],
        "gm_acc": gm,
        "g_acc": gm,
        "bytes_total": 3_000_000,
        "train_seconds": 2.5,
        "scored": "personal models of all 4 clients, round 2, test split",
        "selection": "last",
        "model": "own" if label == "local" else "finetune",
    }
    clients = {"client": np.arange(4.0), "n_train": np.full(4, 9.0), "n_test": np.full(4, 3.0), "accuracy": values}
    rounds = [{"round": r, "mean": 0.1 * r, "worst5": 0.05 * r} for r in (1, 2)] + [
        {"round": 3, "mean": None, "worst5": None}
    ]
    return StoredRun(Path(label), label, seed, rounds, summary, clients, None)


@pytest.fixture
def runs() -> list[StoredRun]:
    return [
        stored("local", 0, [0.5, 0.6, 0.7, 0.8]),
        stored("local", 1, [0.4, 0.6, 0.8, np.nan]),
        stored("tuned", 0, [0.6, 0.6, 0.6, 0.9], algorithm="fedavg", gm=0.5),
        stored("tuned", 1, [0.5, 0.7, 0.9, np.nan], algorithm="fedavg", gm=0.7),
    ]


def test_numbers_of_the_table(runs: list[StoredRun]) -> None:
    tuned, local = method_rows(runs)
    assert (tuned.label, local.label) == ("tuned", "local")
    assert tuned.mean.mean == pytest.approx(100 * (0.675 + 0.7) / 2)
    assert tuned.mean.std == pytest.approx(100 * (0.7 - 0.675) / 2)
    assert tuned.gain is not None and tuned.gain.mean == pytest.approx(100 * (0.025 + 0.1) / 2)
    assert tuned.gain.mean == pytest.approx(tuned.mean.mean - local.mean.mean)
    assert tuned.worse_off is not None and tuned.worse_off.mean == pytest.approx((25 + 0) / 2)
    assert tuned.gm_acc is not None and tuned.gm_acc.mean == pytest.approx(60)
    assert (local.gain, local.gm_acc) == (None, None)
    shown = {name: cell(tuned) for name, cell in columns([tuned, local]).items()}
    assert shown["mean %"] == "68.75 ±1.25"
    assert shown["gain over Local"] == "+6.25 ±3.75"
    assert (shown["MB sent"], shown["seconds"]) == ("3.0", "2.5")


def test_columns_without_content_are_left_out(runs: list[StoredRun]) -> None:
    assert "gain over Local" not in columns(method_rows([runs[2]]))
    assert "global model %" not in columns(method_rows(runs[:2]))
    alone = method_rows([runs[2]])[0]
    assert alone.mean.std is None and alone.mean.show(2) == "67.50"


def test_rounds_to_a_target_and_what_they_save(runs: list[StoredRun]) -> None:
    needed = {("local", 0): 30, ("local", 1): 20, ("tuned", 0): 10, ("tuned", 1): 10}
    for run in runs:
        assert run.summary is not None
        run.summary.update({"target": 0.7, "rounds_to_target": needed[run.label, run.seed]})
    tuned, local = method_rows(runs)
    assert (tuned.speed_up, local.speed_up) == (2.5, 1.0)
    shown = {name: [cell(row) for row in (tuned, local)] for name, cell in columns([tuned, local]).items()}
    assert shown["rounds to 70 %"] == ["10", "25"] and shown["speed-up"] == ["2.50x", "1.00x"]
    assert "GPU MB" not in shown
    runs[0].summary["rounds_to_target"] = None  # type: ignore[index]
    tuned, local = method_rows(runs)
    assert (tuned.speed_up, local.speed_up) == (1.0, None)  # who never arrives slows nobody
    shown = {name: cell(local) for name, cell in columns([tuned, local]).items()}
    assert shown["rounds to 70 %"] == "never"


def test_memory_is_shown_where_it_is_a_runs_own(runs: list[StoredRun]) -> None:
    for run in runs:
        assert run.summary is not None
        run.summary.update({"device": "cuda:0", "peak_memory_bytes": 123_400_000})
    rows = method_rows(runs)
    assert columns(rows)["GPU MB"](rows[0]) == "123"


def test_caption_names_the_scored_models(runs: list[StoredRun]) -> None:
    assert caption(runs).startswith("Scored: personal models of all 4 clients, round 2, test split (the last round): ")
    assert "the global model fine-tuned by the client for tuned; the method's own personal model for local." in caption(
        runs
    )
    assert "2 seeds" in caption(runs) and "seeds" not in caption(runs[:1])


def test_pictures_are_reproducible_and_not_empty(runs: list[StoredRun], tmp_path: Path) -> None:
    first, second = (pictures.render(pictures.result_figure(runs)) for _ in range(2))
    assert first == second
    assert first["png"].startswith(b"\x89PNG") and len(first["png"]) > 10_000
    assert b"<svg" in first["svg"]
    counts = np.arange(12).reshape(3, 4)
    pictures.save(pictures.partition_figure(counts, ["a", "b", "c", "a long name"]), tmp_path / "partition")
    assert {path.name for path in tmp_path.iterdir()} == {"partition.png", "partition.svg"}
    again = pictures.render(pictures.partition_figure(counts, ["a", "b", "c", "a long name"]))
    assert again["svg"] == (tmp_path / "partition.svg").read_bytes()


@pytest.mark.parametrize("methods", [1, 16])
def test_pictures_of_few_and_many_methods(methods: int) -> None:
    many = [stored(f"method-{k}", 0, [0.1, 0.2, 0.3, 0.04 * k]) for k in range(methods)]
    assert len(pictures.render(pictures.result_figure(many))["png"]) > 5000


def test_pictures_of_many_clients() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (500, 100))
    assert len(pictures.render(pictures.partition_figure(counts, [str(k) for k in range(100)]))["png"]) > 5000
