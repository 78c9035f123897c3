"""What functions of the front door take: an experiment as a file or a dict, settings on top, and progress or not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bespokefl.errors import InputError
from bespokefl.experiments.overrides import Setting
from bespokefl.experiments.reading import parse_experiment, read_experiment
from bespokefl.experiments.schema import Experiment
from bespokefl.progress import Reporter, make_console, make_reporter, quiet_console

Document = Mapping[str, Any]  # an experiment's keys, as its TOML file has them


def read(experiment: str | Path | Document, settings: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment of a TOML file or of a dict with the same keys, with settings by dotted key on top."""
    if isinstance(experiment, str | Path):
        return read_experiment(Path(experiment), given(settings))
    if isinstance(experiment, Mapping):
        return parse_experiment(dict(experiment), given(settings))
    raise InputError(f"experiment = {experiment!r}: should be the path of a TOML file, or a dict with the keys of one.")


def given(settings: Mapping[str, Any] | None) -> list[Setting]:
    """Settings as the command line gives them: {"train.rounds": 10} is --set train.rounds=10."""
    if settings is None:
        return []
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise InputError(f'settings = {settings!r}: should be a dict by dotted key, such as {{"train.rounds": 10}}.')
    return list(settings.items())


def reporter_for(progress: bool, **options: int) -> Reporter:
    """A bar or lines on standard error; without progress, silence."""
    return make_reporter(make_console(stderr=True) if progress else quiet_console(), **options)
