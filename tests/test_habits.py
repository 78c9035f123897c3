"""What keeps the repository in order: one version, targets that exist, tests that install nothing, a browser found."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.browser import find_browser

import bespokefl

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def steps_of(*targets: str) -> str:
    """The commands that make would run, with an environment that is there."""
    done = ["-o", ".venv/.installed", "-o", ".venv/.installed-dev", "-o", ".venv/bin/python"]
    return subprocess.run(["make", "-n", *done, *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_version_stands_once() -> None:
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [bespokefl.__version__]


def test_what_the_archive_of_the_sources_includes_exists() -> None:
    patterns = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(list(ROOT.glob(pattern.lstrip("/"))) for pattern in patterns), patterns
    assert {"/CONTRIBUTING.md", "/SECURITY.md", "/CHANGELOG.md"} <= {f"/{path.name}" for path in ROOT.glob("*.md")}


def test_make_test_installs_nothing_outside_the_environment() -> None:
    steps = steps_of("test")
    assert "ruff check" in steps and "ruff format --check" in steps and "mypy" in steps and "pytest" in steps
    assert not re.search(r"apt|playwright|install_browser", steps)


def test_ci_gets_a_browser_before_the_tests() -> None:
    [call] = re.findall(r"^exec make (.+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    steps = steps_of(*call.split())
    assert -1 < steps.find("install_browser") < steps.find("pytest")


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    assert {"lint", "types", "tests", "docs", "wheel"} <= jobs.keys()
    called = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    assert called and all(words[0] == "make" and set(words[1:]) <= TARGETS for words in called), called
    pythons = jobs["tests"]["strategy"]["matrix"]["python"]
    named = [c.rpartition(" :: ")[2] for c in PROJECT["project"]["classifiers"] if "Python :: 3." in c]
    assert pythons == named


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_pages_name_what_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert target in TARGETS, target
    for path in re.findall(r"`((?:src|tests|docs|examples)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:evaluation|experiments|models|core)/[\w./]+\.py)`", text):
        assert (ROOT / "src/bespokefl" / path).exists(), path


def test_contributing_names_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "src/bespokefl").glob("*/__init__.py")}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not {room for room in rooms if f"`{room}`" not in text}


def test_the_citation_names_the_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["keywords"] == PROJECT["project"]["keywords"]
    assert citation["title"].endswith(PROJECT["project"]["description"].lower())
    assert {"cff-version", "message", "authors"} <= citation.keys()


def test_a_browser_is_looked_for_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("BESPOKE_BROWSER", raising=False)
    assert find_browser() is None
    for build in ("chromium-1100", "chromium-1255"):
        own = tmp_path / "browsers" / build / "chrome-linux64" / "chrome"
        own.parent.mkdir(parents=True)
        own.touch(mode=0o755)
    assert find_browser() == str(own)
    installed = tmp_path / "bin" / "google-chrome"
    installed.parent.mkdir()
    installed.touch(mode=0o755)
    assert find_browser() == str(installed)
    monkeypatch.setenv("BESPOKE_BROWSER", os.devnull)
    assert find_browser() == os.devnull
