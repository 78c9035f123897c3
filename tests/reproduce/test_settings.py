"""Experiments of several settings, and the small scale."""

from pathlib import Path

import pytest

from bespokefl.errors import InputError
from bespokefl.experiments.overrides import overlaid
from bespokefl.experiments.reading import parse_experiment, read_experiment, read_parts
from bespokefl.experiments.small_scale import read_set_up

FILE = """
seeds = [0, 1]
algorithms = ["local", { name = "ditto", lam = 0.5 }]
[data]
source = "cifar10"
clients = 100
partition = "labels"
labels_per_client = 3
[model]
name = "fedpg-cnn"
dropout = [0.2, 0.5]
[train]
rounds = 50
participation = 0.1
[paper]
title = "a table"
[small]
train.rounds = 3
[[setting]]
name = "plain"
title = "as it is"
[[setting]]
name = "full"
data.source = "digits"
data.partition = "dirichlet"
train.participation = 1.0
small.data.clients = 7
[setting.paper.numbers]
mean = { local = 60.0, "odd.label" = 1.0 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "exp.toml"
    path.write_text(FILE)
    return path


def test_a_setting_lies_over_what_all_share(file: Path) -> None:
    plain, full = read_parts(file)
    assert (plain.name, plain.title, full.name, full.title) == ("plain", "as it is", "full", "")
    assert plain.experiment.data.options == {"labels_per_client": 3}
    assert (full.experiment.data.source, full.experiment.data.clients) == ("digits", 100)
    assert full.experiment.data.options == {}  # of the partition before: not taken over
    assert (plain.experiment.train.participation, full.experiment.train.participation) == (0.1, 1.0)
    assert full.experiment.train.rounds == 50 and full.experiment.seeds == (0, 1)
    assert full.experiment.paper.title == "a table"
    assert full.experiment.paper.numbers == {"mean": {"local": 60.0, "odd.label": 1.0}}
    assert plain.experiment.paper.numbers == {}


def test_the_command_line_wins_everywhere(file: Path) -> None:
    for scale in ("paper", "small"):
        for part in read_parts(file, [("train.rounds", 9), ("seeds", [4])], scale):
            assert part.experiment.train.rounds == 9 and part.experiment.seeds == (4,)


def test_the_small_scale(file: Path) -> None:
    plain, full = read_parts(file, scale="small")
    assert (plain.set_up, full.set_up) == ("digits-labels", "digits-dirichlet")  # by the partition
    for part in (plain, full):
        one = part.experiment
        assert (one.data.source, one.model.name, one.seeds) == ("digits", "mlp", (0, 1, 2))
        assert one.train.rounds == 3  # of [small]
        assert [choice.label for choice in one.algorithms] == ["local", "ditto"]
        assert one.eval.every == 1 and one.algorithms[1].hyper["lam"] == 0.5
    assert plain.experiment.data.partition == "labels" and plain.experiment.train.participation == 0.1
    assert plain.experiment.data.options == {"labels_per_client": 3}
    assert (plain.experiment.data.clients, full.experiment.data.clients) == (50, 7)  # five a round; what it says


def test_the_small_scale_takes_rates_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "exp.toml"
    path.write_text(
        """
algorithms = ["local", { name = "fedavg", label = "quick", lr = 7.0 }, { name = "fedprox", lr = 5.0, mu = 0.2 }]
[data]
source = "cifar10"
root = "somewhere"
seed = 1
max_samples = 9
[train]
lr = 3.0
momentum = 0.9
participation = 0.25
[eval]
target = 0.7
"""
    )
    [part] = read_parts(path, scale="small")
    set_up = read_set_up(part.set_up)
    assert part.set_up == "digits-dirichlet" and set_up.rates is not None
    local, quick, prox = part.experiment.algorithms
    assert local.hyper["lr"] == set_up.rates["local"] and quick.hyper["lr"] == set_up.rates["fedavg"]
    assert prox.hyper == {"mu": 0.2}  # not tuned there: never 5.0 of other data, but [train]'s of these
    assert part.experiment.train.lr == set_up.rates["fedavg"] and part.experiment.train.momentum == 0.9
    assert part.experiment.eval.target == set_up.target and part.experiment.data.clients == 20
    data = part.experiment.data
    assert data.root is None and data.seed is None and data.max_samples is None
    [command] = read_parts(path, [("algorithm.lr", 0.5)], scale="small")
    assert all(choice.hyper["lr"] == 0.5 for choice in command.experiment.algorithms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[small]\nset_up = 'digit-domains'",
            r"small\.set_up = 'digit-domains' is not known\. Did you mean digits-domains",
        ),
        ("[data]\npartition = 'nothing'", r"data\.partition = 'nothing': no small set-up .* digits-labels"),
    ],
)
def test_a_small_set_up_that_is_not_there_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "exp.toml"
    path.write_text(f"algorithms = ['local']\n{text}\n")
    with pytest.raises(InputError, match=message):
        read_parts(path, scale="small")


def test_one_setting_can_be_chosen(file: Path) -> None:
    assert read_experiment(file, [("setting", "full")]).data.source == "digits"
    with pytest.raises(InputError, match=r"several settings \(plain, full\): choose one.*setting=plain"):
        read_experiment(file)
    with pytest.raises(InputError, match=r"setting = 'ful' is not known\. Did you mean full"):
        read_experiment(file, [("setting", "ful")])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[[setting]]", r"setting\.name = None: should be a name"),
        ("[[setting]]\nname = 'a/b'", r"setting\.name = 'a/b': should be a name"),
        ("[[setting]]\nname = 'full'", r"setting\.name = 'full': should be .* given once"),
        ("[[setting]]\nname = 'x'\ntitle = 1", r"setting\.title = 1: should be a text"),
        ("[[setting]]\nname = 'x'\ntrain.lrr = 1", r"train\.lrr = 1 .*Did you mean lr\?.*exp\.toml, line 32"),
        ("[[setting]]\nname = 'x'\nseeds.a = 1", r"seeds = \[0, 1\] is not a table"),
        ("[[setting]]\nname = 'x'\nsmall = 1", r"small = 1 should be a table"),
        ("[setting.eval]\nevery = 'often'", r"eval\.every = 'often'.*exp\.toml, line 31"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "exp.toml"
    path.write_text(FILE.rstrip() + f"\n{line}\n")
    with pytest.raises(InputError, match=message):
        read_parts(path)


def test_without_settings_nothing_changes() -> None:
    document = {"algorithms": ["local"], "train": {"rounds": 5}}
    assert parse_experiment(document | {"small": {"train": {"rounds": 2}}}).train.rounds == 5


def test_none_takes_a_key_away() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": 3}
    assert overlaid(before, {"a": {"b": None, "e": 5}, "f": {"g": 6}}) == {"a": {"c": 2, "e": 5}, "d": 3, "f": {"g": 6}}
    assert before == {"a": {"b": 1, "c": 2}, "d": 3}
