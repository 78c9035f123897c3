"""A traced graph against the function it was traced from, step after step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

from bespokefl.algorithms.fedavg import FedAvg
from bespokefl.core import trees
from bespokefl.data.federated import FederatedData
from bespokefl.engines import Vectorized
from bespokefl.engines.graphs import Graph, GraphCache, in_layout_of
from bespokefl.federation import Federation
from bespokefl.nn.counter_rng import keyed_bits

Carry = dict[str, Tensor]


class Pair(NamedTuple):
    x: Carry
    m: Carry


def carry() -> Carry:
    g = torch.Generator().manual_seed(0)
    return {k: torch.randn(3, 3, generator=g, dtype=torch.float64) for k in ("a", "b", "c")}


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, generator=g, dtype=torch.float64), torch.rand((), generator=g, dtype=torch.float64)


def copies(tree: Any) -> Any:
    return trees.tree_map(torch.clone, tree)


def assert_same(a: Any, b: Any) -> None:
    trees.tree_map(lambda u, v: torch.testing.assert_close(u, v, rtol=1e-14, atol=1e-15), a, b)


def assert_steps_alike(fn: Callable[..., Any], start: Any, *rest: Tensor, steps: int = 3) -> None:
    """Runs the graph on its own output, and the plain function on its own; what is not carry must stay."""
    graph = Graph(fn, (start, *rest), carry=True)
    kept = copies(rest)
    leaves, plain = trees.leaves(copies(start)), start
    for _ in range(steps):
        leaves = graph([*leaves, *rest])
        plain = fn(plain, *rest)
        assert_same(graph.tree(leaves), plain)
        assert len({v.data_ptr() for v in leaves}) == len(leaves), "two leaves of the carry share memory"
        assert not {v.data_ptr() for v in leaves} & {v.data_ptr() for v in rest}, "the carry shares an input's memory"
        assert_same(rest, kept)


# functions of (carry, u, s) that are easy to get wrong when memory is reused
def sgd(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {k: v - 0.1 * (v * u + s) for k, v in c.items()}


def passed_through(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"a": c["a"], "b": c["b"] + c["a"], "c": c["c"]}


def swapped(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"a": c["b"], "b": c["c"] + 1, "c": c["a"]}


def old_value_needed_after_the_update(c: Carry, u: Tensor, s: Tensor) -> Carry:
    a = c["a"] + u
    return {"a": a, "b": c["b"] * c["a"], "c": c["c"] + a}


def each_needs_the_others_old_value(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"a": c["a"] + c["b"], "b": c["b"] + c["c"], "c": c["c"] + c["a"]}


def one_tensor_twice(c: Carry, u: Tensor, s: Tensor) -> Carry:
    new = c["a"] * s
    return {"a": new, "b": new, "c": new}


def one_input_twice(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"a": c["a"], "b": c["a"], "c": u}


def views_of_inputs(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"a": c["b"].T, "b": u[0].expand(3, 3), "c": c["c"].view(9).view(3, 3)}


def views_of_one_result(c: Carry, u: Tensor, s: Tensor) -> Carry:
    both = torch.stack([c["a"] * s, c["b"] + u])
    return {"a": both[0], "b": both[1], "c": both[0]}


def updates_through_views(c: Carry, u: Tensor, s: Tensor) -> Carry:
    row = c["a"][0]
    a = c["a"] + u
    return {"a": a, "b": c["b"] - row, "c": c["c"] + a.T}


def adds_a_view_of_itself(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"a": c["a"] + c["a"].T, "b": c["b"] - c["b"][:1], "c": c["c"] * c["c"]}


def reads_unsafe_chunks_after_the_update(c: Carry, u: Tensor, s: Tensor) -> Carry:
    parts = torch.unsafe_chunk(c["a"], 3)
    return {"a": c["a"] + u, "b": c["b"] + parts[0] * parts[2], "c": c["c"]}


def sums_of_sums(c: Carry, u: Tensor, s: Tensor) -> Carry:
    t = c["a"] + c["b"]
    return {"a": t + u, "b": t - u, "c": t * s}


def lerps(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"a": torch.lerp(c["a"], u, 0.1), "b": torch.lerp(c["a"], c["b"], 0.3), "c": torch.lerp(u, c["c"], 0.2)}


def in_another_order(c: Carry, u: Tensor, s: Tensor) -> Carry:
    return {"c": c["c"] + 1, "a": 2 * c["a"], "b": c["b"] - u}


def gradient_with_decay(c: Carry, u: Tensor, s: Tensor) -> Carry:
    def objective(p: Carry) -> Tensor:
        return ((torch.tanh(u @ p["a"]) @ p["b"] + p["c"]) ** 2).mean() * s

    return {k: c[k] - 0.1 * (g + 0.01 * c[k]) for k, g in grad(objective)(c).items()}


FUNCTIONS = [
    sgd, passed_through, swapped, old_value_needed_after_the_update, each_needs_the_others_old_value,
    one_tensor_twice, one_input_twice, views_of_inputs, views_of_one_result, updates_through_views,
    adds_a_view_of_itself, reads_unsafe_chunks_after_the_update, sums_of_sums, lerps,
    in_another_order, gradient_with_decay,
]  # fmt: skip


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_graph_is_its_function(fn: Callable[..., Carry]) -> None:
    assert_steps_alike(fn, carry(), *batch())


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_graph_of_stacked_clients_is_its_function(fn: Callable[..., Carry]) -> None:
    stacked = trees.stack([trees.scale(k + 1.0, carry()) for k in range(4)])
    u, s = (torch.stack([k * v for k in range(4)]) for v in batch())
    assert_steps_alike(vmap(fn), stacked, u, s)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_without_a_carry_no_input_changes(fn: Callable[..., Carry]) -> None:
    args = (carry(), *batch())
    kept = copies(args)
    graph = Graph(fn, args, carry=False)
    assert_same(graph.tree(graph(trees.leaves(args))), fn(*args))
    assert_same(args, kept)


def test_leaves_that_were_one_tensor_when_traced_are_inputs_of_their_own() -> None:
    v, (u, s) = torch.ones(3, 3, dtype=torch.float64), batch()
    graph = Graph(sgd, ({"a": v, "b": v, "c": v}, u, s), carry=True)
    start = carry()
    assert_same(graph.tree(graph([*trees.leaves(copies(start)), u, s])), sgd(start, u, s))


def test_structures_types_and_constants_come_back() -> None:
    def step(p: Pair, u: Tensor) -> Pair:
        m = {k: 0.9 * v + u.to(v.dtype) for k, v in p.m.items()}
        return Pair({"w": p.x["w"] - m["w"], "n": p.x["n"] + 1, "on": ~p.x["on"]}, m)

    start = Pair({"w": torch.randn(2), "n": torch.tensor(3), "on": torch.tensor(True)}, {"w": torch.zeros(2)})
    graph = Graph(step, (start, torch.randn(2)), carry=True)
    out = graph.tree(graph([*trees.leaves(copies(start)), torch.ones(2)]))
    assert isinstance(out, Pair) and (out.x["n"], out.x["on"], out.x["n"].dtype) == (4, False, torch.int64)
    torch.testing.assert_close(out.x["w"], start.x["w"] - 1)


def test_positions_are_counted_once_and_not_at_every_step() -> None:
    def step(c: Carry, key: Tensor) -> Carry:
        kept = keyed_bits(key, torch.arange(9).view(3, 3)) > 2**31
        return {k: v * kept for k, v in c.items()}

    assert_steps_alike(step, carry(), torch.tensor(5))
    assert not {"arange", "view"} & set(Graph(step, (carry(), torch.tensor(5)), carry=True).operations)


def test_a_carry_of_another_structure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"[Nn]ode|keys?"):
        Graph(lambda c: {**c, "new": c["a"]}, (carry(),), carry=True)


# convolutions ----------------------------------------------------------------------------------------
def test_kernels_stay_channels_last() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 2)).double()
    start = {k: v.detach() for k, v in net.state_dict().items()}

    def step(x: Carry, data: Tensor) -> Carry:
        gradient = grad(lambda p: (functional_call(net, p, (data,)) ** 2).mean())(x)
        return {k: x[k] - 0.1 * g for k, g in gradient.items()}

    data = torch.randn(5, 3, 8, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    leaves = [
        v.clone(memory_format=torch.channels_last if v.ndim == 4 else torch.contiguous_format) for v in start.values()
    ]
    graph = Graph(step, (dict(zip(start, leaves, strict=True)), data), carry=True)
    plain = start
    for _ in range(3):
        leaves, plain = graph([*leaves, data]), step(plain, data)
        assert leaves[0].is_contiguous(memory_format=torch.channels_last) and not leaves[0].is_contiguous()
        for u, v in zip(leaves, plain.values(), strict=True):
            torch.testing.assert_close(u, v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3), (4, 1, 2, 2)])
def test_in_layout_of(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    assert in_layout_of(torch.zeros(shape), value).is_contiguous()
    if len(shape) == 4:
        last = torch.zeros(shape).contiguous(memory_format=torch.channels_last)
        assert in_layout_of(last, value).stride() == last.stride()
        assert torch.equal(in_layout_of(last, value), value)


# memory ----------------------------------------------------------------------------------------------
def test_peak_memory_counts_what_is_alive_at_once() -> None:
    x = torch.zeros(1000)  # 4000 bytes

    def chain(c: Carry) -> Carry:
        v = c["x"]
        for _ in range(50):
            v = torch.sin(v)
        return {"x": v}

    def wide(c: Carry) -> Carry:
        parts = [torch.sin(c["x"] + k) for k in range(50)]
        return {"x": torch.stack(parts).sum(0)}

    assert Graph(chain, ({"x": x},), carry=True).peak_bytes == 3 * 4000  # the input, a source and its sine
    peak = Graph(wide, ({"x": x},), carry=True).peak_bytes
    assert 101 * 4000 <= peak <= 103 * 4000  # the input, 50 sines and their stack


def test_views_take_no_memory() -> None:
    x = torch.zeros(10, 10)
    assert Graph(lambda c: {"x": c["x"].T}, ({"x": x},), carry=False).peak_bytes == 400


# the cache -------------------------------------------------------------------------------------------
def test_the_cache_traces_once_per_name_shape_type_and_layout() -> None:
    traced = []

    def fn(c: Carry) -> Carry:
        traced.append(1)
        return {k: v + 1 for k, v in c.items()}

    cache = GraphCache()
    first = cache.get("f", fn, ({"x": torch.zeros(2, 3)},))
    assert cache.get("f", fn, ({"x": torch.ones(2, 3)},)) is first and len(traced) == 1
    others = [
        cache.get("g", fn, ({"x": torch.zeros(2, 3)},)),
        cache.get("f", fn, ({"y": torch.zeros(2, 3)},)),
        cache.get("f", fn, ({"x": torch.zeros(3, 2)},)),
        cache.get("f", fn, ({"x": torch.zeros(2, 3).double()},)),
        cache.get("f", fn, ({"x": torch.zeros(3, 2).T},)),
    ]
    assert len({id(g) for g in (first, *others)}) == 6 and len(traced) == 6


def test_the_cache_forgets_the_least_recently_used() -> None:
    cache = GraphCache(limit=2)
    get = lambda n: cache.get("f", lambda c: c + 1, (torch.zeros(n),))  # noqa: E731
    one, two = get(1), get(2)
    assert get(1) is one
    get(3)
    assert get(1) is one and get(2) is not two


@pytest.mark.parametrize("stack", [None, 1])
def test_one_engine_and_algorithm_serve_two_models_of_the_same_shapes(stack: int | None) -> None:
    rng = np.random.default_rng(0)
    data = FederatedData.from_arrays([(rng.normal(size=(20, 4)), rng.integers(0, 3, 20)) for _ in range(3)])

    def weights(activation: nn.Module, engine: Vectorized, algorithm: FedAvg) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 3))
        federation = Federation(net, data, algorithm, engine=engine)
        federation.round()
        return federation.server["w"]["0.weight"]

    shared, algorithm = Vectorized(stack=stack), FedAvg()
    for activation in (nn.ReLU(), nn.Tanh()):
        expected = weights(activation, Vectorized(stack=stack), FedAvg())
        assert torch.equal(weights(activation, shared, algorithm), expected), activation


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.float64, False)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_of_linear_layers_add_into_the_carry(dtype: torch.dtype, fused: bool, momentum: float) -> None:
    """SGD on y = x w in float32 needs no memory for the gradient; float64 keeps the operations as they are written."""
    generator = torch.Generator().manual_seed(0)
    w, m, x, g = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((4, 3), (4, 3), (8, 4), (8, 3)))

    def step(carry: tuple[Tensor, Tensor], x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        w, m = carry
        gradient = x.T @ g
        if momentum:
            m = torch.add(gradient, m, alpha=momentum)
            gradient = m
        return torch.sub(w, gradient, alpha=0.1), m

    wanted = step((w, m), x, g)
    graph = Graph(step, ((w, m), x, g), carry=True)
    got = graph.tree(graph([w.clone(), m.clone(), x, g]))
    assert ("addmm_" in str(graph._run.__self__.code)) == fused
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if fused else 0, atol=1e-6 if fused else 0)


def test_what_is_computed_twice_is_computed_once() -> None:
    def twice(c: Carry, u: Tensor, s: Tensor) -> Carry:
        return {k: v + (u * s).exp() * (u * s).exp().sum() for k, v in c.items()}

    assert_steps_alike(twice, carry(), *batch())
    graph = Graph(twice, (carry(), *batch()), carry=True)
    assert graph.operations.count("exp") == 1


def test_zeros_of_either_sign_are_not_the_same() -> None:
    def signs(c: Carry, u: Tensor, s: Tensor) -> Carry:
        positive, negative = torch.full_like(u, 0.0), torch.full_like(u, -0.0)
        return {"a": c["a"], "b": 1 / positive, "c": 1 / negative}

    assert_steps_alike(signs, carry(), *batch(), steps=1)


def test_a_trace_notes_all_shapes_in_one_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, make_fx makes one for every operation, which takes most of the time of a trace."""
    made: list[FakeTensorMode] = []
    init = FakeTensorMode.__init__

    def counted(self: FakeTensorMode, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "__init__", counted)
    graph = Graph(lambda x: [x.sin().cos().exp().tanh().sqrt()], (torch.ones(3),), carry=False)
    torch.testing.assert_close(graph([torch.ones(3)])[0], torch.ones(3).sin().cos().exp().tanh().sqrt())
    assert len(made) == 1
