"""The commands' words on wrong input, before any process starts, and what they print."""

import stat
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from bespokefl.cli import app
from bespokefl.errors import InputError
from bespokefl.flower.silo.silo_spec import parse_clients, shares
from bespokefl.flower.silo.worker import Assignment, Place
from bespokefl.flower.transport.version import require_flower

runner = CliRunner()


def invoke(*arguments: object) -> tuple[int, str]:
    done = runner.invoke(app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def test_certs_says_who_gets_what(tmp_path: Path) -> None:
    code, output = invoke("certs", tmp_path / "c", "--node", "ada", "--host", "fl.example.org")
    assert code == 0
    assert "ada.key: give it to ada and to nobody else" in output
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    code, output = invoke("certs", tmp_path / "c")
    assert code == 2 and "exists already and is not overwritten" in output


@pytest.mark.parametrize("name", ["../evil", "ca", "server", "", "-x", "a/b"])
def test_a_nodes_files_stay_in_the_folder_and_replace_no_other(name: str, tmp_path: Path) -> None:
    code, output = invoke("certs", tmp_path / "c", f"--node={name}")
    assert code == 2 and f"--node {name!r}" in output
    assert not list(tmp_path.iterdir())


def test_names_of_nodes_and_days_are_checked(tmp_path: Path) -> None:
    code, output = invoke("certs", tmp_path / "c", "--node", "a", "--node", "a")
    assert code == 2 and "each should stand there once" in output
    assert invoke("certs", tmp_path / "c", "--days", "-1")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "{tmp}"], "--ca and --key are needed"),
        (["--data", "{tmp}", "--insecure", "--ca", "{tmp}"], "--insecure stands beside --ca or --key"),
        (["--insecure"], "either --data"),
        (["--insecure", "--data", "{tmp}", "--experiment", "{tmp}"], "either --data"),
        (["--insecure", "--data", "{tmp}/absent"], "absent does not exist"),
        (["--insecure", "--data", "{tmp}", "--methods", "fedavgg"], "--methods = 'fedavgg'"),
        (["--data", "{tmp}", "--ca", "{tmp}/no.pem", "--key", "{tmp}"], "--ca {tmp}/no.pem does not exist"),
    ],
)
def test_a_node_with_wrong_options(arguments: list[str], words: str, tmp_path: Path) -> None:
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    code, output = invoke("node", "--superlink", "127.0.0.1:1", "--folder", tmp_path / "silo", *given)
    assert code == 2
    assert words.format(tmp=tmp_path) in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--certs is missing"),
        (["--insecure", "--certs", "{tmp}"], "--insecure stands beside --certs"),
        (["--insecure"], "--nodes is missing"),
        (["--certs", "{tmp}"], "holds no ca.pem"),
    ],
)
def test_a_server_with_wrong_options(arguments: list[str], words: str, tmp_path: Path) -> None:
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    code, output = invoke("server", "absent.toml", *given)
    assert code == 2
    assert words in output


def test_more_nodes_than_clients(tmp_path: Path) -> None:
    code, output = invoke("federate", "--nodes", "7", "--set", "data.clients=5", "--out", tmp_path / "out")
    assert code == 2
    assert "--nodes 7 is more than the 5 clients of the experiment; allowed: 1 to 5" in output


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pgfedmo" / "seed-0").mkdir(parents=True)
    code, output = invoke("federate", "--out", tmp_path)
    assert code == 2
    assert "seed-0 is there already; add --resume" in output


@pytest.mark.parametrize(("text", "expected"), [("3", [3]), ("0-2", [0, 1, 2]), ("0-1,5, 7-8", [0, 1, 5, 7, 8])])
def test_clients(text: str, expected: list[int]) -> None:
    assert parse_clients(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "2-1", "0-3,2", "1,,2"])
def test_wrong_clients(text: str) -> None:
    with pytest.raises(InputError, match="--clients"):
        parse_clients(text)


@pytest.mark.parametrize(("clients", "nodes"), [(6, 3), (7, 3), (100, 4), (5, 5), (1, 1)])
def test_shares_are_all_clients_once_and_even(clients: int, nodes: int) -> None:
    parts = [parse_clients(share) for share in shares(clients, nodes)]
    assert [client for part in parts for client in part] == list(range(clients))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_an_assignment_survives_the_command_line() -> None:
    settings, limits = ("train.rounds=3", 'data.source="ü"'), ("repeats=2", "methods=fedavg,pgfed")
    place = Place("silo", experiment="e.toml", settings=settings, clients="0-4", limits=limits)
    assignment = Assignment(place, "host:9092", "ca.pem", "node.key")
    assert Assignment.from_json(assignment.to_json()) == assignment


def test_another_release_of_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_flower()
    monkeypatch.setattr("bespokefl.flower.transport.version.metadata.version", lambda _: "1.42.0")
    with pytest.raises(InputError, match=r"flwr 1.42.0 is installed; allowed: 1.41"):
        require_flower()


@pytest.mark.parametrize(
    "arguments", [["federate"], ["certs", "c"], ["server", "e.toml"], ["node", "--superlink", "h:1", "--folder", "f"]]
)
def test_without_flower_the_way_to_it_is_said(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("bespokefl.flower.transport.version.metadata.version", absent)
    code, output = invoke(*arguments)
    assert code == 2 and "pip install 'bespokefl[flower]'" in output
