"""The files of a run that is over: per-client figures, summary, personal models, and what new clients reach."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bespokefl import __version__
from bespokefl.core import trees
from bespokefl.engines.peak import PeakMemory
from bespokefl.evaluation.score import Score
from bespokefl.experiments.callbacks.logs import RoundLines
from bespokefl.experiments.callbacks.selecting import Selecting
from bespokefl.experiments.joining import let_new_clients_join
from bespokefl.experiments.loss_surface import surfaces
from bespokefl.federation import Federation
from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.federation.loop import RoundLoop
from bespokefl.progress import Reporter
from bespokefl.results import files, store
from bespokefl.results.model_file import write_model
from bespokefl.results.summary import client_columns, further_figures, main_figures, meanings, untrained
from bespokefl.results.surfaces import write_surfaces

if TYPE_CHECKING:
    from bespokefl.experiments.one_run import RunPlan

MODELS_AT_ONCE = 64


class Results(Callback):
    """Writes what the run was for, once its rounds are over."""

    def __init__(
        self, plan: "RunPlan", rule: str, rounds: RoundLines, selecting: Selecting, memory: PeakMemory, say: Reporter
    ) -> None:
        self._plan, self._rule, self._rounds, self._selecting = plan, rule, rounds, selecting
        self._memory, self._say = memory, say

    def on_end(self, run: Rounds) -> None:
        """Nothing, where a run ended early before it had a score."""
        score, fed, folder = self._selecting.score, run.federation, self._plan.folder
        if score is None:
            return
        peak = self._memory.bytes(fed.device)  # of the rounds: writing tables takes memory of its own
        fed.end()
        if fed.local is not None:
            self._write_models(fed.local, folder)
        lines = self._rounds.lines
        files.write_csv(folder / files.CLIENTS, client_columns(fed.data, score, lines) | malicious_column(fed))
        store.write_results(folder, self._plan.name, score.round)
        new_clients: dict[str, Any] = {}
        if fed.local is not None and fed.local.data.held_out is not None:
            new = let_new_clients_join(fed.local, self._plan.new_clients, folder, self._say)
            new_clients = {"new_clients": new}
        ended = {} if run.ended_early is None else {"ended_early": str(run.ended_early)}
        files.write_json(folder / files.SUMMARY, self._summary(fed, score, peak) | new_clients | ended)

    def _write_models(self, fed: Federation, folder: Path) -> None:
        if self._plan.output.personal:
            write_personal_models(fed, folder / files.PERSONAL, self._plan.label)
        if self._plan.output.surface:
            write_surfaces(folder, surfaces(fed))

    def _summary(self, fed: RoundLoop, score: Score, peak: int | None) -> dict[str, Any]:
        plan, rounds, lines = self._plan, self._rounds, self._rounds.lines
        figures = main_figures(score, fed.data.sizes("test"))
        further = further_figures(score, lines, plan.eval.target, len(fed.malicious))
        who = _who_is_scored(fed)
        return {
            "algorithm": plan.name,
            "seed": plan.seed,
            "rounds": len(lines),
            "selection": self._rule,
            **figures,
            "bytes_total": rounds.total("bytes_down") + rounds.total("bytes_up"),
            "train_seconds": float(rounds.total("seconds")),
            "peak_memory_bytes": peak,
            "engine": fed.engine_name,
            "device": str(fed.device),
            "version": __version__,
            "label": plan.label,
            "selected_round": score.round,
            "model": getattr(fed.algorithm, "personal", "own"),
            "scored": f"personal models of {who}, round {score.round}, test split",
            "n_clients": fed.data.clients,
            **({"data_note": fed.data.note} if fed.data.note else {}),
            **({"note": plan.note} if plan.note else {}),
            "clients_failed": sum(len(line["failed"]) for line in lines),
            "clients_untrained": untrained(lines, fed.honest.tolist(), score.round),
            "waste": float(rounds.total("waste")) / len(lines),
            "s_fraction": plan.eval.s_fraction,
            **({"attack": fed.attack.kind, "malicious": fed.malicious.tolist()} if len(fed.malicious) else {}),
            **(fed.privacy.summary([line["clients"] for line in lines]) if fed.privacy is not None else {}),
            **further,
            "what": meanings(figures | further, score, who, len(fed.honest), plan.eval.s_fraction),
        }


def who_takes_part(fed: RoundLoop) -> dict[str, Any]:
    """The clients by column: name, sizes, and which are malicious."""
    sizes = {f"n_{split}": fed.data.sizes(split) for split in ("train", "test", "val")}
    return {"name": fed.data.client_names, **sizes, **malicious_column(fed)}


def malicious_column(fed: RoundLoop) -> dict[str, Any]:
    """Only where there is an attack."""
    return {"malicious": (~np.isin(range(fed.data.clients), fed.honest)).astype(int)} if len(fed.malicious) else {}


def _who_is_scored(fed: RoundLoop) -> str:
    if not len(fed.malicious):
        return f"all {fed.data.clients} clients"
    return f"the {len(fed.honest)} honest clients (attack by the other {len(fed.malicious)}: {fed.attack.kind})"


def write_personal_models(federation: Federation, folder: Path, label: str) -> None:
    """The models of the last round, a file per client; some at a time, since all may not fit into memory."""
    clients = range(federation.data.clients)
    digits = len(str(clients[-1]))
    for some in (clients[first : first + MODELS_AT_ONCE] for first in clients[::MODELS_AT_ONCE]):
        stacked = federation.personal_models(some)
        for row, client in enumerate(some):
            path = folder / f"client-{client:0{digits}d}.safetensors"
            write_model(trees.rows(stacked, row), model_note(federation, client, label), path)


def model_note(federation: Federation, client: int, label: str) -> dict[str, str]:
    """What a personal model's file says about it."""
    return {"client": str(client), "algorithm": label, "round": str(federation.rounds_done)}
