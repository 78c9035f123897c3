"""Runs that are killed at random moments, and in the middle of each file that they write.

What `--resume` makes of what is left is, file by file, what a run is that was never killed; only seconds and memory
(`TIMED_KEYS`) may differ. Four kills in the ordinary suite; `make test-slow` has 204. A pause in each
write lets many a kill leave a file half written.
"""

import collections
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.slow.killable import Ended, Killer
from tests.test_resume import assert_same_but_for_times

from bespokefl.report.publish import publish

SEED = 20
FEW, MANY = 4, 34  # kills of a case
LATEST = 0.1  # seconds after a write
AGAIN = 0.25  # of the resumed runs are killed, too
FEWEST_HALF = 0.1  # of many kills must leave a file half written, else they show little

COMMON = """
[data]
clients = 5
max_samples = 250
val = 0.2
[model]
name = "linear"
[train]
rounds = 4
local_epochs = 1
batch_size = 20
lr = 0.1
participation = 0.6
[checkpoint]
every = 2
[output]
personal = true
[engine]
name = "{engine}"
together = {together}
[eval]
{evaluated}
"""


class Case(NamedTuple):
    """An experiment of the campaign."""

    algorithms: str
    seeds: str = "[0]"
    engine: str = "sequential"
    together: int = 1
    evaluated: str = ""

    @property
    def toml(self) -> str:
        common = COMMON.format(engine=self.engine, together=self.together, evaluated=self.evaluated)
        return f"algorithms = {self.algorithms}\nseeds = {self.seeds}\n{common}"


CASES = {
    "no state, diagnostics": Case(
        '["fedavg"]', evaluated='also = ["global", "before_agg", "train", "s_acc", "g_acc"]\nfeatures = true'
    ),
    "personal models": Case('["ditto"]'),
    "states of others, facts": Case('[{ name = "pgfedmo", lr = 0.05 }]'),
    "optimiser's state": Case('[{ name = "fedavg", optimizer = "adam", opt_state = "keep", lr = 0.01 }]'),
    "two methods, two seeds": Case('["local", "pgfed"]', "[0, 1]"),
    "seeds in threads": Case('["ditto"]', "[0, 1]", "vectorized", 2),
}


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with Killer() as killer:
        yield killer


def undisturbed(killer: Killer, folder: Path, case: Case, *, report: bool) -> tuple[Path, Path, int]:
    """The experiment's file, what a run makes of it that was never killed, and with how many writes."""
    folder.mkdir()
    file, out = folder / "small.toml", folder / "out"
    file.write_text(case.toml)
    ended = killer.call("run", file, "--out", out, report=report)
    assert_ended(ended, "never killed")
    return file, out, ended.writes


def assert_ended(ended: Ended, where: str) -> None:
    assert ended.status == 0 and "Traceback" not in ended.said, f"{where}: {ended.said}"


def half_written(out: Path) -> bool:
    files = [path for path in out.rglob("*") if path.is_file()]
    lines = [path.read_bytes() for path in files if path.suffix == ".jsonl"]
    unfinished = any(".unfinished" in str(path.relative_to(out)) for path in files)
    return unfinished or any(line and not line.endswith(b"\n") for line in lines)


def how_far(out: Path) -> str:
    """What is there after a kill."""
    if not (written := list(out.glob("*/seed-*/rounds.jsonl"))):
        return "before the first round"
    finished = {path.parent for path in out.glob("*/seed-*/summary.json")}
    if all(path.parent in finished for path in written):
        return "after a run"
    later = any((path.parent / "personal").is_dir() for path in written if path.parent not in finished)
    return "in a run's results" if later else "in a run's rounds"


