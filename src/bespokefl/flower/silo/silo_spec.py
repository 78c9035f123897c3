"""Where a silo is and what it holds: its own data, or a share of an experiment's simulated clients."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bespokefl.errors import InputError

if TYPE_CHECKING:
    from bespokefl.flower.silo.silo import Silo


@dataclass(frozen=True)
class Place:
    """What a node is told about its silo; each part may be written on a command line."""

    folder: str  # for its states and its personal model
    data: str = ""  # an npz file or a folder of images;
    experiment: str = ""  # or an experiment's file,
    settings: tuple[str, ...] = ()  # with these KEY=VALUE on top,
    clients: str = ""  # and which of its clients live here, as in 0-4,7; all unless given
    device: str = "auto"
    limits: tuple[str, ...] = ()  # what it puts up with, KEY=VALUE, where not the usual

    def open(self) -> "Silo":
        from bespokefl.experiments.reading import parse_setting, read_experiment
        from bespokefl.experiments.resolve import load_data
        from bespokefl.flower.silo.silo import open_silo

        if bool(self.data) == bool(self.experiment):
            raise InputError("a node needs either --data (its own samples) or --experiment (simulated clients).")
        folder = Path(self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(f"--folder {folder} cannot be made ({error}).") from None
        if self.data:
            return open_silo(folder, data=Path(self.data), device=self.device, limits=self.limits)
        experiment = read_experiment(Path(self.experiment), [parse_setting(text) for text in self.settings])
        there = range(load_data(experiment, experiment.seeds[0]).clients)
        chosen = parse_clients(self.clients) if self.clients else list(there)
        if unknown := [client for client in chosen if client not in there]:
            raise InputError(f"--clients names {unknown[0]}; the experiment has clients 0 to {len(there) - 1}.")
        return open_silo(folder, experiment=experiment, clients=chosen, device=self.device, limits=self.limits)


def parse_clients(text: str) -> list[int]:
    """The numbers that a text such as 0-4,7 names."""
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise InputError(f"--clients {text!r} is not a list of numbers and ranges, such as 0-4,7.")
        chosen.extend(range(int(first), int(last if dash else first) + 1))
    if len(set(chosen)) != len(chosen) or not chosen:
        raise InputError(f"--clients {text!r} names no client, or one of them twice.")
    return chosen


def shares(clients: int, nodes: int) -> list[str]:
    """The clients in as many ranges of about the same size, as `parse_clients` reads them."""
    bounds = [clients * number // nodes for number in range(nodes + 1)]
    return [_range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _range(begin: int, end: int) -> str:
    return str(begin) if end - begin == 1 else f"{begin}-{end - 1}"
