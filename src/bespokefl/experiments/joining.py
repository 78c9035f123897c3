"""The clients that a run held out join it at its end: what they reach, epoch by epoch, in a file and in figures."""

from pathlib import Path
from typing import Any

import numpy as np

from bespokefl.evaluation import metrics
from bespokefl.evaluation.scoring import Evaluation
from bespokefl.experiments.schema import NewClientsSection
from bespokefl.federation import Federation
from bespokefl.federation.new_clients import Joined, Joining, join
from bespokefl.progress import Reporter
from bespokefl.results import files


def let_new_clients_join(
    federation: Federation, section: NewClientsSection, folder: Path, reporter: Reporter
) -> dict[str, Any]:
    """Writes new_clients.csv (epoch 0 is the start) and gives the figures for the summary."""
    data = federation.data.held_out
    assert data is not None
    ids = np.array(data.record["held_out"], dtype=np.int64)
    joining = joining_of(section).without_unused(federation.algorithm)

    def tell(epoch: int, train: Evaluation, test: Evaluation) -> None:
        if epoch in (0, joining.epochs):
            when = f"after {epoch} epochs" if epoch else "at the start"
            reporter.note(f"{data.clients} new clients {when}: mean {100 * np.nanmean(test.accuracy):.1f} %")

    joined = join(federation, data, joining, ids, tell)
    epochs = np.arange(joining.epochs + 1)
    columns = {
        "epoch": np.repeat(epochs, len(ids)),
        "client": np.tile(ids, len(epochs)),
        "accuracy": joined.accuracy.ravel(),
        "loss": joined.loss.ravel(),
    }
    files.write_csv(folder / files.NEW_CLIENTS, columns)
    return _figures(joined, joining)


def joining_of(section: NewClientsSection) -> Joining:
    """What an experiment says of the steps that new clients take."""
    return Joining(**section.model_dump(exclude={"count", "share", "choose"}))


def _figures(joined: Joined, joining: Joining) -> dict[str, Any]:
    found = metrics.new_clients(joined.accuracy[1:])
    return {
        "clients": joined.accuracy.shape[1],
        "epochs": joining.epochs,
        "start": joining.start,
        "how": joined.how,
        **joined.settings,
        "opt_state": joining.opt_state,
        "before": metrics.new_clients(joined.accuracy[:1]).best,
        "last": float(found.mean[-1]),
        "best": found.best,
        "epoch": found.epoch,
        "mean": found.mean.tolist(),
        "left_out": found.left_out,
        "diverged": int((~joined.finite).sum()),
    }
