"""The papers' numbers that are shipped: none is lost, none has changed, and each is where it belongs."""

import hashlib
import math
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bespokefl.errors import InputError
from bespokefl.experiments import paper_numbers
from bespokefl.experiments.paper_numbers import paper_names, read_paper, table_names, with_printed
from bespokefl.experiments.reading import parse_parts, read_parts
from bespokefl.experiments.schema import Origin, PaperSection
from bespokefl.reproduce.measures import measure

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT.parent / "shared" / "papers"
RECORDED = {  # numbers (spreads are numbers, too), lost ones, and the start of a digest of them all with their places
    "plgu.table1": (75, 0, "af5de687e855"),
    "plgu.table2": (105, 0, "831ae49f8846"),
    "plgu.table3": (36, 0, "52f56d33ffea"),
    "plgu.table4": (36, 0, "2e2d53a06d61"),
    "pgfed.table1": (168, 0, "43a0d163db99"),
    "pgfed.table2": (36, 0, "811c391f927d"),
    "pgfed.table3": (42, 0, "3b6d96a7409e"),
    "pgfed.table4": (42, 0, "b17db296711a"),
    "fedpg.table1": (351, 0, "296b9d30d519"),
    "fedpg.table2": (351, 0, "8a690204313b"),
    "fedpg.table3": (210, 0, "b8397dce802b"),
    "lgmix.table1": (202, 40, "2853d093ad14"),
    "lgmix.table2": (217, 69, "54b21da175a8"),
    "lgmix.table3": (224, 0, "fa55b14090ad"),
    "lgmix.table4": (30, 0, "cae18bd3c63f"),
    "lgmix.table6": (30, 0, "52c230278acf"),
    "lgmix.table7": (55, 0, "6f9d4b9f7f97"),
    "lgmix.table8": (52, 0, "c64d4f08704f"),
    "lgmix.table9": (52, 0, "aa627d5f7862"),
    "lgmix.table10": (55, 0, "4547ffaee939"),
}


