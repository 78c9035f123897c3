"""Messages as Flower's records: what goes in comes out, and nothing but that is accepted."""

import io
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from bespokefl.flower.transport.envelope import Envelope
from bespokefl.flower.transport.records import (
    ARRAYS,
    HEADER,
    TYPES,
    MessageError,
    from_record,
    payload_bytes,
    to_record,
)

headers = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
arrays = st.dictionaries(
    st.text(max_size=12),
    st.sampled_from(TYPES).flatmap(
        lambda kind: hnp.arrays(np.dtype(kind), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(headers, arrays)
def test_what_goes_in_comes_out(header: dict[str, object], values: dict[str, np.ndarray]) -> None:
    record = to_record(Envelope(header, values))
    sent = RecordDict()  # only what travels: names, types, shapes and bytes
    for name, part in record.items():
        sent[name] = (
            ArrayRecord({kind: Array(a.dtype, tuple(a.shape), a.stype, bytes(a.data)) for kind, a in part.items()})
            if isinstance(part, ArrayRecord)
            else ConfigRecord(dict(part))
        )
    back = from_record(sent)
    assert back.header == header
    assert list(back.arrays) == list(values)
    for name, value in values.items():
        assert back.arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(back.arrays[name], value)


def test_arrays_of_one_type_travel_as_one() -> None:
    record = to_record(Envelope({}, {f"layer{i}": np.full((2, i), i, np.float32) for i in range(50)}))
    assert list(record.array_records[ARRAYS]) == ["float32"]


def test_big_endian_and_strided_arrays_arrive_as_plain_ones() -> None:
    values = {"big": np.arange(6, dtype=">f8").reshape(2, 3), "strided": np.arange(12, dtype=np.int32)[::3]}
    back = from_record(to_record(Envelope({}, values))).arrays
    assert back["big"].dtype == np.dtype(np.float64)
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value)


def test_bytes_are_those_of_header_and_arrays() -> None:
    small, large = (payload_bytes(to_record(Envelope({}, {"x": np.zeros(n, np.float32)}))) for n in (1000, 3000))
    assert 8000 - 8 <= large - small <= 8000 + 8  # but for the digits of the sizes
    assert small < 4000 + 300


def test_objects_are_not_sent() -> None:
    with pytest.raises(MessageError, match="of type object"):
        to_record(Envelope({}, {"x": np.array([print])}))


# what a malicious sender may try --------------------------------------------------------------------------


def forged(data: bytes, index: object = (("x", "float32", [2]),), header: str = "{}") -> RecordDict:
    config = ConfigRecord({"header": header, "index": index if isinstance(index, str) else json.dumps(index)})
    return RecordDict({HEADER: config, ARRAYS: ArrayRecord({"float32": Array("float32", (2,), "numpy.ndarray", data)})})


def saved(array: np.ndarray, **kwargs: object) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **kwargs)  # type: ignore[arg-type]
    return stream.getvalue()


class Bomb:
    exploded = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return setattr, (Bomb, "exploded", True)


good = saved(np.zeros(2, np.float32))
huge = good.replace(b"(2,)", b"(9,)")

FORGED = {
    "a pickle": forged(pickle.dumps(Bomb())),
    "an array of objects": forged(saved(np.array([Bomb(), Bomb()]), allow_pickle=True)),
    "more in its head than in its body": forged(huge),
    "another type": forged(saved(np.zeros(2, np.float64))),
    "cut off": forged(good[:-1]),
    "no head": forged(b""),
    "an index that asks for more": forged(good, [("x", "float32", [3])]),
    "an index that asks for much more": forged(good, [("x", "float32", [2**62, 2**62])]),
    "an index that asks for less": forged(good, [("x", "float32", [1])]),
    "negative sizes": forged(good, [("x", "float32", [-1, -2])]),
    "sizes that are not numbers": forged(good, [("x", "float32", [True, 2])]),
    "one name twice": forged(good, [("x", "float32", [1]), ("x", "float32", [1])]),
    "an unknown type": forged(good, [("x", "object", [2])]),
    "an index without form": forged(good, {"x": 1}),
    "an index that is not JSON": forged(good, "nonsense"),
    "a header that is not JSON": forged(good, header="nonsense"),
    "a header that is a list": forged(good, header="[]"),
    "a header nested without end": forged(good, header="[" * 100_000),
    "no header": RecordDict({ARRAYS: ArrayRecord({"float32": Array("float32", (2,), "numpy.ndarray", good)})}),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_messages_are_refused(case: str) -> None:
    with pytest.raises(MessageError):
        from_record(FORGED[case])
    assert not Bomb.exploded


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    damaged = bytearray(good)
    for place in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        back = from_record(forged(bytes(damaged)))
    except MessageError:
        return
    assert back.arrays["x"].shape == (2,)
