"""What the folder of a run holds, and whether this very run may go on with it."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespokefl.errors import InputError
from bespokefl.experiments import checkpoint
from bespokefl.experiments.one_run import CONFIG_NOTE, DATA_NOTE, RunPlan
from bespokefl.results import files, store
from bespokefl.results.evaluations import EVALUATIONS, what_is_lost
from bespokefl.results.model_file import is_whole
from bespokefl.results.surfaces import ABOUT, NUMBERS
from bespokefl.results.tomlfile import dumps

# Keys of how a run is operated: they may change while it is going, and its numbers by no more than their rounding.
OPERATION = ("federation.", "engine.together", "engine.stack", "engine.debug_client")
REMARKS = ("unused.",)  # written for people; they set nothing
ANEW = "remove the folder to start this run afresh, or give another --out"


@dataclass(frozen=True)
class Found:
    """What is to be done in a run's folder."""

    finished: bool  # whether the run needs no more work
    notes: tuple[str, ...] = ()  # what its user should know


def examine(plan: RunPlan, *, resume: bool) -> Found:
    """Whether an earlier call finished this very run; refuses a folder that holds something else.

    The checkpoint says which configuration and which data a run was made with, config.toml only where it does not (a
    run of an older version, or without a checkpoint yet).
    """
    folder = plan.folder
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return Found(finished=False)
    if not resume:
        raise InputError(f"{folder} is not empty; add --resume to go on with what it holds, or give another --out.")
    meta = checkpoint.newest_meta(folder / files.CHECKPOINT) or {}
    damage = _check_configuration(plan, meta)
    _check_data(plan, meta)
    if not (folder / files.SUMMARY).is_file():
        return Found(False, tuple(f"{folder}: {text}: written anew" for text in damage))
    run = files.read_run(folder)
    damage += [*run.damage, *_missing_products(plan, run)]
    if damage and meta.get("rounds_done") == plan.rounds and len(run.rounds) >= plan.rounds:
        return Found(False, (f"{folder}: {'; '.join(damage)}: made again from the checkpoint",))
    if run.summary is None:
        return Found(False, (f"{folder}: {'; '.join(damage)}, and no checkpoint of its last round is left",))
    if "ended_early" in run.summary:
        return Found(False)
    damage += what_is_lost(folder / EVALUATIONS, run.rounds)
    return Found(True, tuple(f"{folder}: {text}: {ANEW}" for text in damage))


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Keys whose values differ, with both values."""
    before, now = dict(_flat(stored)), dict(_flat(tomllib.loads(dumps(wanted))))
    for key in before.keys() | now.keys():
        if key.startswith((*OPERATION, *REMARKS)):
            continue
        if key not in before or key not in now or before[key] != now[key]:
            yield f"{key} was {before.get(key, 'absent')!r} and is now {now.get(key, 'absent')!r}"


def _check_configuration(plan: RunPlan, meta: Mapping[str, Any]) -> list[str]:
    """Refuses another configuration; what is wrong with config.toml where the checkpoint makes up for it."""
    path, noted = plan.folder / files.CONFIG, meta.get(CONFIG_NOTE)
    stored, damage = _read(path)
    if noted is not None:
        _refuse(plan, tomllib.loads(noted))
        return [] if stored is not None else [f"{path.name} {damage}"]
    if stored is not None:
        _refuse(plan, stored)
    elif path.exists() or any((plan.folder / name).exists() for name in (files.ROUNDS, files.SUMMARY)):
        raise InputError(f"{path} {damage}, so nobody can tell what {plan.folder} was made with; {ANEW}.")
    return []


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The content, or None and why there is none."""
    if not path.is_file():
        return None, "is missing"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), ""
    except (OSError, ValueError) as error:
        return None, f"cannot be read ({error})"


def _refuse(plan: RunPlan, stored: Mapping[str, Any]) -> None:
    if differing := sorted(differences(stored, plan.document)):
        raise InputError(
            f"{plan.folder} holds a run of another configuration, so --resume cannot go on with it: "
            f"{'; '.join(differing)}. Use the same configuration, or give another --out."
        )


def _check_data(plan: RunPlan, meta: Mapping[str, Any]) -> None:
    before = meta.get(DATA_NOTE)
    if before is None:
        return
    differing = [part for part in sorted({*before, *plan.data}) if before.get(part) != plan.data.get(part)]
    if differing:
        raise InputError(
            f"{plan.folder} holds a run on other data, so --resume cannot go on with it: {', '.join(differing)} "
            f"{'differ' if len(differing) > 1 or differing[0] != 'partition' else 'differs'} (data.source, data.root). "
            "Give the data that it was made with, or another --out."
        )


def _missing_products(plan: RunPlan, run: files.StoredRun) -> Iterator[str]:
    """Files of a finished run that are made from its checkpoint and are not there, or not whole."""
    folder, wanted = run.folder, []
    if store.is_damaged(folder):
        yield f"{store.RESULTS} is damaged"
    if plan.output.surface:
        wanted += [NUMBERS, ABOUT]
    if plan.new_clients.wanted:
        wanted.append(files.NEW_CLIENTS)
    yield from (f"{name} is missing" for name in wanted if not (folder / name).is_file())
    if plan.output.personal and run.summary is not None:
        whole = sum(is_whole(path) for path in (folder / files.PERSONAL).glob("client-*.safetensors"))
        if whole != (clients := run.summary.get("n_clients")):
            yield f"{files.PERSONAL}/ holds {whole} whole models of {clients}"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
