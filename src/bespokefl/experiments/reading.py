"""Reading an experiment: its TOML file, and the settings of the command line on top.

Every message names the key, the value seen and what is allowed; where the value came from a file, its line is added.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from bespokefl.algorithms import build_algorithm
from bespokefl.core.hyper import choose
from bespokefl.core.optimizers import OPTIMIZERS
from bespokefl.errors import InputError, unknown_name
from bespokefl.experiments.overrides import Setting, options_of, overlaid, with_settings
from bespokefl.experiments.paper_numbers import with_printed
from bespokefl.experiments.schema import (
    LARGEST_SEED,
    OF_OTHERS_DATA,
    SECTIONS,
    AlgorithmChoice,
    Document,
    EvalSection,
    Experiment,
    ModelSection,
    Origin,
    PaperSection,
    Part,
    Section,
)
from bespokefl.experiments.small_scale import Scale, at_small_scale, chosen_set_up
from bespokefl.models import MODELS
from bespokefl.results.tomlfile import key_lines, parse_value

S = TypeVar("S", bound=Section)

SETTING, SMALL = "setting", "small"  # the parts of an experiment, and what the small scale changes
UNUSED = "unused"  # a table of remarks, which sets nothing
_TOP_KEYS = ("seeds", "algorithms", "algorithm", *SECTIONS)
_FOLDER_NAME = r"[A-Za-z0-9][\w+.-]*"


def read_experiment(path: Path, settings: Sequence[Setting] = ()) -> Experiment:
    """The experiment of a TOML file, with the settings of the command line on top."""
    return parse_experiment(*_read(path, settings))


def read_parts(path: Path, settings: Sequence[Setting] = (), scale: Scale = "paper") -> tuple[Part, ...]:
    """The parts of a TOML file: one for each of its settings, or a single one without a name."""
    return parse_parts(*_read(path, settings), scale=scale)


def _read(path: Path, settings: Sequence[Setting]) -> tuple[Document, Sequence[Setting], Origin]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(f"{path} cannot be read ({why}); give the path of an experiment's TOML file.") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = str(error).replace("at end of document", f"at line {len(text.splitlines())}, the end")
        raise InputError(f"{path} is not valid TOML: {place}.") from None
    return document, settings, Origin(str(path), key_lines(text))


def parse_experiment(document: Document, settings: Sequence[Setting] = (), origin: Origin | None = None) -> Experiment:
    """The experiment of a parsed document, with the settings of the command line on top.

    Of a document with several settings, ``setting = NAME`` among them chooses one.
    """
    parts = parse_parts(document, settings, origin)
    if len(parts) > 1:
        names = ", ".join(part.name for part in parts)
        first = parts[0].name
        raise InputError(f"The experiment has several settings ({names}): choose one, as in --set setting={first}.")
    return parts[0].experiment


def parse_parts(
    document: Document, settings: Sequence[Setting] = (), origin: Origin | None = None, scale: Scale = "paper"
) -> tuple[Part, ...]:
    """The parts of a parsed document. On top of what all share come the setting, the scale, and the command line."""
    known = origin or Origin()
    with known.located():
        entries = _settings(document[SETTING]) if SETTING in document else {"": {}}
        chosen = dict(settings).get(SETTING)
        if chosen is not None and chosen not in entries:
            raise unknown_name(SETTING, chosen, [name for name in entries if name])
        for table in (document, *entries.values()):
            if not isinstance(table.get(SMALL, {}), Mapping):
                raise InputError(
                    f"small = {table[SMALL]!r} should be a table: [small] with what the small scale changes."
                )
    base = {key: value for key, value in document.items() if key not in (SETTING, SMALL)}
    given = [(key, value) for key, value in settings if key != SETTING]
    parts = []
    for place, (name, entry) in enumerate(entries.items()):
        if chosen not in (None, name):
            continue
        own = {key: value for key, value in entry.items() if key not in ("name", "title", SMALL)}
        prefixes = [f"{SETTING}.{place}."]
        with known.located():
            merged, set_up = overlaid(base, own), ""
            if scale == "small":
                small = [document.get(SMALL, {}), entry.get(SMALL, {})]
                set_up = chosen_set_up(merged, small).name
                merged = at_small_scale(merged, small)
                prefixes += [f"{SMALL}.", f"{SETTING}.{place}.{SMALL}."]
        lines = dict(known.lines)
        for prefix in prefixes:
            lines |= {key.removeprefix(prefix): line for key, line in known.lines.items() if key.startswith(prefix)}
        place_of = Origin(known.file, lines, frozenset(key for key, _ in given))
        experiment = _parse(merged, given, place_of)
        with place_of.located():
            paper = with_printed(experiment.paper, name, [choice.label for choice in experiment.algorithms])
        experiment = replace(experiment, paper=paper)
        parts.append(Part(name, entry.get("title", ""), experiment, set_up))
    return tuple(parts)


def _settings(tables: object) -> dict[str, Document]:
    """The settings by name, in the file's order."""
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"setting = {tables!r}: should be tables, [[setting]], each with a name and what differs.")
    found: dict[str, Document] = {}
    for table in tables:
        name = table.get("name")
        if not isinstance(name, str) or not re.fullmatch(_FOLDER_NAME, name) or name in found:
            rule = "a name for each, given once; it names a folder: letters, digits, and + - _ . after the first"
            raise InputError(f"setting.name = {name!r}: should be {rule}.")
        if not isinstance(table.get("title", ""), str):
            raise InputError(f"setting.title = {table['title']!r}: should be a text.")
        found[name] = table
    return found


