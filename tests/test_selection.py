import itertools

import numpy as np
import pytest

from bespokefl.errors import InputError
from bespokefl.evaluation.score import Score
from bespokefl.experiments.selection import affordable, choose_rule, g_rows, s_rows


def test_rule() -> None:
    assert choose_rule("auto", validated=True) == "val"
    assert choose_rule("auto", validated=False) == "last"
    assert choose_rule("best_test", validated=True) == "best_test"
    with pytest.raises(InputError, match=r"eval\.select = 'val'.*data\.val"):
        choose_rule("val", validated=False)


@pytest.fixture
def test_sets() -> list[np.ndarray]:
    sizes = [4, 9, 6, 0, 5, 7, 8, 4, 5, 6, 7, 4]
    starts = np.cumsum([0, *sizes])
    return [np.arange(a, b) for a, b in itertools.pairwise(starts)]


def owners(rows: np.ndarray, test_sets: list[np.ndarray]) -> dict[int, int]:
    """How many of the rows belong to whom."""
    return {k: n for k, own in enumerate(test_sets) if (n := int(np.isin(rows, own).sum()))}


@pytest.mark.parametrize(("fraction", "others"), [(0.0, 0), (0.1, 1), (0.25, 2), (0.5, 5), (1.0, 10)])
def test_s_rows_take_equally_many_of_oneself_and_others(test_sets: list, fraction: float, others: int) -> None:
    for client, rows in enumerate(s_rows(test_sets, fraction, seed=0)):
        if not len(test_sets[client]):
            assert not len(rows)
            continue
        counts = owners(rows, test_sets)
        assert len(set(rows.tolist())) == len(rows)
        assert client in counts and len(counts) == others + 1
        smallest = min(len(test_sets[k]) for k in counts)
        assert set(counts.values()) == {smallest}


def test_s_rows_are_fixed_by_seed_and_client(test_sets: list) -> None:
    again = s_rows(test_sets, 0.3, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(s_rows(test_sets, 0.3, seed=0), again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(s_rows(test_sets, 0.3, seed=1), again, strict=True))


def test_s_rows_with_all_others_of_equal_size_are_g_rows() -> None:
    test = [np.arange(5 * k, 5 * k + 5) for k in range(6)]
    assert sorted(g_rows(test)) == list(range(30))
    assert all(sorted(s) == list(range(30)) for s in s_rows(test, 1.0, seed=0))


def test_one_client_alone() -> None:
    assert sorted(s_rows([np.arange(3)], 0.5, seed=0)[0]) == [0, 1, 2]


def test_affordable_depends_on_the_device() -> None:
    cost = {"clients": 100, "test_rows": 15_000, "parameters": 600_000, "scored_rounds": 1}
    assert not affordable(**cost, device="cpu")
    assert affordable(**cost, device="cuda")
    assert affordable(20, 450, 15_000, 40, "cpu")


def test_score_survives_a_checkpoint() -> None:
    columns = {
        name: np.array([0.1, np.nan, 1 / 3]) for name in Score.__dataclass_fields__ if "acc" in name or name == "loss"
    }
    score = Score(round=7, criterion=2 / 3, **columns)
    back = Score.from_tensors(score.tensors())
    assert (back.round, back.criterion) == (7, 2 / 3)
    for name, values in columns.items():
        np.testing.assert_array_equal(getattr(back, name), values)
