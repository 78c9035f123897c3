"""Checkpoint files that survive a crash at any moment; what is in them is the caller's business.

A checkpoint is two files, ``round-000012.safetensors`` and ``round-000012.json``. Both are written in a subfolder for
unfinished files, flushed to disk and moved up, the JSON last: it is the commit mark, and holds the checksum of both.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bespokefl.errors import RunError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

FORMAT = 1
_NAME = re.compile(r"round-(\d{6,})\.(safetensors|json)")
_UNFINISHED = ".unfinished"  # a folder, since writing safetensors leaves temporary files of its own when killed


@dataclass(frozen=True)
class Checkpoint:
    """What `save` was given, and what was wrong with newer files, if any."""

    step: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def save(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, JSON], keep: int = 2) -> None:
    """Write the checkpoint of a step, then remove all but it and the ``keep - 1`` before it.

    Checkpoints of later steps are removed too: a run that saves this step has gone back behind them.
    """
    unfinished = folder / _UNFINISHED
    tensors_path, json_path = _paths(folder, step)
    tensors_tmp, json_tmp = _paths(unfinished, step)
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file(separate(tensors), tensors_tmp)
        _flush(tensors_tmp)
        checksum = _sha256(tensors_tmp)
        content = {"format": FORMAT, "step": step, "names": list(tensors), "tensors": checksum, "meta": meta}
        json_tmp.write_text(json.dumps(content | {"sha256": _seal(content)}, indent=1), encoding="utf-8")
        _flush(json_tmp)
        tensors_tmp.chmod(json_tmp.stat().st_mode)  # safetensors makes it private to the user, whatever the umask says
        tensors_tmp.replace(tensors_path)
        json_tmp.replace(json_path)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write the checkpoint {json_path}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _remove_all_but(folder, step, keep)


def tidy(folder: Path, step: int, keep: int) -> None:
    """What a save does at its end, for one that was killed before it had."""
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)
    _remove_all_but(folder, step, keep)


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if the folder holds none (or only a save that never finished)."""
    warnings: list[str] = []
    damaged = False
    for step, suffixes in sorted(_steps(folder).items(), reverse=True):
        tensors_path, json_path = _paths(folder, step)
        if "json" not in suffixes:
            warnings.append(f"{tensors_path}: {json_path.name} is missing, so this save did not finish or lost a file")
            continue
        try:
            tensors, meta = _read(tensors_path, json_path, step)
        except _DamagedError as error:
            damaged = True
            warnings.append(str(error))
        else:
            return Checkpoint(step, tensors, meta, warnings)
    if damaged:
        listed = "\n  ".join(warnings)
        raise RunError(f"no checkpoint in {folder} can be read; remove the folder to start afresh:\n  {listed}")
    return None


def newest_meta(folder: Path) -> dict[str, Any] | None:
    """What the caller noted in the newest checkpoint whose JSON can be read, without its tensors."""
    for step in sorted(_steps(folder), reverse=True):
        try:
            return _read_json(_paths(folder, step)[1], step)["meta"]  # type: ignore[no-any-return]
        except _DamagedError:
            continue
    return None


class _DamagedError(Exception):
    """A file of a checkpoint is not what was saved; the text names the file and the reason."""


def _read_json(json_path: Path, step: int) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(json_path.read_text(encoding="utf-8"))
        seal = content.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _DamagedError(f"{json_path}: cannot be read ({type(error).__name__}: {error})") from error
    if content.get("format") != FORMAT:
        raise _DamagedError(f"{json_path}: its format is {content.get('format')!r}, this version reads {FORMAT}")
    if seal != _seal(content) or content["step"] != step:
        raise _DamagedError(f"{json_path}: its content does not match its checksum")
    return content


def _read(tensors_path: Path, json_path: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    content = _read_json(json_path, step)
    try:
        if _sha256(tensors_path) != content["tensors"]:
            raise _DamagedError(f"{tensors_path}: its content does not match the checksum in {json_path.name}")
        mapped = load_file(tensors_path)
    except (OSError, SafetensorError) as error:
        raise _DamagedError(f"{tensors_path}: cannot be read ({type(error).__name__}: {error})") from error
    # The loaded tensors are windows on the file: cloned, nothing that happens to it later can reach them.
    return {name: mapped[name].clone() for name in content["names"]}, content["meta"]


def separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors on the CPU, each with memory of its own, as the format asks; copied only where needed."""
    separate: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        if flat.untyped_storage().data_ptr() in seen:
            flat = flat.clone()
        seen.add(flat.untyped_storage().data_ptr())
        separate[name] = flat
    return separate


def _remove_all_but(folder: Path, step: int, keep: int) -> None:
    """Keep the newest ``keep`` committed checkpoints up to this step; remove the commit mark first."""
    steps = _steps(folder)
    committed = sorted(s for s, suffixes in steps.items() if "json" in suffixes and s <= step)
    for other in steps.keys() - set(committed[-max(keep, 1) :]):
        tensors_path, json_path = _paths(folder, other)
        json_path.unlink(missing_ok=True)
        tensors_path.unlink(missing_ok=True)


def _steps(folder: Path) -> dict[int, set[str]]:
    """The steps that have files in the folder, with their suffixes."""
    steps: dict[int, set[str]] = {}
    if folder.is_dir():
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                steps.setdefault(int(match[1]), set()).add(match[2])
    return steps


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    return folder / f"round-{step:06d}.safetensors", folder / f"round-{step:06d}.json"


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders, and orders renames itself
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
