"""The personal models that a silo keeps in its folder, to be asked with `bespoke predict`."""

from pathlib import Path

from bespokefl.errors import InputError
from bespokefl.flower.silo.silo import PERSONAL, RUN, RUNS
from bespokefl.flower.silo.silo_run import Agreement, make_algorithm, make_task
from bespokefl.flower.silo.terms import Limits
from bespokefl.models import MODELS
from bespokefl.products.export import Answers
from bespokefl.products.predict import PersonalModel, chosen, classifying, load_model
from bespokefl.results import files


def load_kept_model(
    folder: Path, client: int | None = None, run: str | None = None, device: str = "cpu"
) -> PersonalModel:
    """Of the newest of a silo's runs, or of the named one."""
    found = sorted(
        (folder / RUNS).glob(f"{run or '*'}/{PERSONAL}/client-*.safetensors"), key=lambda p: p.stat().st_mtime
    )
    if not found:
        names = ", ".join(sorted(path.name for path in (folder / RUNS).glob("*"))) or "none"
        raise InputError(
            f"{folder} holds no personal model{f' of the run {run!r}' if run else ''}: it should be a silo's folder "
            f"after a federation (runs there: {names}), or a run's folder with output.personal = true."
        )
    same_run = [path for path in found if path.parent == found[-1].parent]
    path = chosen(same_run, client)
    stored = files.read_json(path.parents[1] / RUN)
    reading = stored.pop("reading")
    limits = Limits()
    agreed = Agreement.checked(stored, limits)
    task, algorithm = make_task(agreed, limits).to(device), make_algorithm(agreed, limits)
    return PersonalModel(
        path,
        load_model(path),
        classifying(Answers(task, algorithm.outputs), MODELS[agreed.model["name"]].segments),
        tuple(agreed.classes),
        tuple(agreed.input_shape),
        reading["normalize"],
        reading["moments"],
        reading["image"].get("size"),
        reading.get("inputs"),
    )
