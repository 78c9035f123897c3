"""Reading an experiment: values, settings of the command line, and messages that a user can act on."""

from pathlib import Path

import pytest
from rich.console import Console

from bespokefl.errors import InputError
from bespokefl.experiments.reading import parse_experiment, parse_setting, read_experiment
from bespokefl.experiments.running import run_experiment
from bespokefl.experiments.schema import Experiment
from bespokefl.progress import LineReporter


def read(tmp_path: Path, text: str, *settings: str) -> Experiment:
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return read_experiment(path, [parse_setting(setting) for setting in settings])


def test_defaults_and_values(tmp_path: Path) -> None:
    experiment = read(
        tmp_path,
        """seeds = [3, 1]
        algorithms = ["local", {name = "ditto", label = "ditto-strong", lam = 2.0}]
        [data]
        clients = 7
        alpha = 0.5
        [model]
        hidden = [30]
        [train]
        batch_size = "full"
        """,
    )
    assert experiment.seeds == (3, 1)
    assert [(c.name, c.label, c.hyper) for c in experiment.algorithms] == [
        ("local", "local", {}),
        ("ditto", "ditto-strong", {"lam": 2.0}),
    ]
    assert (experiment.data.source, experiment.data.clients, experiment.data.options) == ("digits", 7, {"alpha": 0.5})
    assert (experiment.model.name, experiment.model.options) == ("mlp", {"hidden": [30]})
    assert experiment.train.batch_size == "full"
    assert (experiment.eval.every, experiment.eval.select, experiment.checkpoint.every) == (1, "auto", "auto")


def test_single_algorithm_table(tmp_path: Path) -> None:
    experiment = read(tmp_path, "[algorithm]\nname = 'fedprox'\nmu = 0.2\n")
    assert [(c.name, c.label, c.hyper) for c in experiment.algorithms] == [("fedprox", "fedprox", {"mu": 0.2})]
    assert experiment.seeds == (0,)


def test_settings_override_the_file(tmp_path: Path) -> None:
    text = "algorithms = ['local']\n[train]\nrounds = 5\n"
    experiment = read(tmp_path, text, "train.rounds=9", "data.partition=iid", "seeds=[4,5]", "train.lr=1")
    assert (experiment.train.rounds, experiment.train.lr) == (9, 1.0)
    assert (experiment.data.partition, experiment.seeds) == ("iid", (4, 5))


def test_a_hyper_parameter_goes_to_the_algorithms_that_have_it(tmp_path: Path) -> None:
    text = "algorithms = ['local', 'fedprox', {name = 'fedprox', label = 'own', mu = 0.3}]\n[algorithm]\nmu = 0.2\n"
    of_file = read(tmp_path, text)
    assert [c.hyper for c in of_file.algorithms] == [{}, {"mu": 0.2}, {"mu": 0.3}]
    of_command = read(tmp_path, text, "algorithm.mu=0.7")
    assert [c.hyper for c in of_command.algorithms] == [{}, {"mu": 0.7}, {"mu": 0.7}]


def test_choosing_anew_drops_the_options_of_the_old_choice(tmp_path: Path) -> None:
    text = "[algorithm]\nname = 'fedprox'\nmu = 0.2\n[data]\nalpha = 0.1\nclients = 4\n[model]\nhidden = [9]\n"
    settings = ("algorithm.name=ditto", "data.partition=labels", "data.labels_per_client=2", "model.name=linear")
    experiment = read(tmp_path, text, *settings)
    assert [(c.name, c.hyper) for c in experiment.algorithms] == [("ditto", {})]
    assert (experiment.data.clients, experiment.data.options) == (4, {"labels_per_client": 2})
    assert experiment.model.options == {}
    kept = read(tmp_path, text, "algorithm.name=fedprox", "data.partition=dirichlet", "model.name=mlp")
    assert kept.algorithms[0].hyper == {"mu": 0.2}
    assert (kept.data.options, kept.model.options) == ({"alpha": 0.1}, {"hidden": [9]})


