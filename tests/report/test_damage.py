"""Folders with something wrong in them: what is missing is said, the rest is shown."""

import html
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.folders import write_comparison, write_labels, write_run
from typer.testing import CliRunner

from bespokefl.cli import app
from bespokefl.report import publish as publishing
from bespokefl.report.content import gather_content
from bespokefl.report.gather import Comparison
from bespokefl.report.page import page
from bespokefl.report.publish import publish
from bespokefl.results.facts import write_facts
from bespokefl.results.files import read_runs


def page_of(out: Path) -> str:
    return page(gather_content(Comparison(out, read_runs(out))))


def words(text: str) -> str:
    """What a page says, without its scripts."""
    text = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for label in ("local", "fedavg", "pgfed"):
        write_run(tmp_path, label)
    write_labels(tmp_path)
    return tmp_path


DAMAGE: dict[str, tuple[str, Callable[[str], str], str, bool]] = {  # file, damage, what is said, still in the table
    "summary cut off": ("summary.json", lambda text: text[:40], "summary.json is damaged", False),
    "summary of nothing": ("summary.json", lambda text: "{}", "mean is 'missing'", False),
    "summary a list": ("summary.json", lambda text: "[1]", "summary.json is damaged (not an object)", False),
    "summary without its mean": ("summary.json", lambda t: t.replace('"mean": 0', '"mean": "x'), "summary.json", False),
    "clients cut off": ("clients.csv", lambda text: text[: len(text) // 2], "clients.csv is damaged", False),
    "clients empty": ("clients.csv", lambda text: "", "clients.csv is damaged", False),
    "clients without accuracy": ("clients.csv", lambda t: t.replace("accuracy", "a"), "no column accuracy", False),
    "clients in words": ("clients.csv", lambda t: t.replace("0,10,", "zero,ten,"), "not a number", False),
    "rounds cut off": ("rounds.jsonl", lambda text: text[:80], "only its first 1 of 3 rounds can be read", True),
    "rounds empty": ("rounds.jsonl", lambda text: "", "only its first 0 of 3 rounds can be read", True),
    "rounds of something else": ("rounds.jsonl", lambda text: '{"a": 1}\n' * 3, "", True),
    "config damaged": ("config.toml", lambda text: "= [", "config.toml is missing or damaged", True),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_costs_what_it_holds(out: Path, name: str) -> None:
    file, damage, said, is_shown = DAMAGE[name]
    path = out / "pgfed" / "seed-0" / file
    path.write_text(damage(path.read_text()))
    text = page_of(out)
    assert said in words(text) and ("pgfed, seed 0" in text or not said)
    ranked = re.findall(r'<tr data-method="([^"]+)"', text)
    assert sorted(ranked) == (["fedavg", "local", "pgfed"] if is_shown else ["fedavg", "local"])


def test_damaged_counts_of_rounds(out: Path) -> None:
    write_run(out, "fedavg", more={"rounds_asked": ["x"] * 6, "rounds_failed": [0] * 6})
    assert "column rounds_asked holds something that is not a number" in words(page_of(out))
    write_run(out, "fedavg", more={"rounds_failed": [0] * 6})  # one without the other
    assert "fedavg" in words(page_of(out)) and "not a number" not in words(page_of(out))
    path = out / "pgfed" / "seed-0" / "summary.json"
    path.write_text(path.read_text().replace("{", '{"clients_untrained": "many", ', 1))
    assert "clients_untrained is 'many'" in words(page_of(out))


def test_bytes_that_are_no_text(out: Path) -> None:
    for file in ("summary.json", "rounds.jsonl", "error.txt"):
        (out / "pgfed" / "seed-0" / file).write_bytes(b"\xff\xfe\x00")
    (out / "partition-seed-0.csv").write_bytes(b"\xff\xfe\x00")
    said = words(page_of(out))
    assert "pgfed, seed 0: summary.json is damaged" in said and "partition-seed-0.csv is damaged" in said


def test_damaged_facts_and_surfaces(out: Path) -> None:
    run = out / "pgfed" / "seed-0"
    for round_ in (1, 2):
        write_facts(run, round_, {"step": np.array(0.1 * round_)})
    (run / "facts" / "000001.safetensors").write_bytes(b"damaged")
    (run / "surface.safetensors").write_bytes(b"damaged")
    said = words(page_of(out))
    assert "facts are damaged (000001.safetensors); the other rounds are shown." in said
    assert "surface.safetensors or surface.json is damaged" in said


def test_a_run_without_its_configuration_is_still_a_run(out: Path) -> None:
    (out / "pgfed" / "seed-0" / "config.toml").unlink()
    assert 'data-method="pgfed"' in page_of(out)


def test_nothing_but_failures(tmp_path: Path) -> None:
    folder = tmp_path / "fedavg" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "error.txt").write_text("the <loss> is infinite\n")
    text = publish(tmp_path).read_text()
    assert "fedavg, seed 0: failed after 0 rounds" in words(text)
    assert "the &lt;loss&gt; is infinite" in text and 'type="module"' not in text
    assert not (tmp_path / "result.png").exists()


def test_an_empty_folder_is_wrong_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "holds no runs" in result.output
    assert list(tmp_path.iterdir()) == []


def test_without_local_fedavg_is_the_reference(tmp_path: Path) -> None:
    for label in ("fedavg", "pgfed"):
        write_run(tmp_path, label)
    said = words(page_of(tmp_path))
    assert "Local is not among the finished runs, so FedAvg is the reference" in said
    assert "There is no finished run of Local, so gains over it are unknown." in said
    write_run(tmp_path / "other", "pgfed")
    assert "There is no finished run of Local here, nor one of FedAvg." in words(page_of(tmp_path / "other"))


def test_attackers_are_left_out_and_named(tmp_path: Path) -> None:
    malicious = {"malicious": [0, 1, 0, 0, 1, 0]}
    accuracy = [0.9, 0.0, 0.8, 0.7, 0.0, 0.6]
    for label in ("local", "fedavg"):
        write_run(tmp_path, label, accuracy=accuracy, more=malicious)
    text = page_of(tmp_path)
    assert "Clients that attack are left out (seed 0: 1, 4)." in text
    assert text.count(">75.00<") == 2  # of the four others
    assert "0 <small>of 4</small>" in text


def test_names_from_a_folder_cannot_become_code(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    write_run(tmp_path, evil)
    write_run(tmp_path, "local")
    text = page_of(tmp_path)
    assert evil not in text and "\\u003cimg src=x" in text and "&lt;img src=x" in text


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_without_the_packages(out: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    real: Any = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == module else real(name, *a))
    result = CliRunner().invoke(app, ["report", str(out)])
    assert result.exit_code == 2 and "the report needs `pip install" in result.output


def test_run_finishes_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "missing_packages", lambda: ["altair"])
    sets = ["data.clients=4", "data.max_samples=200", "model.name=linear", "train.rounds=1", "algorithm.name=local"]
    arguments = ["run", "--out", str(tmp_path), "--seed", "0"]
    result = CliRunner().invoke(app, [*arguments, *(part for s in sets for part in ("--set", s))])
    assert result.exit_code == 0, result.output
    assert "Report: needs `pip install altair`" in result.output and not (tmp_path / "report.html").exists()
    assert os.path.getsize(tmp_path / "local" / "seed-0" / "summary.json") > 0


def test_figures_on_request(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "out", seeds=(0,))
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert not (out / "figures").exists() and (out / "result.png").read_bytes().startswith(b"\x89PNG")
    first = {name: (out / name).read_bytes() for name in ("result.png", "result.svg")}
    result = CliRunner().invoke(app, ["report", str(out), "--figures"])
    assert result.exit_code == 0 and str(out / "figures") in result.output
    names = {path.name for path in (out / "figures").iterdir()}
    for chart in ("score-of-clients", "gain-of-clients", "rounds-mean", "gamma", "fact-pgfed-A", "labels"):
        assert {f"{chart}.svg", f"{chart}.png"} <= names
    assert all(path.stat().st_size > 1500 for path in (out / "figures").iterdir())
    assert first == {name: (out / name).read_bytes() for name in first}  # the same numbers, the same bytes