def _parse(document: Document, settings: Sequence[Setting], origin: Origin) -> Experiment:
    """The experiment of a document without parts."""
    with origin.located():
        document = with_settings(document, settings)
    document.pop(UNUSED, None)  # what a run's config.toml says for people
    for key, value in document.items():
        if key not in _TOP_KEYS:
            raise origin.at(key, unknown_name("key", key, [*_TOP_KEYS, SETTING, SMALL]))
        if (key in SECTIONS or key == "algorithm") and not isinstance(value, Mapping):
            raise origin.at(key, InputError(f"{key} = {value!r} should be a table: [{key}] with one line per key."))
    with origin.located():
        sections: dict[str, Any] = {
            name: _section(name, kind, document.get(name, {})) for name, kind in SECTIONS.items()
        }
        seeds = _seeds(document.get("seeds", [0]))
        if (optimizer := sections["train"].optimizer) is not None:
            choose(OPTIMIZERS, optimizer, "train.optimizer")
        _check_target(sections["eval"])
        _check_crossed(sections["eval"], sections["paper"])
    return Experiment(_algorithms(document, origin), seeds, **sections, origin=origin)


def _check_target(section: EvalSection) -> None:
    """Rounds to a target are exact only where every round is evaluated."""
    if section.target is not None and section.every > 1:
        raise InputError(
            f"eval.every = {section.every} beside eval.target = {section.target}: the number of rounds to the target "
            "would depend on how often rounds are evaluated. Set eval.every = 1, or leave out eval.target."
        )


def _check_crossed(section: EvalSection, paper: PaperSection) -> None:
    """What a paper reports is measured."""
    wanted = [name for name in paper.metrics if name in OF_OTHERS_DATA]
    if wanted and section.cross is False:
        raise InputError(
            f"eval.cross = false beside paper.metrics = {', '.join(wanted)}: S- and G-accuracy are what eval.cross "
            "measures. Set it to true or 'auto', or leave these metrics out."
        )


def experiment_document(experiment: Experiment) -> Document:
    """The document that `parse_experiment` reads as this experiment: what was set, without defaults and [tune]."""
    sections = {name: _set_keys(getattr(experiment, name)) for name in SECTIONS if name != "tune"}
    if root := sections["data"].get("root"):
        sections["data"]["root"] = os.path.abspath(os.path.expanduser(root))  # the file may be read from elsewhere
    return {
        "seeds": list(experiment.seeds),
        "algorithms": [
            {"name": c.name, "label": c.label, **({"note": c.note} if c.note else {}), **c.hyper}
            for c in experiment.algorithms
        ],
        **{name: keys for name, keys in sections.items() if keys},
    }


def _set_keys(section: Section) -> Document:
    keys = section.model_dump(exclude_unset=True)
    options: Document = keys.pop("options", {})
    return {**keys, **options}


