"""The table's numbers by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespokefl.results.files import StoredRun
from bespokefl.results.methods import baseline_runs, gains, scores
from bespokefl.results.summary import untrained
from bespokefl.results.table import Figure, caption, columns, method_rows


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
        "std": ordered.std(),
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


def test_caption_says_once_what_the_experiment_says_of_a_method(runs: list[StoredRun]) -> None:
    before = caption(runs)
    assert " MB sent: both ways" in before and "MB sent" not in caption(runs, costs=False)
    for run in runs:
        if run.label == "tuned" and run.summary is not None:
            run.summary["note"] = "made for something else."
    assert caption(runs) == before + "\ntuned: made for something else."


def test_caption_tells_of_clients_that_never_took_part(runs: list[StoredRun]) -> None:
    assert "taken part" not in caption(runs)  # of files before this was counted
    for run, count in zip(runs, (0, 3, 0, 3), strict=True):
        assert run.summary is not None
        run.summary["clients_untrained"] = count
    assert " 3 of the clients had not taken part until then: they count" in caption(runs)
    runs[0].summary["clients_untrained"] = 1  # type: ignore[index]
    assert " 1 to 3 of the clients had not" in caption(runs)


def test_who_has_not_trained_until_a_round() -> None:
    lines: list[dict[str, Any]] = [
        {"round": 1, "clients": [0, 2], "failed": {"2": "lost"}},
        {"round": 2, "clients": [2, 3], "failed": {}},
    ]
    assert [untrained(lines, range(5), until) for until in (0, 1, 2)] == [5, 4, 2]
    assert untrained(lines, [0, 2, 3], 2) == 0


def test_clients_that_attack_are_in_no_figure(runs: list[StoredRun]) -> None:
    """Local's client 0 and the other's client 3 attack: what is left is compared."""
    for run, attacker in ((runs[0], 0), (runs[2], 3)):
        assert run.clients is not None
        run.clients["malicious"] = np.eye(4)[attacker]
    assert np.isnan(scores(runs[0])).tolist() == [True, False, False, False]
    found = gains([runs[2]], baseline_runs(runs))[0]
    np.testing.assert_allclose(found, [np.nan, 0, -10, np.nan], atol=1e-12)
    assert {row.label: row.harmed for row in method_rows([runs[0], runs[2]])} == {
        "tuned": Figure(1.0, None),
        "local": None,
    }


def test_the_baseline_is_the_run_that_bears_its_name(runs: list[StoredRun]) -> None:
    other = stored("local-long", 0, [0.9, 0.9, 0.9, 0.9], algorithm="local")
    assert baseline_runs([other, *runs])[0] is runs[0] and baseline_runs([*runs, other])[0] is runs[0]
    assert baseline_runs([other])[0] is other


def test_clients_of_another_partition_are_not_compared(runs: list[StoredRun]) -> None:
    fewer = stored("fewer", 0, [0.5, 0.5, 0.5, 0.5])
    assert fewer.clients is not None
    fewer.clients["accuracy"] = fewer.clients["accuracy"][:3]
    assert gains([fewer], baseline_runs(runs)) == {}
