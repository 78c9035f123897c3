"""The solvers against their optimality conditions, closed forms and scipy's SLSQP."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from bespokefl.core import gram, min_norm, min_norm_near, nearest_directions
from bespokefl.core.solvers import CHUNK, Floats, active_set, factor, gap, squared_distances

KINDS = ("plain", "one-sided", "duplicates", "nearly collinear", "a zero column", "1e-12 to 1e12", "opposite")


def columns(kind: str, n: int, dim: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(dim, n))
    if kind == "one-sided":
        q[0] = np.abs(q[0]) + 1
    elif kind == "duplicates":
        q[:, n // 2 :] = q[:, : n - n // 2]
    elif kind == "nearly collinear":
        q = q[:, :1] + 1e-8 * q
    elif kind == "a zero column":
        q[:, 0] = 0
    elif kind == "1e-12 to 1e12":
        q[0] = np.abs(q[0]) + 1
        q = q * 10.0 ** rng.integers(-12, 13, size=n)
    elif kind == "opposite":
        q[:, -1] = -q[:, 0]
    return q


problems = st.builds(columns, st.sampled_from(KINDS), st.integers(2, 8), st.integers(1, 9), st.integers(0, 10**6))


def slsqp_min_norm(q: Floats, low: Any = 0.0, high: Any = 1.0) -> Floats:
    n = q.shape[1]
    k = q.T @ q
    low, high = np.broadcast_to(low, n), np.broadcast_to(high, n)
    found = minimize(
        lambda lam: 0.5 * lam @ k @ lam,
        low + (1 - low.sum()) * (high - low) / max((high - low).sum(), 1e-300),
        jac=lambda lam: k @ lam,
        bounds=list(zip(low, high, strict=True)),
        constraints={"type": "eq", "fun": lambda lam: lam.sum() - 1, "jac": lambda lam: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    lam = np.clip(found.x, low, high)
    return np.asarray(lam / lam.sum())


def slsqp_direction(q: Floats, i: int, gamma: float) -> Floats:
    g, others = q[:, i], np.delete(q, i, axis=1)
    lengths = np.linalg.norm(others, axis=0)
    others = others[:, lengths > 0] / lengths[lengths > 0]
    bound = gamma * np.maximum(0, -others.T @ g)
    found = minimize(
        lambda d: 0.5 * (d + g) @ (d + g),
        np.zeros_like(g),
        jac=lambda d: d + g,
        constraints={"type": "ineq", "fun": lambda d: bound - others.T @ d, "jac": lambda d: -others.T},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return np.asarray(found.x)


# the shortest vector of a hull -----------------------------------------------------------------------
@given(problems)
def test_min_norm_is_optimal(q: Floats) -> None:
    k = q.T @ q
    lam = min_norm(k)
    largest = k.diagonal().max()
    assert (lam >= 0).all() and lam.sum() == pytest.approx(1, abs=1e-14)
    assert gap(k, lam) <= 1e-14 * largest
    d = -q @ lam
    assert (q.T @ d).max() <= -d @ d + 1e-14 * largest  # with the columns themselves, not only their Gram matrix


@given(problems)
def test_min_norm_matches_slsqp(q: Floats) -> None:
    q = q / np.linalg.norm(q, axis=0).max()
    ours, theirs = q @ min_norm(q.T @ q), q @ slsqp_min_norm(q)
    assert ours @ ours <= theirs @ theirs + 1e-14
    assert np.linalg.norm(ours - theirs) <= 1e-6 + 2 * np.sqrt(max(0, theirs @ theirs - ours @ ours))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 30, 500])
def test_min_norm_of_200_columns(kind: str, dim: int) -> None:
    q = columns(kind, 200, dim, 5)
    k = q.T @ q
    assert gap(k, min_norm(k)) <= 1e-14 * k.diagonal().max()
    assert (min_norm(k) == min_norm(k.copy())).all()  # deterministic


@given(st.integers(0, 10**6), st.integers(-12, 12))
def test_two_columns_in_closed_form(seed: int, exponent: int) -> None:
    g1, g2 = np.random.default_rng(seed).normal(size=(2, 3))
    g2 = g2 * 10.0**exponent
    expected = np.clip((g2 - g1) @ g2 / ((g1 - g2) @ (g1 - g2)), 0, 1)
    q = np.stack([g1, g2], 1)
    assert min_norm(q.T @ q) == pytest.approx([expected, 1 - expected], abs=1e-12)


@given(problems, st.integers(0, 7))
def test_a_duplicate_changes_nothing(q: Floats, which: int) -> None:
    more = np.concatenate([q, q[:, [which % q.shape[1]]]], 1)
    d, same = q @ min_norm(q.T @ q), more @ min_norm(more.T @ more)
    assert np.linalg.norm(d - same) <= 1e-7 * np.linalg.norm(q, axis=0).max()


def test_scales_of_columns_keep_their_digits() -> None:
    """A column a trillion times longer is not mistaken for rounding noise, nor are the short ones beside it."""
    q = np.array([[1e-12, 0.0, 1e12], [0.0, 1e-12, 1e12]])
    assert q @ min_norm(q.T @ q) == pytest.approx([5e-13, 5e-13], rel=1e-12)
    q = np.array([[1e12, -1e12], [1.0, 1.0]])
    assert q @ min_norm(q.T @ q) == pytest.approx([0, 1], abs=1e-3)


def test_zero_and_single_columns() -> None:
    assert min_norm(np.array([[4.0]])).tolist() == [1]
    assert min_norm(np.zeros((3, 3))).tolist() == [1, 0, 0]
    assert min_norm(np.array([[1.0, 0.0], [0.0, 0.0]])).tolist() == [0, 1]


# the shortest vector near given weights --------------------------------------------------------------
def box(p: Floats, epsilon: float) -> tuple[Floats, Floats]:
    return np.maximum(0, p - epsilon), np.minimum(1, p + epsilon)


def box_gap(k: Floats, lam: Floats, p: Floats, epsilon: float) -> float:
    """How much lower lam.K could get by any feasible weights: no squared length is lower by more than twice this."""
    low, high = box(p, epsilon)
    slopes, best = k @ lam, low.copy()
    for j in np.argsort(slopes, kind="stable"):  # a linear function is lowest where the steepest are filled first
        best[j] += min(high[j] - low[j], 1 - best.sum())
    return float((lam - best) @ slopes)


def centre(kind: str, n: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    return {"uniform": np.full(n, 1 / n), "skewed": rng.dirichlet(np.full(n, 0.3)), "corner": np.eye(n)[seed % n]}[kind]


CENTRES = ("uniform", "skewed", "corner")
EPSILONS = (0.0, 1e-9, 0.01, 0.1, 0.4, 1.0)


@given(problems, st.sampled_from(CENTRES), st.integers(0, 10**6), st.sampled_from(EPSILONS))
def test_min_norm_near_is_feasible_and_optimal(q: Floats, kind: str, seed: int, epsilon: float) -> None:
    k, p = q.T @ q, centre(kind, q.shape[1], seed)
    lam, (low, high) = min_norm_near(k, p, epsilon), box(p, epsilon)
    assert (low <= lam).all() and (lam <= high).all() and lam.sum() == pytest.approx(1, abs=1e-14)  # bounds exactly
    assert box_gap(k, lam, p, epsilon) <= 1e-14 * k.diagonal().max()


@given(problems, st.sampled_from(CENTRES), st.integers(0, 10**6), st.sampled_from((0.01, 0.1, 0.4, 1.0)))
def test_min_norm_near_matches_slsqp(q: Floats, kind: str, seed: int, epsilon: float) -> None:
    q, p = q / np.maximum(np.linalg.norm(q, axis=0), 1e-300), centre(kind, q.shape[1], seed)
    ours, theirs = q @ min_norm_near(q.T @ q, p, epsilon), q @ slsqp_min_norm(q, *box(p, epsilon))
    assert ours @ ours <= theirs @ theirs + 1e-14
    assert np.linalg.norm(ours - theirs) <= 1e-6 + 2 * np.sqrt(max(0, theirs @ theirs - ours @ ours))


@given(problems, st.sampled_from(CENTRES), st.integers(0, 10**6))
def test_min_norm_near_with_all_freedom_is_min_norm_and_with_none_the_centre(q: Floats, kind: str, seed: int) -> None:
    q, p = q / np.maximum(np.linalg.norm(q, axis=0), 1e-300), centre(kind, q.shape[1], seed)
    k = q.T @ q
    assert np.linalg.norm(q @ min_norm_near(k, p, 1.0) - q @ min_norm(k)) <= 1e-7
    assert (min_norm_near(k, p, 0.0) == p).all()  # exact


@given(problems, st.integers(0, 10**6))
def test_more_freedom_never_lengthens(q: Floats, seed: int) -> None:
    k, p = q.T @ q, centre("skewed", q.shape[1], seed)
    squared = [lam @ k @ lam for lam in (min_norm_near(k, p, epsilon) for epsilon in EPSILONS)]
    assert all(b <= a + 1e-14 * k.diagonal().max() for a, b in itertools.pairwise(squared))


@given(st.integers(0, 10**6), st.sampled_from(EPSILONS))
def test_two_columns_near_a_centre_in_closed_form(seed: int, epsilon: float) -> None:
    rng = np.random.default_rng(seed)
    q, p = rng.normal(size=(3, 2)), rng.uniform()
    best = (q[:, 1] - q[:, 0]) @ q[:, 1] / ((q[:, 0] - q[:, 1]) @ (q[:, 0] - q[:, 1]))
    expected = np.clip(best, max(0, p - epsilon), min(1, p + epsilon))
    lam = min_norm_near(q.T @ q, np.array([p, 1 - p]), epsilon)
    assert lam == pytest.approx([expected, 1 - expected], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [0.003, 0.1, 1.0])
def test_min_norm_near_of_60_columns(kind: str, epsilon: float) -> None:
    q, p = columns(kind, 60, 80, 5), centre("skewed", 60, 2)
    k = q.T @ q
    lam = min_norm_near(k, p, epsilon)
    assert box_gap(k, lam, p, epsilon) <= 1e-14 * k.diagonal().max()
    assert (lam == min_norm_near(k.copy(), p.copy(), epsilon)).all()  # deterministic


def test_min_norm_near_of_degenerate_columns() -> None:
    assert min_norm_near(np.array([[4.0]]), np.ones(1), 0.1).tolist() == [1]
    assert min_norm_near(np.zeros((2, 2)), np.array([0.3, 0.7]), 0.5).tolist() == [0.3, 0.7]
    same = np.ones((3, 3))  # three equal columns: any weights are as good
    assert min_norm_near(same, np.array([0.2, 0.3, 0.5]), 0.1).sum() == pytest.approx(1, abs=1e-15)
    zero_last = np.diag([1.0, 1.0, 0.0])
    assert min_norm_near(zero_last, np.full(3, 1 / 3), 0.1) == pytest.approx([17 / 60, 17 / 60, 13 / 30], abs=1e-15)


# the nearest direction without conflict ---------------------------------------------------------------
def directions(q: Floats, gamma: float) -> Floats:
    """One column each."""
    nu = nearest_directions(q.T @ q, range(q.shape[1]), gamma)
    assert (nu >= 0).all() and not nu.diagonal().any()
    return np.asarray(-(q + q @ nu.T))


@given(problems, st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_directions_are_feasible_and_optimal(q: Floats, gamma: float) -> None:
    k = q.T @ q
    nu, d = nearest_directions(k, range(len(k)), gamma), directions(q, gamma)
    size = np.linalg.norm(q, axis=0)
    for i in range(len(k)):
        slack = gamma * np.maximum(0, -k[:, i]) - q.T @ d[:, i]
        slack[i] = 0
        # |d_i + g_i| comes from the square root of a gap where columns are nearly collinear: 1e-7, not 1e-14
        assert (slack >= -1e-7 * size * size[i]).all()
        assert (nu[i] * slack <= 1e-7 * size[i] ** 2).all()  # complementary: only active constraints push
        assert q[:, i] @ d[:, i] <= -d[:, i] @ d[:, i] + 1e-7 * size[i] ** 2


@given(problems, st.sampled_from([0.0, 0.3, 0.7]))
def test_directions_match_slsqp(q: Floats, gamma: float) -> None:
    q = q / np.maximum(np.linalg.norm(q, axis=0), 1e-300)
    d = directions(q, gamma)
    for i in range(q.shape[1]):
        assert np.linalg.norm(d[:, i] - slsqp_direction(q, i, gamma)) <= 1e-6


@given(problems)
def test_gamma_moves_towards_the_own_gradient(q: Floats) -> None:
    far = [np.linalg.norm(directions(q, gamma) + q, axis=0) for gamma in (0, 0.25, 0.5, 0.75, 1)]
    size = np.linalg.norm(q, axis=0)
    assert all((b <= a + 1e-7 * size).all() for a, b in itertools.pairwise(far))
    assert (directions(q, 1.0) == -q).all()  # exact


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5]))
def test_without_conflict_the_direction_is_the_own_gradient(seed: int, gamma: float) -> None:
    q = np.random.default_rng(seed).random((4, 5))
    assert (directions(q, gamma) == -q).all()  # exact


@given(problems, st.integers(-12, 12))
def test_scales_of_the_others_do_not_matter(q: Floats, exponent: int) -> None:
    scaled = q.copy()
    scaled[:, 1:] *= 10.0**exponent
    assert np.linalg.norm(directions(q, 0.3)[:, 0] - directions(scaled, 0.3)[:, 0]) <= 1e-7 * np.linalg.norm(q[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_directions_of_200_columns(kind: str) -> None:
    q = columns(kind, 200, 300, 6)
    k = q.T @ q
    nu = nearest_directions(k, [0, 7, 199], 0.0)
    for i, row in zip([0, 7, 199], nu, strict=True):
        d = -(q[:, i] + q @ row)
        size = np.sqrt(k.diagonal()) * np.sqrt(k[i, i])
        assert (np.delete(q.T @ d - 1e-7 * size, i) <= 0).all()
    assert (nu == nearest_directions(k.copy(), [0, 7, 199], 0.0)).all()


@given(problems)
def test_the_active_set_method_alone(q: Floats) -> None:
    """It only runs where scipy's answer fails the optimality test, so it is held to the same standard here."""
    a, b = np.vstack([q / np.maximum(np.linalg.norm(q, axis=0), 1e-300), np.ones(q.shape[1])]), np.eye(len(q) + 1)[-1]
    u = active_set(a, b, 1e-14)
    pull = a.T @ (b - a @ u)
    assert (u >= 0).all() and pull.max() <= 1e-14 and np.abs(pull[u > 0]).max(initial=0) <= 1e-13