def parse_setting(text: str) -> Setting:
    """``key=value`` of the command line."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text!r} is not key=value; write for example --set train.rounds=10.")
    return key.strip(), parse_value(value)


def _section(name: str, kind: type[S], given: Mapping[str, Any]) -> S:
    """One table, its options apart from the keys that every such table has."""
    fields = [key for key in kind.model_fields if key != "options"]
    options = {key: value for key, value in given.items() if key not in fields}
    taken = kind is ModelSection and MODELS.from_outside(given.get("name"))  # a factory not ours takes what it likes
    allowed = [*fields, *options_of(kind, given)]
    for key in options:
        if not taken and key not in allowed:
            raise unknown_name(f"{name}.{key}", options[key], allowed, what=f"a key of [{name}]", seen=key)
    values = {key: value for key, value in given.items() if key in fields} | ({"options": options} if options else {})
    return _validated(name, kind, values)


def _validated(name: str, kind: type[S], values: Mapping[str, Any]) -> S:
    try:
        return kind.model_validate(dict(values))
    except ValidationError as invalid:
        errors = invalid.errors()
        key = str(errors[0]["loc"][0])
        reasons = dict.fromkeys(e["msg"].removeprefix("Input ") for e in errors if e["loc"][0] == key)
        raise InputError(f"{name}.{key} = {values.get(key)!r}: {', or '.join(reasons)}.") from None


def _seeds(value: object) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(seed) is int and 0 <= seed < LARGEST_SEED for seed in value)
    if not isinstance(value, list) or not whole or not value or len(set(value)) != len(value):
        wanted = "a list of different whole numbers from 0 on, below 2^63, such as [0, 1]"
        raise InputError(f"seeds = {value!r}: should be {wanted}.")
    return tuple(value)


def _algorithms(document: Mapping[str, Any], origin: Origin) -> tuple[AlgorithmChoice, ...]:
    """The list ``algorithms``, or the single table ``algorithm``; beside a list, the table holds shared values."""
    table: Document = document.get("algorithm", {})
    with origin.located():
        if "algorithms" not in document:
            if "name" not in table:
                missing = InputError("algorithms is missing: list some, such as algorithms = ['local', 'fedavg'].")
                raise origin.at("algorithms", missing)
            return (_choice(table, "algorithm"),)
        listed = document["algorithms"]
        if not isinstance(listed, list) or not listed:
            raise InputError(f"algorithms = {listed!r}: should be a list of names or of tables with a name.")
        if "name" in table:
            raise InputError(f"algorithm.name = {table['name']!r} stands beside algorithms; keep one of the two.")
    choices: list[AlgorithmChoice] = []
    for number, entry in enumerate(listed):
        key = f"algorithms.{number}"  # as `key_lines` counts them
        with origin.located(key):
            choices.append(_choice({"name": entry} if isinstance(entry, str) else entry, key))
            _check_label(choices[-1], choices[:-1])
    with origin.located():
        for hyper, value in table.items():
            choices = _spread(choices, hyper, value, wins=f"algorithm.{hyper}" in origin.from_command)
    return tuple(choices)


def _choice(entry: object, key: str) -> AlgorithmChoice:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise InputError(f"{key} = {entry!r}: should be a name, or a table with a name and hyper-parameters.")
    _hyper_names(entry["name"])  # refuses a name that is not known
    label = entry.get("label", entry["name"].rpartition(":")[2])
    if not isinstance(label, str) or not re.fullmatch(_FOLDER_NAME, label):
        raise InputError(
            f"algorithm.label = {label!r}: names a folder; should be letters, digits, and + - _ . after the first."
        )
    note = entry.get("note", "")
    if not isinstance(note, str) or note != " ".join(note.split()):
        raise InputError(f"algorithm.note = {note!r}: should be a sentence or two in one line, for under the table.")
    hyper = {name: value for name, value in entry.items() if name not in ("name", "label", "note")}
    return AlgorithmChoice(name=entry["name"], label=label, hyper=hyper, note=note, key=key)


def _check_label(choice: AlgorithmChoice, before: Sequence[AlgorithmChoice]) -> None:
    if choice.label.lower() in {other.label.lower() for other in before}:  # some file systems do not tell cases apart
        raise InputError(
            f"algorithm.label = {choice.label!r} stands twice in algorithms, and each needs a folder of its own: "
            f"write {{name = {choice.name!r}, label = 'another-name', ...}}."
        )


def _spread(choices: Sequence[AlgorithmChoice], hyper: str, value: Any, *, wins: bool) -> list[AlgorithmChoice]:
    """Give a shared hyper-parameter to every algorithm that has it; ``wins`` over an entry's own value."""
    names = {choice.name: _hyper_names(choice.name) for choice in choices}
    if not any(hyper in known for known in names.values()):
        every = sorted({name for known in names.values() for name in known})
        what = "a hyper-parameter of any of these algorithms"
        raise unknown_name(f"algorithm.{hyper}", value, every, what=what, seen=hyper)

    def given(choice: AlgorithmChoice) -> AlgorithmChoice:
        if hyper not in names[choice.name] or (hyper in choice.hyper and not wins):
            return choice
        told = {"hyper": choice.hyper | {hyper: value}, "shared": choice.shared | {hyper}}
        return choice.model_copy(update=told)

    return [given(choice) for choice in choices]


def _hyper_names(algorithm: str) -> list[str]:
    return [field.name for field in fields(build_algorithm(algorithm))]
