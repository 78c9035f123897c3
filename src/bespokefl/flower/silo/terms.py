"""What a silo puts up with: how much it computes for a server, how often it answers, and for which methods."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from bespokefl.algorithms import ALGORITHMS, build_algorithm
from bespokefl.errors import InputError, unknown_name
from bespokefl.flower import limits as bounds

ANY = "any"  # for evaluations: no limit


@dataclass(frozen=True)
class Limits:
    """Of a silo with samples of its own; ``SIMULATED`` are those of a node that hosts simulated clients."""

    fewest_samples: int = 20  # to train on; with fewer, the silo takes no part
    smallest_batch: int = 4  # samples of a training step
    repeats: int = 1  # of a round, with other downloads than before; the same ones have the same answer
    evaluations: int | None = 1  # models whose scores on a split are told in an evaluated round; None: any, in any
    train_scores: bool = False  # whether scores of the train split are told
    runs: int = bounds.RUNS  # that are opened in its folder, all in all
    methods: tuple[str, ...] = ()  # that the silo agrees to; none: all that are registered
    message_bytes: int = 2**32
    parameters: int = 2**30  # of a model
    passes: int = 2000  # over a split, in one request
    whole_number: int = 10_000  # largest hyper-parameter of that kind, the batch size apart
    clients: int = 100_000  # of a federation
    rounds: int = 100_000  # of a run


SIMULATED = Limits(fewest_samples=1, smallest_batch=1, evaluations=None, train_scores=True, runs=bounds.SHARED_RUNS)


def parse_limits(texts: Iterable[str], start: Limits) -> Limits:
    """Limits with some as KEY=VALUE, as options and Flower's node configuration have them."""
    known = {f.name: getattr(start, f.name) for f in fields(Limits)}
    given: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in known:
            raise unknown_name("limit of a silo", key, known)
        given[key] = _value(key, value)
    return Limits(**{**known, **given})


def _value(key: str, text: str) -> Any:
    if key == "methods":
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if name not in ALGORITHMS:
                raise unknown_name("--methods", name, ALGORITHMS)
        return names
    if key == "train_scores":
        if text not in ("true", "false"):
            raise InputError(f"train_scores = {text!r}: it is true or false")
        return text == "true"
    if key == "evaluations" and text == ANY:
        return None
    least = 0 if key == "repeats" else 1
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{key} = {text!r}: it is a whole number, {least} or more")
    return int(text)


def told(limits: Limits) -> list[str]:
    """For the people of a silo: what it will not do, and what each method that it agrees to makes it send."""
    evaluations = limits.evaluations
    often = "any number of evaluations of it"
    if evaluations is not None:
        often = f"{evaluations} evaluations of a round that the run evaluates"
    lines = [
        f"takes part with at least {limits.fewest_samples} training samples, in batches of {limits.smallest_batch} or "
        "more (--fewest-samples, --smallest-batch)",
        f"answers a round at most {1 + limits.repeats} times (--repeats), with {often} (--evaluations); tells "
        f"scores of its {'train, ' if limits.train_scores else ''}val and test split (--train-scores)",
        f"opens at most {limits.runs} runs in its folder (--runs), each for the rounds that the server tells at first",
        f"agrees to {'all methods' if not limits.methods else ', '.join(limits.methods)} (--methods); it would send",
    ]
    methods: dict[str, list[str]] = {}
    for name in limits.methods or ALGORITHMS:
        methods.setdefault(leaves(name), []).append(name)
    return lines + [f"  {', '.join(names)}: {what}" for what, names in methods.items()]


def leaves(method: str) -> str:
    """What a client sends in a round of a method, in a line."""
    algorithm = build_algorithm(method)
    sent = list(dict.fromkeys(what for e in algorithm.uploads().values() for what in e.sends.values()))
    return "; ".join(sent) or "nothing"
