"""One run: an algorithm with a seed, from its first round or its newest checkpoint to its files.

A run may die at any moment. Its folder then holds rounds.jsonl, evaluations.jsonl and checkpoints; resuming gives the
same files, byte for byte, as if nothing had happened (apart from `TIMED_KEYS`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bespokefl.engines.peak import PeakMemory
from bespokefl.errors import EndedEarly
from bespokefl.experiments.callbacks.checkpoints import Checkpoints
from bespokefl.experiments.callbacks.diagnostics import Diagnostics
from bespokefl.experiments.callbacks.divergence import Divergence
from bespokefl.experiments.callbacks.further_scores import FurtherScores
from bespokefl.experiments.callbacks.logs import EvaluationLines, RoundLines
from bespokefl.experiments.callbacks.results import Results, who_takes_part
from bespokefl.experiments.callbacks.selecting import Selecting
from bespokefl.experiments.callbacks.telling import StopOnRequest, Telling
from bespokefl.experiments.schema import CheckpointSection, Document, EvalSection, NewClientsSection, OutputSection
from bespokefl.experiments.selection import Selection, affordable, choose_rule
from bespokefl.federation.callbacks import Callback
from bespokefl.federation.loop import RoundLoop
from bespokefl.interrupts import StopRequest
from bespokefl.progress import Reporter
from bespokefl.results import files
from bespokefl.results.tomlfile import dumps

CONFIG_NOTE, DATA_NOTE = "config", "data"  # in a checkpoint: what the run was made with


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


def execute(plan: RunPlan, federation: RoundLoop, memory: PeakMemory, reporter: Reporter, stop: StopRequest) -> bool:
    """Run to the end, True, or to the round in which somebody asks to stop, False."""
    files.write_atomically(plan.folder / files.CONFIG, dumps(plan.document))
    (plan.folder / files.ERROR).unlink(missing_ok=True)
    rounds = RoundLines(plan.folder)
    every = plan.eval.every
    try:
        run = federation.go(
            plan.rounds, _callbacks(plan, federation, rounds, memory, reporter, stop), lambda r: r % every == 0
        )
    except EndedEarly as reason:
        raise type(reason)(f"{reason}; the files hold the {len(rounds.lines)} rounds that were done") from reason
    return federation.rounds_done >= run.until


def _callbacks(
    plan: RunPlan,
    federation: RoundLoop,
    rounds: RoundLines,
    memory: PeakMemory,
    reporter: Reporter,
    stop: StopRequest,
) -> list[Callback]:
    """All that `bespoke run` does around the rounds, in its order."""
    folder, rule = plan.folder, choose_rule(plan.eval.select, validated=bool(federation.data.sizes("val").any()))
    s_fraction = plan.eval.s_fraction
    selecting = Selecting(Selection(federation, rule, plan.rounds, s_fraction, _crosses(plan, federation, rule)))
    notes = {CONFIG_NOTE: dumps(plan.document), DATA_NOTE: dict(plan.data)}
    return [
        Diagnostics(folder, plan.eval.every, plan.eval.features),
        Divergence(),
        FurtherScores(plan.eval.also, validates=rule == "val", s_fraction=s_fraction),
        rounds,
        EvaluationLines(folder, who_takes_part(federation), rounds, reporter.note),
        Telling(reporter, plan.label, plan.seed, rounds),
        StopOnRequest(stop),
        Checkpoints(folder / files.CHECKPOINT, plan.checkpoint.every, notes, reporter.note),
        selecting,
        Results(plan, rule, rounds, selecting, memory, reporter),
    ]


def _crosses(plan: RunPlan, federation: RoundLoop, rule: str) -> bool:
    """Whether S- and G-accuracy are measured; they are in every round that may be the selected one."""
    cross, fed = plan.eval.cross, federation.local
    if fed is None:  # nobody has the test data of all
        return False
    if cross != "auto":
        return cross
    scored = 1 if rule == "last" else -(-plan.rounds // plan.eval.every)
    rows = int(fed.data.sizes("test").sum())
    pixels = fed.data.y[0].numel() if fed.data.has_masks else 1
    return affordable(fed.data.clients, rows, fed.task.size, scored, fed.engine.device.type, pixels=pixels)