def leaves(entry: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number below, with where it stands."""
    if isinstance(entry, dict):
        for key, below in entry.items():
            yield from leaves(below, f"{place}/{key}")
    elif isinstance(entry, list):
        for number, below in enumerate(entry):
            yield from leaves(below, f"{place}/{number}")
    elif isinstance(entry, int | float):
        yield place, float(entry)


def numbers(name: str, table: str) -> list[tuple[str, float]]:
    rows = {key: entry for key, entry in read_paper(name)[table].items() if isinstance(entry, dict)}
    return list(leaves(rows))


@pytest.mark.parametrize("table", RECORDED)
def test_no_number_has_changed(table: str) -> None:
    found = numbers(*table.split("."))
    there = [value for _, value in found if not math.isnan(value)]
    digest = hashlib.sha256("\n".join(f"{place} {value!r}" for place, value in sorted(found, key=str)).encode())
    assert (len(there), len(found) - len(there), digest.hexdigest()[:12]) == RECORDED[table]


def test_all_tables_are_recorded() -> None:
    assert {f"{name}.{table}" for name in paper_names() for table in table_names(name)} == set(RECORDED)
    assert sum(count for count, _, _ in RECORDED.values()) == 2369


@pytest.mark.parametrize("name", ["plgu", "pgfed", "fedpg", "lgmix"])
def test_the_package_has_what_was_collected(name: str) -> None:
    if not SOURCE.is_dir():
        pytest.skip(f"the collection is not beside this checkout ({SOURCE})")
    collected = tomllib.loads((SOURCE / f"{name}.toml").read_text(encoding="utf-8"))
    assert repr(read_paper(name)) == repr(collected)  # nan is not equal to itself


def filled(numbers_from: str, setting: str, *labels: str, **more: Any) -> PaperSection:
    return with_printed(PaperSection(numbers_from=numbers_from, **more), setting, labels)


def test_a_setting_takes_the_numbers_of_its_name() -> None:
    found = filled("pgfed.table1", "cifar10-100", "fedrep", "pgfed", "mine")
    assert found.numbers == {"mean": {"fedrep": 72.30, "pgfed": 78.56}}
    assert found.spreads == {"mean": {"fedrep": 0.52, "pgfed": 0.35}}
    assert (found.spread_of, found.unit, found.lost) == ("seeds", "percent", [])
    other = filled("pgfed.table1.cifar100-25", "mine", "pgfedmo")
    assert other.numbers == {"mean": {"pgfedmo": 43.44}} and other.spreads == {"mean": {"pgfedmo": 0.14}}


def test_spreads_over_clients_are_numbers_too() -> None:
    found = filled("fedpg.table1", "cifar10-p10", "fedpg-0.3")
    assert found.numbers == {
        "l_acc": {"fedpg-0.3": 0.762}, "s_acc": {"fedpg-0.3": 0.746}, "g_acc": {"fedpg-0.3": 0.741},
        "gm_acc": {"fedpg-0.3": 0.741}, "l_acc_std": {"fedpg-0.3": 0.104}, "s_acc_std": {"fedpg-0.3": 0.053},
        "g_acc_std": {"fedpg-0.3": 0.060},
    }  # fmt: skip
    assert (found.spread_of, found.unit) == ("clients", "fraction")


def test_clients_get_their_names_and_lost_numbers_are_named() -> None:
    found = filled("lgmix.table1", "digits5", "l2sgd")
    assert found.numbers["client:SVHN"] == {"l2sgd": 89.99} and found.numbers["mean"] == {"l2sgd": 94.60}
    assert "client:USPS" not in found.numbers and found.lost == ["client:USPS/l2sgd"]
    assert found.spreads["client:USPS"] == {"l2sgd": 0.2}
    [note] = [note for note in found.contradictions if note.says.startswith("USPS")]
    assert note.places == ["digits5/l2sgd/client:USPS"]
    retinal = filled("lgmix.table3", "retinal", "fedbn")
    assert (
        retinal.numbers["client:F:hausdorff"] == {"fedbn": 2.70} and retinal.spreads["client:A:dice"]["fedbn"] == 0.29
    )


def test_rows_give_a_label_the_numbers_of_another_place() -> None:
    found = filled("plgu.table4", "any", "lf-a", "grep", rows={"lf-a": "rho0.1/plgu-lf", "grep": "rho0.5/plgu-grep"})
    assert found.numbers["gm_mean"] == {"lf-a": 68.62} and found.numbers["mean"] == {"lf-a": 70.96, "grep": 70.80}
    found = filled("fedpg.table1", "fmnist-p10", "gamma-1", "fedpg", rows={"gamma-1": "fedpg-1.0"})
    assert found.numbers["l_acc"] == {"gamma-1": 0.956, "fedpg": 0.897}


def test_notes_stand_at_their_cells_and_tables() -> None:
    found = filled("pgfed.table4", "cifar100-50", "pgfed", "pgfedmo")
    [own] = [note for note in found.contradictions if "8.99 against 9.01" in note.says]
    assert own.places == ["cifar100-50/pgfed/*", "cifar100-50/pgfedmo/*"]
    assert any("A mean of gains" in text for text in found.remarks)
    table = filled("plgu.table4", "any", "x", rows={"x": "rho0.1/plgu-grep"})
    [suspect] = [note for note in table.contradictions if note.says.startswith("71.49")]
    assert suspect.places == ["any/x/worst5"]
    code = filled("fedpg.table1", "fmnist-p10", "ditto", "fedprox", "fedrod")
    [last] = [note for note in code.contradictions if "last bias only" in note.says]
    assert set(last.places) == {"fmnist-p10/ditto/*", "fmnist-p10/fedrod/*"}


def test_what_the_experiment_says_itself_wins_and_twice_is_once() -> None:
    once = filled("pgfed.table1", "cifar10-25", "local", "pgfed", numbers={"mean": {"local": 1.0}})
    assert once.numbers["mean"] == {"local": 1.0, "pgfed": 81.02}
    assert with_printed(once, "cifar10-25", ["local", "pgfed"]) == once


@pytest.mark.parametrize(
    ("paper", "message"),
    [
        ({"numbers_from": "pgfd.table1"}, r"numbers_from = 'pgfd.table1'.*pgfed\.table1"),
        ({"numbers_from": "pgfed.table9"}, r"numbers_from = 'pgfed.table9'.*pgfed\.table1, pgfed\.table2"),
        ({"numbers_from": "pgfed.table1"}, r"numbers_from = 'pgfed.table1.mine'.*pgfed\.table1\.cifar10-25"),
        ({"numbers_from": "pgfed.table1.cifar-25"}, r"numbers_from = 'pgfed.table1.cifar-25'.*exp\.toml, line 3"),
        (
            {"numbers_from": "pgfed.table1.cifar10-25", "rows": {"local": "locl"}},
            r"paper\.rows\.local = 'locl'.*cifar10-25/local",
        ),
    ],
)
def test_a_table_that_is_not_there_is_refused(paper: dict[str, Any], message: str) -> None:
    document = {"algorithms": ["local"], "paper": paper, "setting": [{"name": "mine"}]}
    with pytest.raises(InputError, match=message):
        parse_parts(document, origin=Origin("exp.toml", {"paper.numbers_from": 3}))


@pytest.mark.parametrize("table", RECORDED)
def test_every_number_is_one_that_we_can_measure(table: str) -> None:
    name, key = table.split(".")
    document = read_paper(name)
    for setting in paper_numbers.settings_of(document[key]):
        for row in document[key][setting]:
            for cell in paper_numbers.printed(document, key, paper_numbers.Place(setting, row)):
                assert cell.metric in paper_numbers.NOT_FILLED or measure(cell.metric)


def reached() -> dict[str, set[str]]:
    """By cell of the papers' tables, the items that take it: of every item the tables, rows and metrics it names."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "experiments").glob("*-*[0-9]*.toml")):
        for part in read_parts(path):
            paper = part.experiment.paper
            if not paper.numbers_from:
                continue
            name, table, *own = paper.numbers_from.split(".", 2)
            assert path.stem.replace("-supp", "") == f"{name}-{table}"
            for choice in part.experiment.algorithms:
                setting, _, row = paper.rows.get(
                    choice.label, f"{own[0] if own else part.name}/{choice.label}"
                ).rpartition("/")
                entry = read_paper(name)[table].get(setting or part.name, {}).get(row)
                if entry is None:
                    continue
                where = paper_numbers.Place(setting or part.name, row)
                for cell in paper_numbers.printed(read_paper(name), table, where):
                    if cell.metric in paper_numbers.NOT_FILLED:
                        continue
                    lost = math.isnan(cell.value)
                    assert lost == (f"{cell.metric}/{choice.label}" in paper.lost)
                    assert lost or paper.numbers[cell.metric][choice.label] == cell.value
                    assert cell.spread is None or paper.spreads[cell.metric][choice.label] == cell.spread
                    found.setdefault(f"{name}.{table}/{where.setting}/{row}/{cell.metric}", set()).add(path.stem)
    return found


def test_every_cell_is_taken_by_exactly_one_item() -> None:
    found = reached()
    cells = {
        f"{name}.{table}/{setting}/{row}/{cell.metric}"
        for name in paper_names()
        for table in table_names(name)
        for setting in paper_numbers.settings_of(read_paper(name)[table])
        for row in read_paper(name)[table][setting]
        for cell in paper_numbers.printed(read_paper(name), table, paper_numbers.Place(setting, row))
        if cell.metric not in paper_numbers.NOT_FILLED
    }
    assert not cells - found.keys(), "lost"
    assert found.keys() == cells
    assert all(len(items) == 1 for items in found.values())


def test_what_stands_in_a_text_is_what_the_experiment_has() -> None:
    [part] = read_parts(ROOT / "experiments" / "plgu-figure1.toml")
    assert part.experiment.paper.numbers["mean"] == read_paper("plgu")["stated"]["figure1"]["mean"]


def test_the_numbers_are_package_data() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["packages"] == ["src/bespokefl"]  # with all files below that git does not ignore
    assert not {"include", "exclude", "only-include"} & build["wheel"].keys()
    for name in paper_names():
        file = ROOT / "src/bespokefl/reproduce/papers" / f"{name}.toml"
        ignored = subprocess.run(["git", "check-ignore", "-q", str(file)], cwd=ROOT, check=False).returncode
        assert file.is_file() and ignored != 0
