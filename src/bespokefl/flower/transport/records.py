"""Messages as Flower's records: a header as one JSON string, the arrays of each type end to end in one Array.

One Array for each type and not one for each name, because Flower fetches every Array by two requests of its own.
The bytes are NumPy's file format, as everywhere in Flower, but they are read here: nothing is unpickled, and no
memory is asked for beyond what really came.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from bespokefl.flower import limits
from bespokefl.flower.refusal import Refused, reading
from bespokefl.flower.transport.envelope import Array, Envelope

MESSAGE_TYPE = "query"  # the one kind of Flower message that carries all of ours; their own kind is in the header
TYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint16", "uint8", "bool")
HEADER, ARRAYS = "bespoke", "arrays"  # the two records of a message
_TEXT, _INDEX = "header", "index"  # the fields of the first


class MessageError(Refused):
    """What came is not a message of ours; the text says why."""


def to_record(envelope: Envelope) -> RecordDict:
    parts: dict[str, list[Array]] = {}
    index: list[tuple[str, str, list[int]]] = []
    for name, array in envelope.arrays.items():
        kind = array.dtype.name
        if kind not in TYPES:
            raise MessageError(f"array {name!r} is of type {kind}; a message may hold {', '.join(TYPES)}")
        parts.setdefault(kind, []).append(array)
        index.append((name, kind, list(array.shape)))
    content = RecordDict({HEADER: ConfigRecord({_TEXT: json.dumps(envelope.header), _INDEX: json.dumps(index)})})
    if parts:
        content[ARRAYS] = ArrayRecord({kind: _joined(kind, arrays) for kind, arrays in parts.items()})
    return content


def from_record(content: RecordDict) -> Envelope:
    with reading("the message"):
        return _envelope(content)


def _envelope(content: RecordDict) -> Envelope:
    header, index = _texts(content)
    record = content.array_records.get(ARRAYS)
    flat = {} if record is None else {kind: _numbers(kind, array) for kind, array in record.items()}
    used = dict.fromkeys(flat, 0)
    arrays: dict[str, Array] = {}
    for name, kind, shape in index:
        if name in arrays:
            raise MessageError(f"array {name!r} comes twice")
        begin, count = used.get(kind, 0), math.prod(shape)
        if kind not in flat or begin + count > flat[kind].size:
            raise MessageError(f"array {name!r} of {kind}{shape} is not all there")
        arrays[name] = flat[kind][begin : begin + count].reshape(shape)
        used[kind] = begin + count
    if any(used[kind] != numbers.size for kind, numbers in flat.items()):
        raise MessageError("the message holds more numbers than its index says")
    return Envelope(header, arrays)


def payload_bytes(content: RecordDict) -> int:
    """Bytes of the header and the arrays; what TLS and HTTP add to them is not counted."""
    texts = sum(len(str(text).encode()) for record in content.config_records.values() for text in record.values())
    return texts + sum(len(array.data) for record in content.array_records.values() for array in record.values())


# writing ---------------------------------------------------------------------------------------------------


def _joined(kind: str, arrays: Iterable[Array]) -> FlowerArray:
    little = np.dtype(kind).newbyteorder("<")
    return FlowerArray(np.concatenate([array.ravel() for array in arrays]).astype(little, copy=False))


# reading: whoever sent it may be malicious -------------------------------------------------------------------


def _texts(content: RecordDict) -> tuple[Mapping[str, Any], list[tuple[str, str, tuple[int, ...]]]]:
    record = content.config_records.get(HEADER) or ConfigRecord()
    try:
        texts = [str(record[field]) for field in (_TEXT, _INDEX)]
        if max(len(text) for text in texts) > limits.HEADER_BYTES:
            raise MessageError(f"the header is longer than {limits.HEADER_BYTES:,} bytes")
        header, index = (json.loads(text) for text in texts)
    except (KeyError, ValueError, RecursionError) as error:
        raise MessageError(f"the header cannot be read ({error})") from None
    if not isinstance(header, dict) or not isinstance(index, list):
        raise MessageError("the header is not of the expected form")
    if len(index) > limits.ARRAYS:
        raise MessageError(f"the message holds {len(index):,} arrays; at most {limits.ARRAYS:,} are taken")
    return header, [_entry(entry) for entry in index]


def _entry(entry: object) -> tuple[str, str, tuple[int, ...]]:
    match entry:
        case [str(name), str(kind), list(shape)] if kind in TYPES and len(name) <= limits.ARRAY_NAME:
            if len(shape) <= limits.DIMENSIONS and all(type(n) is int and 0 <= n <= limits.SIDE for n in shape):
                return name, kind, tuple(shape)
    raise MessageError("the index of arrays is not of the expected form")


def _numbers(kind: str, array: FlowerArray) -> Array:
    """The flat array in these bytes, which must be exactly what their own head says."""
    if kind not in TYPES:
        raise MessageError(f"{kind!r} is not a type that a message may hold")
    stream = io.BytesIO(array.data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("unknown version")
        shape, _, seen = np.lib.format.read_array_header_1_0(stream)
    except Exception as error:  # NumPy's parser has many ways to stumble over damage
        raise MessageError(f"the {kind} numbers cannot be read ({error})") from None
    little, rest = np.dtype(kind).newbyteorder("<"), len(array.data) - stream.tell()
    if seen != little or len(shape) != 1 or shape[0] * little.itemsize != rest:
        raise MessageError(f"the {kind} numbers are not what their head says")
    return np.frombuffer(array.data, dtype=little, offset=stream.tell()).astype(np.dtype(kind), copy=False)
