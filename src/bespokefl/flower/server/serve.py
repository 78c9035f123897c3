"""The server of a real federation: an experiment's algorithms and seeds, with the files that `bespoke run` writes."""

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from bespokefl import models
from bespokefl.algorithms import ALGORITHMS, Algorithm
from bespokefl.core.hyper import refuse_code
from bespokefl.core.registry import plain
from bespokefl.errors import InputError
from bespokefl.experiments import resolve
from bespokefl.experiments.lock import working_in
from bespokefl.experiments.one_run import RunPlan
from bespokefl.experiments.resuming import examine
from bespokefl.experiments.running import Outcome, make_folder, make_plan, run_planned, tracked, unused_settings
from bespokefl.experiments.schema import AlgorithmChoice, CheckpointSection, Document, Experiment
from bespokefl.experiments.selection import choose_rule
from bespokefl.federation.attacks import Attack
from bespokefl.flower.server.census import RemoteCensus
from bespokefl.flower.server.membership import Membership
from bespokefl.flower.server.remote_federation import RemoteFederation
from bespokefl.flower.server.suitability import Suitability
from bespokefl.flower.transport.envelope import Transport
from bespokefl.interrupts import Interrupted, stop_on_signals
from bespokefl.progress import Reporter
from bespokefl.results.files import write_csv
from bespokefl.results.partition import SPLITS, partition_file
from bespokefl.tracking import make_tracking


def serve(
    experiment: Experiment, out: Path, transport: Transport, *, nodes: int, resume: bool, reporter: Reporter
) -> Outcome:
    """Waits for so many nodes, and runs all that is not finished; a run that fails is recorded, the others go on.

    Deadlines, the least number of answers and the like are in [federation] of the experiment.
    """
    with experiment.origin.located():
        tracking = make_tracking(experiment.track, out, reporter.note)
        _check(experiment)
    make_folder(out)
    for text in (*unused_settings(experiment), *_left_out(experiment)):
        reporter.note(text)
    roster = Membership(transport, experiment, out, reporter.note)
    outcome = Outcome(tracking=tracking)

    def announce() -> None:
        reporter.note("stopping after this round; once more to stop at once")

    with stop_on_signals(announce) as stop:
        for seed in experiment.seeds:
            census = roster.gather(nodes, seed, stop, Suitability(experiment, seed))
            with experiment.origin.located():
                choose_rule(experiment.eval.select, validated=bool(census.sizes("val").any()))
            for choice in experiment.algorithms:
                with experiment.origin.located(choice.key):
                    make_federation(experiment, choice, seed, census, roster)
            _write_partition(partition_file(out, seed), census)
            for choice in experiment.algorithms:
                plan = _plan(experiment, choice, seed, census, out)
                found = examine(plan, resume=resume)
                for note in found.notes:
                    reporter.note(f"warning: {note}")
                if found.finished:
                    reporter.note(f"{choice.label}, seed {seed}: finished before, skipped")
                    tracking.catch_up(tracked(plan))
                    outcome.finished.append(plan.folder)
                    continue
                if stop.asked:
                    raise Interrupted(f"before {choice.label}, seed {seed}")
                make = partial(make_federation, experiment, choice, seed, census, roster)
                with working_in([plan.folder]):
                    ending = run_planned(plan, make, tracking.reporter(reporter, tracked(plan)), stop)
                outcome.add(plan.folder, ending)
    return outcome


def make_federation(
    experiment: Experiment, choice: AlgorithmChoice, seed: int, census: RemoteCensus, roster: Membership
) -> RemoteFederation:
    """One run of the experiment on the silos of a roster."""
    algorithm, task = resolve.make_algorithm(experiment, choice), resolve.make_task(experiment, seed, census)
    model = experiment.model
    agreement = {
        "algorithm": choice.name,
        "hyper": _plain_hyper(algorithm),
        "seed": seed,
        "model": {"name": model.name, "head": model.head, "options": model.options},
        "loss": resolve.chosen_loss(experiment, census),
        "precision": experiment.engine.precision,
        "classes": list(census.classes),
        "input_shape": list(census.input_shape),
        "data": roster.settings(),
        "of": census.clients,
        "rounds": experiment.train.rounds,
        "every": experiment.eval.every,
    }
    return RemoteFederation(
        task,
        census,
        algorithm,
        roster=roster,
        run_id=f"{roster.federation}/{choice.label}/seed-{seed}",
        agreement=agreement,
        initial=task.initial,
        seed=seed,
        participation=experiment.train.participation,
        attack=Attack(**experiment.attack.model_dump()),
        privacy=resolve.make_privacy(experiment),
    )


def _plain_hyper(algorithm: Algorithm) -> Document:
    return {f.name: plain(getattr(algorithm, f.name)) for f in fields(algorithm)}


def _plan(experiment: Experiment, choice: AlgorithmChoice, seed: int, census: RemoteCensus, out: Path) -> RunPlan:
    """As of a simulation, but for the checkpoints: silos remember two rounds, so the server saves every one."""
    section = experiment.data
    root = None if section.root is None else os.path.abspath(os.path.expanduser(section.root))
    about = {**section.model_dump(exclude={"options"}), **section.options, "root": root, "clients": census.clients}
    about["seed"] = resolve.data_seed(experiment, seed)
    task = resolve.make_task(experiment, seed, census)
    document = resolve.resolved_with(about, experiment, choice, seed, census, task)
    document["federation"] = experiment.federation.model_dump()
    plan = make_plan(experiment, choice, seed, out, document, census)
    return replace(plan, checkpoint=CheckpointSection(every=1))


# before the start ------------------------------------------------------------------------------------
def _check(experiment: Experiment) -> None:
    """What cannot be done between machines is refused before anybody connects."""
    for choice in experiment.algorithms:
        with experiment.origin.located(choice.key):
            algorithm = resolve.make_algorithm(experiment, choice)
            resolve.refuse_unused(experiment, choice)
            refuse_code(type(algorithm), vars(algorithm), "silos run no code from a server")
            if choice.name not in ALGORITHMS:
                raise InputError(
                    f"algorithm.name = {choice.name!r}: silos run registered methods only, never code from a server."
                )
            if algorithm.remote_unsupported:
                raise InputError(
                    f"algorithm.name = {choice.name!r} cannot run in a real federation: {algorithm.remote_unsupported}."
                )
    resolve.make_privacy(experiment)
    if experiment.model.name not in models.MODELS:
        raise InputError(
            f"model.name = {experiment.model.name!r}: silos build registered models only, never code from a server."
        )


def _left_out(experiment: Experiment) -> Iterator[str]:
    """Settings of a simulation that have no meaning here."""
    if experiment.output.personal:
        yield "output.personal: personal models stay with their silos, each in its own folder"
    if experiment.output.surface:
        yield "output.surface: left out, as it needs clients' samples"
    if "before_agg" in experiment.eval.also:
        yield "eval.also: models before aggregation are not scored, as the server keeps nobody's upload"
    if {"s_acc", "g_acc"} & set(experiment.eval.also):
        yield "eval.also: S- and G-accuracy are not measured, as nobody has the test data of others"
    if experiment.eval.features:
        yield "eval.features: left out, as it needs clients' samples"
    if experiment.new_clients.wanted:
        yield "[new_clients]: nobody joins afterwards; a new silo may use `bespoke adapt` on a simulation"


def _write_partition(path: Path, census: RemoteCensus) -> None:
    """Sizes only: how many samples of which class a silo has is not told."""
    sizes = {f"n_{split}": census.sizes(split) for split in SPLITS}
    write_csv(path, {"client": range(census.clients), "name": census.client_names, **sizes})