@pytest.mark.parametrize(
    ("name", "kills"),
    [("states of others, facts", FEW), *(pytest.param(name, MANY, marks=pytest.mark.slow) for name in CASES)],
)
def test_killed_at_random_moments(killer: Killer, tmp_path: Path, name: str, kills: int) -> None:
    moments = random.Random(f"{SEED} {name}")
    file, whole, writes = undisturbed(killer, tmp_path / "whole", CASES[name], report=False)
    tried: collections.Counter[str] = collections.Counter()
    done = 0
    for attempt in range(10 * kills):
        out = tmp_path / f"killed-{attempt}"
        where = f"seed {SEED}, attempt {attempt} in {out}"
        resume: list[str] = []
        while not resume or moments.random() < AGAIN:
            after = moments.randint(0, writes), moments.uniform(0, LATEST)
            where += f", killed {after[1]:.3f} s after write {after[0]}"
            ended = killer.call("run", file, "--out", out, *resume, after=after, report=False)
            resume = ["--resume"]
            if ended.status != -signal.SIGKILL:
                assert_ended(ended, where)
                tried["over before its moment"] += 1
                break
            done += 1
            tried[how_far(out)] += 1
            tried["half written"] += half_written(out)
        ended = killer.call("run", file, "--out", out, "--resume", report=False)
        assert_ended(ended, where)
        try:
            assert_same_but_for_times(whole, out)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
        shutil.rmtree(out)
        if done >= kills:
            break
    print(f"{name}: {done} kills, {dict(tried)}")
    assert done >= kills
    assert tried["half written"] >= FEWEST_HALF * done or kills == FEW


# Every file of a run, as it goes on from one kill to the next: in which of the writes to a file it is killed.
WRITES = [
    ("seed-0.lock", 1),
    ("partition-seed-0.csv", 1),
    ("config.toml", 1),
    ("evaluations.jsonl", 1),  # who the clients are
    ("000001.safetensors", 1),
    ("evaluations.jsonl", 2),  # round 2
    ("rounds.jsonl", 2),
    ("round-000002.safetensors", 1),
    ("round-000002.json", 1),
    ("evaluations.jsonl", 3),
    ("rounds.jsonl", 1),  # what it held at the checkpoint
    ("rounds.jsonl", 2),  # round 3
    ("round-000004.safetensors", 1),
    ("round-000004.json", 1),
    ("client-3.safetensors", 1),
    ("clients.csv", 1),
    ("results.parquet", 1),
    ("summary.json", 1),
]
OF_REPORT = [("result.png", 1), ("result.svg", 1), ("report.html", 1)]


def kill_in(
    killer: Killer, file: Path, out: Path, writes: Sequence[tuple[str, int]], parts: random.Random, *, report: bool
) -> None:
    """One run that dies in one write after the other, some part of which reaches the file."""
    for name, nth in writes:
        within = (name, nth, parts.random())
        resume = ["--resume"] if out.exists() else []
        ended = killer.call("run", file, "--out", out, *resume, within=within, report=report)
        assert ended.status == -signal.SIGKILL, f"{within}: {ended.said}"
    ended = killer.call("run", file, "--out", out, "--resume", report=report)
    assert_ended(ended, f"seed {SEED}, {out}")


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_each_file(killer: Killer, tmp_path: Path, times: int) -> None:
    parts = random.Random(SEED)
    file, whole, _ = undisturbed(killer, tmp_path / "whole", CASES["states of others, facts"], report=False)
    for time in range(times):
        out = tmp_path / f"killed-{time}"
        kill_in(killer, file, out, WRITES, parts, report=False)
        assert_same_but_for_times(whole, out)


@pytest.mark.slow
def test_killed_in_the_middle_of_the_report(killer: Killer, tmp_path: Path) -> None:
    parts = random.Random(SEED)
    file, whole, _ = undisturbed(killer, tmp_path / "whole", CASES["no state, diagnostics"], report=True)
    out = tmp_path / "killed"
    kill_in(killer, file, out, OF_REPORT * 3, parts, report=True)
    assert_same_but_for_times(whole, out)
    report = (out / "report.html").read_bytes()
    assert publish(out).read_bytes() == report  # the other one's seconds differ
