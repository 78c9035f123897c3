"""One run: an algorithm with a seed, from its first round or its newest checkpoint to its files.

A run may die at any moment. Its folder then holds rounds.jsonl, evaluations.jsonl and checkpoints; resuming gives the
same files, byte for byte, as if nothing had happened (apart from `TIMED_KEYS`).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from bespokefl import __version__
from bespokefl.core import trees
from bespokefl.engines.peak import PeakMemory
from bespokefl.errors import REMEDY, Diverged, EndedEarly
from bespokefl.evaluation import metrics
from bespokefl.evaluation.divergence import what_diverged
from bespokefl.evaluation.score import Score
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.experiments import checkpoint
from bespokefl.experiments.features import feature_figures
from bespokefl.experiments.joining import let_new_clients_join
from bespokefl.experiments.loss_surface import surfaces
from bespokefl.experiments.schema import CheckpointSection, Document, EvalSection, NewClientsSection, OutputSection
from bespokefl.experiments.selection import Selection, affordable, choose_rule, crossed_rows
from bespokefl.experiments.watch import Watch
from bespokefl.federation import Federation
from bespokefl.federation.loop import RoundLoop, RoundRecord
from bespokefl.interrupts import StopRequest
from bespokefl.progress import Reporter
from bespokefl.results import files, store
from bespokefl.results.evaluations import CROSSED, EVALUATIONS, EvaluationLog, what_is_lost
from bespokefl.results.facts import is_kept, write_facts
from bespokefl.results.model_file import write_model
from bespokefl.results.summary import client_columns, further_figures, main_figures, meanings, untrained
from bespokefl.results.surfaces import write_surfaces
from bespokefl.results.tomlfile import dumps

MODELS_AT_ONCE = 64
CONFIG_NOTE, DATA_NOTE = "config", "data"  # in a checkpoint: what the run was made with
CHECKPOINT_SHARE = 0.03  # of the time, at most, when checkpoint.every is "auto"


@dataclass(frozen=True)
class RunPlan:
    """What to run, and where its files go."""

    folder: Path
    name: str
    label: str
    seed: int
    rounds: int
    eval: EvalSection
    checkpoint: CheckpointSection
    output: OutputSection
    document: Document  # the resolved configuration
    new_clients: NewClientsSection = field(default_factory=NewClientsSection)
    data: Mapping[str, str] = field(default_factory=dict)  # by which the data are known when the run is resumed
    note: str = ""  # for the readers of its results


class Run:
    """The round loop around a federation: evaluate, record, checkpoint, and at the end the files."""

    def __init__(self, plan: RunPlan, federation: RoundLoop, memory: PeakMemory) -> None:
        self.plan, self.federation, self.memory = plan, federation, memory
        self.rule = choose_rule(plan.eval.select, validated=bool(federation.data.sizes("val").any()))
        self.selection = Selection(federation, self.rule, plan.rounds, plan.eval.s_fraction, self._crosses())
        self._saves = _Schedule(plan.checkpoint)
        self._evaluated: tuple[int, Evaluation] | None = None  # the last round that was

    def execute(self, reporter: Reporter, stop: StopRequest) -> bool:
        """Run to the end, True, or to the round in which somebody asks to stop, False."""
        folder = self.plan.folder
        files.write_atomically(folder / files.CONFIG, dumps(self.plan.document))
        (folder / files.ERROR).unlink(missing_ok=True)
        done = self._restore(reporter)
        self.federation.begin()
        log = files.RoundLog(folder / files.ROUNDS, keep=done)
        evaluations = EvaluationLog(folder / EVALUATIONS, self._who(), keep=done)
        for lost in what_is_lost(folder / EVALUATIONS, log.lines):
            reporter.note(f"warning: {folder}: {lost}")
        watch = Watch()
        for line in log.lines:
            watch.look(line, {})  # what was said before the run was interrupted
        try:
            reporter.start(self.plan.label, self.plan.seed, self.plan.rounds, done)
            while self.federation.rounds_done < self.plan.rounds:
                try:
                    record = self.federation.round()
                    log.append(self._line(record, evaluations))
                except EndedEarly as reason:
                    self._end_early(reason, log, evaluations, reporter)
                reporter.round(log.lines[-1])
                self._warn(watch, log.lines[-1], reporter)
                if stop.asked or record.round == self.plan.rounds or self._saves.due(record.round):
                    evaluations.sync()
                    self._save(log)
                if stop.asked and record.round < self.plan.rounds:
                    return False
        finally:
            log.close()
            evaluations.close()
        self._write_results(log, reporter, {})
        return True

    def _end_early(
        self, reason: EndedEarly, log: files.RoundLog, evaluations: EvaluationLog, reporter: Reporter
    ) -> NoReturn:
        """The files of a run that cannot go on, from the rounds that it has; then the reason is raised again."""
        done = len(log.lines)
        if done == self.federation.rounds_done:
            evaluations.sync()
            self._save(log)
        if self.selection.score is None and self._evaluated is not None:
            self.selection.settle(*self._evaluated)
        if self.selection.score is not None:
            self._write_results(log, reporter, {"ended_early": str(reason)})
        raise type(reason)(f"{reason}; the files hold the {done} rounds that were done")

    def _warn(self, watch: Watch, line: files.Line, reporter: Reporter) -> None:
        evaluated = line["mean"] is not None
        told = self.federation.algorithm.warnings(self.federation.server) if evaluated else {}
        for warning in watch.look(line, told):
            reporter.note(f"warning: {self.plan.label}, seed {self.plan.seed}, {warning}")

    # the loop ----------------------------------------------------------------------------------------
    def _line(self, record: RoundRecord, evaluations: EvaluationLog) -> files.Line:
        """The round's line; figures are null in a round that is not evaluated."""
        figures: dict[str, Any] = dict.fromkeys(("mean", "std", "worst5", "top5", "loss"))
        val_mean = None
        every, rounds = self.plan.eval.every, self.plan.rounds
        if record.round % every == 0 or record.round == rounds:
            self._write_facts(record.round, -(-record.round // every) - 1, -(-rounds // every))
            test = self.federation.evaluate(split="test", model="personal")
            self._refuse_diverged(record.round, test)
            val = self.federation.evaluate(split="val", model="personal") if self.rule == "val" else None
            evaluations.append(record.round, {"test": test, "val": val, **self._others()})
            self._evaluated = record.round, test
            self.selection.consider(record.round, test, val)
            summary = metrics.summarise(test.main)
            figures = {key: summary[key] for key in ("mean", "std", "worst5", "top5")}
            figures["loss"] = float(np.nanmean(test.loss))
            val_mean = None if val is None else metrics.summarise(val.main)["mean"]
        return {
            "round": record.round,
            **figures,
            "seconds": record.seconds,
            "bytes_down": record.bytes_down,
            "bytes_up": record.bytes_up,
            "val_mean": val_mean,
            "waste": record.waste,
            "clients": [int(client) for client in record.clients],
            "failed": {str(client): reason for client, reason in record.failed.items()},
            **({"cut": {str(client): how for client, how in record.cut.items()}} if record.cut else {}),
        }

    def _refuse_diverged(self, round_: int, scores: Evaluation) -> None:
        """Under an attack lost models are what is to be seen."""
        why = what_diverged(scores, len(self.federation.data.classes))
        if why and not len(self.federation.malicious):
            raise Diverged(f"the models diverged by round {round_}: {why}; {REMEDY}")

    def _others(self) -> dict[str, Evaluation]:
        """What is asked for beside the personal models' scores on their own test data, where there is such."""
        fed, wanted = self.federation, self.plan.eval.also
        found: dict[str, Evaluation] = {name: fed.evaluate(model=name) for name in wanted if name in fed.scorable}
        if "train" in wanted:
            found["train"] = fed.evaluate(split="train")
        if isinstance(fed, Federation):
            crossed = crossed_rows(fed, self.plan.eval.s_fraction, [name for name in CROSSED if name in wanted])
            found |= {name: fed.evaluate(rows=rows) for name, rows in crossed.items()}
        return found

    def _write_facts(self, round_: int, nth: int, of: int) -> None:
        facts = self.federation.facts()
        if self.plan.eval.features and isinstance(self.federation, Federation):
            facts |= feature_figures(self.federation)
        if facts and is_kept(nth, of, sum(value.nbytes for value in facts.values())):
            layers = self.federation.algorithm.layer_names(self.federation.task)
            write_facts(self.plan.folder, round_, facts, layers)

    def _crosses(self) -> bool:
        """Whether S- and G-accuracy are measured; they are in every round that may be the selected one."""
        cross, fed = self.plan.eval.cross, self.federation
        if not isinstance(fed, Federation):  # nobody has the test data of all
            return False
        if cross != "auto":
            return cross
        scored = 1 if self.rule == "last" else -(-self.plan.rounds // self.plan.eval.every)
        rows = int(fed.data.sizes("test").sum())
        pixels = fed.data.y[0].numel() if fed.data.has_masks else 1
        return affordable(fed.data.clients, rows, fed.task.size, scored, fed.engine.device.type, pixels=pixels)

    # checkpoints -------------------------------------------------------------------------------------
    def _save(self, log: files.RoundLog) -> None:
        began = time.monotonic()
        log.sync()
        tensors, meta = self.federation.state()
        meta = {**meta, CONFIG_NOTE: dumps(self.plan.document), DATA_NOTE: dict(self.plan.data)}
        contents = {f"federation/{name}": value for name, value in tensors.items()}
        if self.selection.score is not None:
            contents |= {f"score/{name}": value for name, value in self.selection.score.tensors().items()}
        last = self.federation.rounds_done == self.plan.rounds
        checkpoint.save(
            self.plan.folder / files.CHECKPOINT,
            self.federation.rounds_done,
            contents,
            meta,
            keep=1 if last else 2,
        )
        self._saves.saved(time.monotonic() - began)

    def _restore(self, reporter: Reporter) -> int:
        """Go on from the newest good checkpoint; the number of rounds that are done."""
        stored = checkpoint.load_newest(self.plan.folder / files.CHECKPOINT)
        if stored is None:
            return 0
        for warning in stored.warnings:
            reporter.note(f"warning: {warning}; going on from round {stored.step}")
        restore(self.federation, stored)
        score = _part(stored.tensors, "score")
        self.selection.score = Score.from_tensors(score) if score else None
        if stored.step == self.plan.rounds:  # else the next save does it
            checkpoint.tidy(self.plan.folder / files.CHECKPOINT, stored.step, keep=1)
        return self.federation.rounds_done

    # the end -----------------------------------------------------------------------------------------
    def _write_results(self, log: files.RoundLog, reporter: Reporter, ended: dict[str, str]) -> None:
        score, folder = self.selection.score, self.plan.folder
        assert score is not None
        fed, new_clients = self.federation, {}
        peak = self.memory.bytes(fed.device)  # of the rounds: writing tables takes memory of its own
        fed.end()
        if isinstance(fed, Federation):
            if self.plan.output.personal:
                self._write_personal_models(fed, folder / files.PERSONAL)
            if self.plan.output.surface:
                write_surfaces(folder, surfaces(fed))
        columns = client_columns(self.federation.data, score, log.lines) | self._malicious_column()
        files.write_csv(folder / files.CLIENTS, columns)
        store.write_results(folder, self.plan.name, score.round)
        if isinstance(fed, Federation) and fed.data.held_out is not None:
            new_clients = {"new_clients": let_new_clients_join(fed, self.plan.new_clients, folder, reporter)}
        files.write_json(folder / files.SUMMARY, self._summary(score, log, peak) | new_clients | ended)

    def _who(self) -> dict[str, Any]:
        data = self.federation.data
        sizes = {f"n_{split}": data.sizes(split) for split in ("train", "test", "val")}
        return {"name": data.client_names, **sizes, **self._malicious_column()}

    def _malicious_column(self) -> dict[str, Any]:
        """Only where there is an attack."""
        fed = self.federation
        return {"malicious": (~np.isin(range(fed.data.clients), fed.honest)).astype(int)} if len(fed.malicious) else {}

    def _summary(self, score: Score, log: files.RoundLog, peak: int | None) -> dict[str, Any]:
        fed, plan = self.federation, self.plan
        figures = main_figures(score, fed.data.sizes("test"))
        further = further_figures(score, log.lines, plan.eval.target, len(fed.malicious))
        who = self._who_is_scored()
        return {
            "algorithm": plan.name,
            "seed": plan.seed,
            "rounds": len(log.lines),
            "selection": self.rule,
            **figures,
            "bytes_total": log.total("bytes_down") + log.total("bytes_up"),
            "train_seconds": float(log.total("seconds")),
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
            "clients_failed": sum(len(line["failed"]) for line in log.lines),
            "clients_untrained": untrained(log.lines, fed.honest.tolist(), score.round),
            "waste": float(log.total("waste")) / len(log.lines),
            "s_fraction": plan.eval.s_fraction,
            **({"attack": fed.attack.kind, "malicious": fed.malicious.tolist()} if len(fed.malicious) else {}),
            **(fed.privacy.summary([line["clients"] for line in log.lines]) if fed.privacy is not None else {}),
            **further,
            "what": meanings(figures | further, score, who, len(fed.honest), plan.eval.s_fraction),
        }

    def _who_is_scored(self) -> str:
        fed = self.federation
        if not len(fed.malicious):
            return f"all {fed.data.clients} clients"
        return f"the {len(fed.honest)} honest clients (attack by the other {len(fed.malicious)}: {fed.attack.kind})"

    def _write_personal_models(self, federation: Federation, folder: Path) -> None:
        """The models of the last round, a file per client; some at a time, since all may not fit into memory."""
        clients = range(federation.data.clients)
        digits = len(str(clients[-1]))
        for some in (clients[first : first + MODELS_AT_ONCE] for first in clients[::MODELS_AT_ONCE]):
            stacked = federation.personal_models(some)
            for row, client in enumerate(some):
                path = folder / f"client-{client:0{digits}d}.safetensors"
                write_model(trees.rows(stacked, row), model_note(federation, client, self.plan.label), path)


class _Schedule:
    """When to save: every so many rounds, or so that saving takes at most a small share of the time."""

    def __init__(self, section: CheckpointSection) -> None:
        self._every = section.every
        self._saved_at, self._pause = time.monotonic(), 0.0

    def due(self, round_: int) -> bool:
        if self._every != "auto":
            return round_ % self._every == 0
        return time.monotonic() - self._saved_at >= self._pause

    def saved(self, seconds: float) -> None:
        self._saved_at, self._pause = time.monotonic(), seconds / CHECKPOINT_SHARE


def restore(federation: RoundLoop, stored: checkpoint.Checkpoint) -> None:
    """Put a federation into the state of a checkpoint."""
    federation.restore(_part(stored.tensors, "federation"), stored.meta)


def model_note(federation: Federation, client: int, label: str) -> dict[str, str]:
    """What a personal model's file says about it."""
    return {"client": str(client), "algorithm": label, "round": str(federation.rounds_done)}


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(f"{prefix}/"): v for k, v in tensors.items() if k.startswith(f"{prefix}/")}
