import json
from pathlib import Path

import numpy as np
import pytest

from bespokefl.errors import RunError
from bespokefl.results.files import RoundLog, read_csv, read_rounds, read_runs, write_atomically, write_csv, write_json


def test_floats_come_back_with_the_same_bits(tmp_path: Path) -> None:
    values = np.array([0.1, 1 / 3, 1e-300, np.nan, 1.0])
    write_csv(tmp_path / "t.csv", {"client": range(5), "accuracy": values, "name": list("abcde")})
    back = read_csv(tmp_path / "t.csv")
    np.testing.assert_array_equal(back["accuracy"], values)
    assert back["name"].tolist() == list("abcde")
    write_json(tmp_path / "s.json", {"a": 0.1, "b": float("nan"), "c": None})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 0.1, "b": None, "c": None}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "f", "\ud800")
    assert (tmp_path / "f").read_text() == "old"


def test_log_is_cut_back_to_the_rounds_that_count(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    log = RoundLog(path)
    for number in (1, 2, 3):
        log.append({"round": number, "mean": float("nan"), "bytes": 10})
        assert len(read_rounds(path)) == number  # each line is flushed as it is written
    log.close()
    again = RoundLog(path, keep=2)
    assert again.total("bytes") == 20
    again.append({"round": 3, "mean": 0.5, "bytes": 1})
    again.close()
    assert read_rounds(path) == [
        {"round": 1, "mean": None, "bytes": 10},
        {"round": 2, "mean": None, "bytes": 10},
        {"round": 3, "mean": 0.5, "bytes": 1},
    ]
    with pytest.raises(RunError, match=r"holds 3 whole rounds.*after 4"):
        RoundLog(path, keep=4)


@pytest.mark.parametrize("rest", ['{"round": 2', '{"round": 2}', "3\n", "\n"])
def test_what_is_not_a_whole_line_is_left_out(tmp_path: Path, rest: str) -> None:
    (tmp_path / "r.jsonl").write_text('{"round": 1}\n' + rest)
    assert read_rounds(tmp_path / "r.jsonl") == [{"round": 1}]


def test_reading_an_output_folder(tmp_path: Path) -> None:
    for seed in (10, 2):
        folder = tmp_path / "fedavg" / f"seed-{seed}"
        write_atomically(folder / "config.toml", "")
        write_atomically(folder / "rounds.jsonl", '{"round": 1}\n')
    summary = {name: 0.5 for name in ("mean", "std", "worst5", "top5", "bytes_total", "train_seconds")}
    summary |= {"rounds": 1, **dict.fromkeys(("algorithm", "selection", "scored", "model"), "x")}
    write_json(tmp_path / "fedavg" / "seed-2" / "summary.json", summary)
    write_csv(
        tmp_path / "fedavg" / "seed-2" / "clients.csv",
        {"client": [0], "n_train": [3], "n_test": [2], "accuracy": [0.5]},
    )
    write_atomically(tmp_path / "fedavg" / "seed-10" / "error.txt", "why")
    done, failed = read_runs(tmp_path)
    assert (done.label, done.seed, done.summary, done.error) == ("fedavg", 2, summary, None)
    assert (failed.seed, failed.summary, failed.clients, failed.error) == (10, None, None, "why")
    assert read_runs(tmp_path / "nowhere") == []