# the Gram matrix --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_is_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tree = {"a": torch.randn(3, 4, 5, dtype=dtype), "b": torch.randn(3, dtype=dtype)}
    rows = torch.cat([tree["a"].reshape(3, -1), tree["b"].reshape(3, 1)], 1).double().numpy()
    assert gram(tree) == pytest.approx(rows @ rows.T, rel=1e-14, abs=1e-14)
    with pytest.raises(ValueError, match="at least one tensor"):
        gram({})


def test_gram_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, Any] = {"a": torch.arange(30.0).reshape(2, 15)}
    whole = gram(rows)
    assert CHUNK > 30
    monkeypatch.setattr("bespokefl.core.solvers.CHUNK", 8)
    assert (gram(rows) == whole).all()


# distances --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_distances_are_those_of_differences(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tree = {"a": torch.randn(5, 4, 3, dtype=dtype), "b": torch.randn(5, dtype=dtype)}
    rows = torch.cat([tree["a"].reshape(5, -1), tree["b"].reshape(5, 1)], 1).double().numpy()
    expected = ((rows[[3, 0], None] - rows[None]) ** 2).sum(2)
    found = squared_distances(tree, np.array([3, 0]))
    assert found == pytest.approx(expected, rel=1e-13, abs=0)
    monkeypatch.setattr("bespokefl.core.solvers.CHUNK", 15)
    assert squared_distances(tree, np.array([3, 0])) == pytest.approx(found, rel=1e-13, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_distances_of_nearly_equal_rows(dtype: torch.dtype) -> None:
    """Rows of length 1000 that differ by 1e-6: a plain Gram matrix would leave none of the 1e-12 in float64."""
    torch.manual_seed(0)
    middle = 10 * torch.randn(1, 10_000, dtype=torch.float64)
    rows = (middle + 1e-8 * torch.randn(4, 10_000, dtype=torch.float64)).to(dtype)
    rows[3] = rows[2]
    x = rows.double().numpy()
    expected = ((x[:, None] - x[None]) ** 2).sum(2)
    found = squared_distances({"x": rows}, np.arange(4))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-13 * expected.max())
    k = x @ x.T
    plain = k.diagonal()[:, None] + k.diagonal() - 2 * k
    assert np.abs(plain - expected).max() > 0.01 * expected.max()


def test_factor_restores_the_matrix() -> None:
    q = columns("duplicates", 6, 3, 1)
    root = factor(q.T @ q)
    assert len(root) == 3
    assert root.T @ root == pytest.approx(q.T @ q, abs=1e-13)