def test_a_list_of_the_command_line_replaces_the_file_s_algorithm(tmp_path: Path) -> None:
    experiment = read(tmp_path, "[algorithm]\nname = 'fedprox'\nmu = 0.2\n", "algorithms=[local, fedavg]")
    assert [(c.name, c.hyper) for c in experiment.algorithms] == [("local", {}), ("fedavg", {})]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("algorithms = ['local']\n\n[train]\nround = 5", ["train.round = 5", "rounds", "line 4"]),
        ("algorithms = ['local']\ntrian = 1", ["'trian'", "Did you mean train", "exp.toml, line 2"]),
        ("algorithms = ['local']\n\n[trian]\nlr = 1", ["'trian'", "Did you mean train", "exp.toml, line 3"]),
        ("algorithms = ['local']\n[train]\nlr = 'high'", ["train.lr = 'high'", "number", "exp.toml, line 3"]),
        ("algorithms = ['local']\n[train]\nlr = 0", ["train.lr = 0", "greater than 0", "line 3"]),
        ("algorithms = ['local']\n[train]\nrounds = 0", ["train.rounds = 0", "greater than or equal to 1", "line 3"]),
        ("algorithms = ['local']\n[train]\nrounds = true", ["train.rounds = True", "integer"]),
        ("algorithms = ['local']\n[train]\nbatch_size = 'all'", ["train.batch_size = 'all'", "'full'", "integer"]),
        (
            "algorithms = ['local']\n[train]\nparticipation = 1.5",
            ["train.participation = 1.5", "less than or equal to 1"],
        ),
        ("algorithms = ['local']\n[train]\nlr = nan", ["train.lr = nan", "finite"]),
        ("algorithms = ['local']\ntrain = 3", ["train = 3", "[train]", "exp.toml, line 2"]),
        ("algorithms = ['local']\n[eval]\nselect = 'best'", ["eval.select = 'best'", "'best_test'", "line 3"]),
        ("algorithms = ['local']\n[data]\npartition = 'dirichlt'", ["dirichlt", "Did you mean dirichlet?", "line 3"]),
        ("algorithms = ['local']\n[data]\nsource = 'digit'", ["data.source = 'digit'", "digits", "line 3"]),
        ("algorithms = ['local']\n[data]\nlabels_per_client = 2", ["data.labels_per_client = 2", "alpha", "line 3"]),
        ("algorithms = ['local']\n[model]\nhiden = [3]", ["model.hiden = [3]", "Did you mean hidden?", "line 3"]),
        ("algorithms = ['loca']", ["algorithm.name = 'loca'", "Did you mean local?", "line 1"]),
        ("\nalgorithms = [3]", ["algorithms.0 = 3", "name", "exp.toml, line 2"]),
        ("algorithms = [\n'local',\n['ditto'],\n]", ["algorithms.1 = ['ditto']", "exp.toml, line 3"]),
        ("algorithms = [\n'local',\n{lam = 1},\n]", ["algorithms.1 = {'lam': 1}", "exp.toml, line 3"]),
        ("algorithms = [\n'local',\n# {name = 'x'}\n'dito',\n]", ["'dito'", "Did you mean ditto", "exp.toml, line 4"]),
        ("algorithms = [\n'local',\n'nowhere:X']", ["'nowhere:X' cannot be imported", "exp.toml, line 3"]),
        ("[[algorithms]]\nname = 'local'\n[[algorithms]]\nname = 'dito'", ["'dito'", "exp.toml, line 4"]),
        ("[algorithm]\n\nname = 'dito'", ["'dito'", "exp.toml, line 3"]),
        ("algorithms = 'local'", ["algorithms = 'local'", "exp.toml, line 1"]),
        ("algorithms = []", ["algorithms = []"]),
        ("seeds = [0]", ["algorithms is missing", "(", "exp.toml)"]),
        ("algorithms = ['local']\nseeds = []", ["seeds = []", "line 2"]),
        ("algorithms = ['local']\nseeds = [1, 1]", ["seeds = [1, 1]", "different"]),
        ("algorithms = ['local']\nseeds = [9223372036854775808]", ["seeds = [9223372036854775808]", "2^63"]),
        ("algorithms = ['local']\n[data]\nseed = 9223372036854775808", ["data.seed = 9223372036854775808", "less"]),
        ("algorithms = ['local']\nseeds = [-1]", ["seeds = [-1]"]),
        ("algorithms = [\n'local',\n'Local:Local', 'local']", ["'Local:Local' cannot be imported", "line 3"]),
        ("algorithms = [\n'local',\n'local']", ["algorithm.label = 'local' stands twice", "exp.toml, line 3"]),
        ("algorithms = [\n{name = 'local', note = 3}]", ["algorithm.note = 3", "a sentence", "line 2"]),
        ("algorithms = [\n{name = 'local', note = 'a  b'}]", ["algorithm.note = 'a  b'", "one line", "line 2"]),
        ("algorithms = [\n{name = 'local', label = '../x'}]", ["algorithm.label = '../x'", "folder", "line 2"]),
        ("algorithms = ['local']\n[algorithm]\nname = 'ditto'", ["algorithm.name = 'ditto'", "keep one", "line 3"]),
        ("algorithms = ['local', 'fedavg']\n[algorithm]\nmuu = 1.0", ["algorithm.muu = 1.0", "line 3"]),
        ("algorithms = ['local'\n[train]", ["not valid TOML", "line 2"]),
        ("algorithms = ['local']\n[train]\nlr = = 1", ["exp.toml is not valid TOML", "line 3, column 6"]),
        ("algorithms = ['local']\n[train]\nlr = 1\nlr = 2", ["exp.toml is not valid TOML", "line 4"]),
        ('algorithms = [\'local\']\n[paper]\ntitle = """\n[train]\nlrr = 1\n"""\n[train]\nlrr = 2', ["line 8"]),
        ("algorithms = ['local']\r\n[train]\r\nlrr = 2", ["train.lrr = 2", "exp.toml, line 3"]),
        ("algorithms = ['local']\ntrain = {lr = 1, lrr = 2}", ["train.lrr = 2", "exp.toml, line 2"]),
        ("algorithms = ['local']\n\ntrain.lrr = 2", ["train.lrr = 2", "exp.toml, line 3"]),
        ("algorithms = ['local']\n[track]\nto = ['wandb']", ["track.to = ['wandb']", "'mlflow'", "line 3"]),
    ],
)
def test_messages(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("algorithms = ['local',\n{name = 'ditto', lamm = 1}]", ["algorithm.lamm = 1", "Did you mean lam", "line 2"]),
        ("algorithms = ['local',\n{name = 'ditto', lam = -1}]", ["algorithm.lam = -1", "at least 0", "line 2"]),
        ("[[algorithms]]\nname = 'ditto'\nlam = 'high'", ["algorithm.lam = 'high'", "a number", "line 3"]),
        ("algorithms = ['local',\n{name = 'plgu-lf', D = 99}]", ["algorithm.D = 99", "from 0 to 3", "line 2"]),
        ("algorithms = ['local',\n'fedrep']\n[model]\nname = 'linear'", ["algorithm.name = 'fedrep'", "line 2"]),
        ("algorithms = ['local']\n[model]\nname = 'mlpp'", ["model.name", "mlpp", "Did you mean mlp", "line 3"]),
        ("algorithms = ['local']\n[model]\nname = 'nowhere:net'", ["nowhere", "line 3"]),
        ("algorithms = ['local']\n[model]\nhead = 'nix'", ["model.head = 'nix'", "line 3"]),
        ("algorithms = ['local']\n[model]\nhidden = 'wide'", ["model.hidden", "'wide'", "line 3"]),
        ("algorithms = ['local']\n[data]\nalpha = 'x'", ["data.alpha = 'x'", "number", "line 3"]),
        ("algorithms = ['local']\n[data]\nnormalize = 'unitt'", ["data.normalize = 'unitt'", "unit", "line 3"]),
        ("algorithms = ['local']\n[data]\nclients = 5000", ["data.clients = 5000", "1 to 898", "line 3"]),
        ("algorithms = ['local']\n[engine]\nname = 'steam'", ["engine.name = 'steam'", "line 3"]),
        ("algorithms = ['local']\n[engine]\ndevice = 'abacus'", ["engine.device = 'abacus'", "line 3"]),
        ("algorithms = ['local']\n[eval]\nselect = 'val'", ["eval.select = 'val'", "data.val", "line 3"]),
        ("algorithms = ['local']\n[new_clients]\ncount = 99", ["new_clients.count = 99", "line 3"]),
    ],
)
def test_messages_of_what_only_data_and_model_show(tmp_path: Path, text: str, parts: list[str]) -> None:
    """Before any round, and before any folder is made."""
    experiment = read(tmp_path, text)
    with pytest.raises(InputError) as error:
        run_experiment(experiment, tmp_path / "out", resume=False, reporter=LineReporter(Console(quiet=True)))
    for part in ("exp.toml", *parts):
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()


def test_messages_say_when_the_command_line_is_to_blame(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.lr = 'x'.*command line"):
        read(tmp_path, "algorithms = ['local']\n[train]\nlr = 0.1\n", "train.lr=x")
    with pytest.raises(InputError, match="train is not a table"):
        parse_experiment({"algorithms": ["local"], "train": 1}, [("train.lr", 0.1)])
    with pytest.raises(InputError, match="key=value"):
        parse_setting("train.lr")


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.toml cannot be read"):
        read_experiment(tmp_path / "no.toml")


@pytest.mark.parametrize("every", [2, 10])
def test_rounds_to_a_target_are_counted_round_by_round(tmp_path: Path, every: int) -> None:
    text = f'algorithms = ["local"]\n[eval]\nevery = {every}\ntarget = 0.7\n'
    path = tmp_path / "exp.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"eval\.every = {every} .*eval\.target = 0\.7.*eval\.every = 1.*line 3"):
        read_experiment(path)
    assert read_experiment(path, [("eval.every", 1)]).eval.target == 0.7
    path.write_text(text.replace("target = 0.7\n", ""))
    assert read_experiment(path).eval.every == every
