"""What `bespoke tune`, `reproduce`, `adapt`, `export`, `report` and `results` do, as functions."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bespokefl.api.reading import Document, given, read, reporter_for
from bespokefl.errors import InputError

if TYPE_CHECKING:  # each of them brings packages of its own
    from bespokefl.products.adapt import Adapted
    from bespokefl.products.export import Written
    from bespokefl.reproduce.comparison import Comparison
    from bespokefl.results.files import Columns
    from bespokefl.tuning import Tuning


def tune(
    experiment: str | Path | Document,
    out: str | Path,
    *,
    trials: int | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: bool = False,
) -> "Tuning":
    """Choose the hyper-parameters of every method of an experiment by validation accuracy, as `bespoke tune` does.

    ``experiment`` and ``settings`` are those of `run_experiment`, ``trials`` the number for each method. The result has
    the trials (``.methods``), the experiment with the best values (``.experiment``), and its file (``.file``).

    >>> tuning = bfl.tune(
    ...     {
    ...         "algorithms": ["fedavg"],
    ...         "data": {"clients": 3, "max_samples": 100},
    ...         "model": {"name": "linear"},
    ...         "train": {"rounds": 1, "local_epochs": 1},
    ...         "tune": {"grid": {"train.lr": [0.01, 0.1]}},
    ...     },
    ...     "runs/tuned",
    ... )
    >>> len(tuning.methods[0].trials)
    2
    """
    from bespokefl.tuning import tune as tune_experiment

    told = {**(settings or {}), **({} if trials is None else {"tune.trials": trials})}
    reporter = reporter_for(progress, lines_per_run=1)
    return tune_experiment(read(experiment, told), Path(out), resume=resume, reporter=reporter)


def reproduce(
    item: str,
    out: str | Path | None = None,
    *,
    scale: Literal["paper", "small"] = "paper",
    only: Sequence[str] = (),
    data: str | Path | None = None,
    jobs: int | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> "Comparison":
    """Run a paper's table or figure, and put its numbers beside ours, as `bespoke reproduce` does.

    Args:
        item: a name of `bespoke list experiments`.
        out: the folder of the runs (default: runs/ITEM); what it holds of the same configuration is not run again.
        scale: "paper", or "small": the same set-up on embedded data.
        only: patterns of settings or methods, or setting/method, such as "cifar10-*/pgfed*".
        data: the folder that holds the data sets.
        jobs: runs at a time (default: one per GPU, or core).
        settings: keys of the configuration with their values, as {"train.rounds": 10}.
        progress: show how far it is, on standard error.

    The comparison is also written into the folder, as comparison.md and comparison.json.

    >>> bfl.reproduce("no-such-table")
    Traceback (most recent call last):
    ...
    bespokefl.errors.InputError: experiment = 'no-such-table' is not known...
    """
    from bespokefl.progress import make_console, quiet_console
    from bespokefl.reproduce.study import reproduce as reproduce_study
    from bespokefl.reproduce.study import request

    asked = request(item, out, given(settings), only=only, scale=scale, data=data, jobs=jobs)
    comparison, outcome = reproduce_study(asked, make_console(stderr=True) if progress else quiet_console())
    without = [f"{setting.name or item} was not run: {setting.missing_data}" for setting in comparison.settings]
    missing = [text for text, setting in zip(without, comparison.settings, strict=True) if setting.missing_data]
    if len(missing) == len(comparison.settings):
        raise InputError(" ".join(missing))
    for text in [*missing, *outcome.troubles(asked.out)]:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return comparison


def adapt(
    folder: str | Path,
    data: str | Path,
    *,
    epochs: int = 20,
    lr: float | None = None,
    momentum: float | None = None,
    batch_size: int | None = None,
    start: Literal["method", "global"] = "method",
    opt_state: Literal["reset", "keep"] = "reset",
    test: float | None = None,
    out: str | Path | None = None,
    onnx: bool = False,
    device: str | None = None,
) -> "Adapted":
    """Give a client that never took part a model of its own, from a finished run, as `bespoke adapt` does.

    Args:
        folder: a run's folder, such as runs/demo/ditto/seed-0.
        data: the new client's samples, a .npz file or a folder of images.
        epochs: of its own training.
        lr: step size; like ``momentum`` and ``batch_size`` as in the run unless given.
        momentum: of SGD.
        batch_size: samples of a step.
        start: "method", the method's own way, or "global", plain SGD from the global model.
        opt_state: "reset", a fresh optimiser in every epoch, or "keep", one for all.
        test: fraction of the samples to test on, if none are marked.
        out: the .safetensors file to write, or its folder (default: the current one).
        onnx: write the model as ONNX, too.
        device: auto, cpu, cuda, ...; as in the run unless given.

    >>> rng = np.random.default_rng(0)
    >>> np.savez("clinic.npz", x=rng.random((40, 1, 8, 8), dtype=np.float32), y=rng.integers(0, 10, size=40))
    >>> adapted = bfl.adapt("runs/small/ditto/seed-0", "clinic.npz", epochs=3, test=0.25, out="clinic.safetensors")
    >>> len(adapted.accuracy)  # at the start, and after each epoch
    4
    """
    from bespokefl.federation.new_clients import Joining
    from bespokefl.products.adapt import adapt as adapt_model

    joining = Joining.checked(
        epochs=epochs, start=start, opt_state=opt_state, lr=lr, momentum=momentum, batch_size=batch_size
    )
    return adapt_model(folder, data, joining, test=test, out=out, onnx=onnx, device=device)


def export(folder: str | Path, client: int, out: str | Path | None = None, *, onnx: bool = False) -> "list[Written]":
    """Write a client's personal model out of a run's folder, as safetensors and, if wanted, ONNX.

    Every file is read back and must answer as the model does; the files come with how they were checked.

    >>> written = bfl.export("runs/small/ditto/seed-0", client=1, out="client-1.safetensors")
    >>> print(written[0].path)
    client-1.safetensors
    """
    from bespokefl.products.export import export_model

    return export_model(Path(folder), client, None if out is None else Path(out), onnx=onnx)


def report(folder: str | Path, *, figures: bool = False) -> Path:
    """Write report.html of an output folder, one interactive file that needs nothing else, and return its path.

    ``figures`` writes every chart as SVG and PNG to ``folder``/figures, too.

    >>> print(bfl.report("runs/small"))
    runs/small/report.html
    """
    from bespokefl.report.publish import publish

    return publish(Path(folder), figures=figures)


def results(folder: str | Path, sql: str | None = None) -> "Columns":
    """Ask the runs below a folder for results, in SQL: the rows by column, as numpy arrays.

    Without a query it is all of ``results``: a row per run, round, client and metric. The other views are ``runs``,
    ``rounds`` and ``clients``. ``pandas.DataFrame`` and ``polars.DataFrame`` take the columns as they are.

    >>> found = bfl.results("runs/small", "SELECT DISTINCT label FROM results ORDER BY label")
    >>> list(found["label"])
    ['ditto', 'local']
    """
    from bespokefl.results.store import frame

    return frame(folder, sql)
