"""What nodes answer: the one place where it is read and held against the limits.

Each function takes the header of an answer, and returns what is believed of it or raises `Refused`. They are called
by `Membership.ask` alone, where whatever else goes wrong in them is a refusal, too.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from bespokefl.data.splits import SPLITS
from bespokefl.flower import limits
from bespokefl.flower.refusal import Refused
from bespokefl.plain import is_plain, one_line

Header = Mapping[str, Any]


class Done(NamedTuple):
    """What a node says of a program that it has run, beside the uploads."""

    clients: list[int]  # that have an upload, ascending
    failed: dict[int, str]  # the others that were asked, with the reason
    version: int  # of the new states
    computed: int
    useful: int


def greeting(header: Header) -> Header:
    """What a silo says of itself."""
    clients, shape, classes = header.get("clients"), header.get("input_shape"), header.get("classes")
    if not isinstance(clients, list) or not clients or not all(isinstance(entry, Mapping) for entry in clients):
        raise Refused("the silo names no clients")
    if len(clients) > limits.CLIENTS:
        raise Refused(f"the silo has {len(clients):,} clients; at most {limits.CLIENTS:,} are taken")
    for entry in clients:
        _check_client(entry)
    if not isinstance(shape, list) or not shape or not all(_is_whole(n, 1, limits.SAMPLE_SIDE) for n in shape):
        raise Refused("the silo's samples have no shape")
    if len(shape) > limits.DIMENSIONS or _product(shape) > limits.SAMPLE_NUMBERS:
        raise Refused(f"the silo's samples have {len(shape)} dimensions, or too many numbers")
    if not isinstance(classes, list) or len(classes) > limits.CLASSES:
        raise Refused(f"the silo's classes are no list of at most {limits.CLASSES:,} names")
    for name in classes:
        _check_name("class", name)
    if len(set(classes)) != len(classes):
        raise Refused("the silo names a class twice")
    silo, kind, target = (header.get(key) for key in ("silo", "kind", "target"))
    if kind not in ("own", "simulated") or target not in ("labels", "masks", "numbers"):
        raise Refused("the silo does not say who it is")
    if kind == "own" and len(clients) != 1:
        raise Refused(f"a silo with samples of its own is one client, not {len(clients):,}")
    _check_name("silo", silo)
    if header.get("of") is not None and not _is_whole(header["of"], 1, limits.CLIENTS):
        raise Refused("the silo does not know how many clients there are")
    if header.get("inputs", "numbers") not in ("numbers", "tokens"):
        raise Refused("the silo's inputs are neither numbers nor tokens")
    return header


def held(header: Header) -> dict[int, list[int]]:
    """By client, the versions of its state that a silo still has, oldest first."""
    told = header.get("held")
    if not isinstance(told, Mapping) or len(told) > limits.CLIENTS:
        raise Refused("the silo does not say which states it has")
    found = {int(client): versions for client, versions in told.items() if client.isdecimal() and len(client) < 10}
    for versions in found.values():
        if not isinstance(versions, list) or len(versions) > limits.VERSIONS:
            raise Refused("the versions of a client's state are no list, or a very long one")
        if not all(_is_whole(version, 0, 2**63 - 1) for version in versions):
            raise Refused("the versions of a client's state are no whole numbers")
    return found


def done(header: Header, asked: Collection[int]) -> Done:
    """Of a request to run a program on some clients."""
    clients, told, version = header.get("clients"), header.get("failed"), header.get("version")
    if not isinstance(clients, list) or not all(type(c) is int for c in clients) or not set(clients) <= set(asked):
        raise Refused("the answer is of clients that were not asked")
    if sorted(set(clients)) != clients:
        raise Refused("the answer's clients do not ascend")
    if not isinstance(told, Mapping) or not _is_whole(version, 1, 2**63 - 1):
        raise Refused("the answer's header is damaged")
    counts = [header.get(key) for key in ("computed", "useful")]
    if not all(_is_whole(n, 0, limits.WORK) for n in counts):
        raise Refused("the answer's header is damaged")
    reasons = {c: told.get(str(c), "gave no answer") for c in asked if c not in clients}
    failed = {c: one_line(str(why), limits.TEXT) for c, why in reasons.items()}
    return Done(clients, failed, version, *counts)  # type: ignore[arg-type]


def _check_client(entry: Mapping[str, Any]) -> None:
    name, number = entry.get("name"), entry.get("id")
    _check_name("client", name)
    if not all(_is_whole(entry.get(split), 0, limits.SAMPLES) for split in SPLITS):
        raise Refused(f"the client {name!r} needs whole numbers of samples, at most {limits.SAMPLES:,}")
    if number is not None and not _is_whole(number, 0, limits.CLIENTS - 1):
        raise Refused(f"the client {name!r} has an id that is no id: whole numbers from 0 to {limits.CLIENTS - 1}")
    if not entry["train"]:
        raise Refused(f"the client {name!r} has no samples to train on")


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise Refused(f"the name of a {what} is no text")
    if not name or len(name) > limits.NAME or not is_plain(name):
        seen = one_line(name, 40)
        raise Refused(f"the {what} {seen!r}: a name has 1 to {limits.NAME} characters, all of them printable")


def _is_whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _product(values: list[int]) -> int:
    found = 1
    for value in values:
        found *= value
    return found
