"""Made-up messages: JSON of every kind, arrays of every shape, and good messages of which a part is changed."""

import copy
import json
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bespokefl.flower.transport.envelope import Envelope
from bespokefl.flower.transport.records import ARRAYS, HEADER, TYPES, to_record

ODD = [None, True, -1, 0, 1, 2**63, 2**70, -(2**80), 1e308, float("nan"), float("inf")]
RUDE = ["", "\x1b[2J", "\ud800", "9" * 5000]
NAMES = """clients failed version computed useful trees uploads bfloat16 dict tensor value named items list tuple held
silo kind classes input_shape target inputs name id train val test of run round exchange program versions shared
per_client split model agreement seed data protocol federation x0 w 0 1 4 own simulated labels score keep open hello
train.w n uploads.w accuracy loss"""
words = st.sampled_from(NAMES.split())
scalars = st.one_of(st.sampled_from(ODD), st.sampled_from(RUDE), st.integers(), st.floats(), words, st.text(max_size=6))
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)
headers = st.dictionaries(words, values, max_size=8)
any_arrays = st.sampled_from([*TYPES, "complex64", "S3", "U2", ">f4"]).flatmap(
    lambda kind: hnp.arrays(np.dtype(kind), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
)
array_tables = st.dictionaries(words, any_arrays, max_size=4)


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """A JSON value, with up to three of its parts replaced, removed or repeated."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        place, key = _somewhere(draw, value)
        if place is None:
            return draw(values)
        match draw(st.sampled_from(["replace", "remove", "repeat"])):
            case "replace":
                place[key] = draw(values)
            case "remove":
                del place[key]
            case _ if isinstance(place, list):
                place.insert(key, copy.deepcopy(place[key]))
            case _:
                place[draw(words)] = copy.deepcopy(place[key])
    return value


def _somewhere(draw: st.DrawFn, value: Any) -> tuple[Any, Any]:
    place, key = None, None
    while isinstance(value, dict | list) and value:
        keys = sorted(value, key=str) if isinstance(value, dict) else range(len(value))
        place, key = value, draw(st.sampled_from(keys))
        if draw(st.integers(0, 2)) == 0:
            break
        value = value[key]
    return place, key


@st.composite
def envelopes(draw: st.DrawFn, good: Envelope) -> Envelope:
    """A good message, of which the header, the arrays or both are changed; or one of which nothing is good."""
    if draw(st.integers(0, 4)) == 0:
        return Envelope(draw(headers), draw(array_tables))
    header, arrays = dict(good.header), dict(good.arrays)
    if draw(st.booleans()) or not arrays:
        header = draw(changed(header))
        header = header if isinstance(header, dict) else {"x": header}
    else:
        name = draw(st.sampled_from(sorted(arrays)))
        arrays.pop(name) if draw(st.booleans()) else arrays.update({name: draw(any_arrays)})
    return Envelope(header, arrays)


@st.composite
def records(draw: st.DrawFn, good: Envelope) -> RecordDict:
    """A message as it travels: texts, types and bytes changed at will."""
    record = to_record(good)
    texts = dict(record.config_records[HEADER])
    for field in draw(st.lists(st.sampled_from(["header", "index"]), max_size=2, unique=True)):
        content = draw(changed(json.loads(str(texts[field]))) | values)
        texts[field] = draw(st.sampled_from([json.dumps(content), str(content)])) if draw(st.booleans()) else ""
    flat = {}
    for kind, array in record.array_records[ARRAYS].items():
        data = bytearray(array.data)
        for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=3)):
            data[place] = draw(st.integers(0, 255))
        cut = draw(st.sampled_from([len(data), len(data), 0, len(data) // 2]))
        named = draw(st.sampled_from([kind, kind, kind, "float64", "object"]))
        flat[named] = Array(str(array.dtype), tuple(array.shape), array.stype, bytes(data[:cut]))
    config = {k: v for k, v in texts.items() if draw(st.integers(0, 9))}
    return RecordDict({HEADER: ConfigRecord(config), ARRAYS: ArrayRecord(flat)})
