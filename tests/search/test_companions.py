"""Calls beside the path: what is claimed for them is less than every program takes, whoever lies where.

The program of ``masses`` is asked with all its decisions taken: the strategies of a whole step, and by the mass of
every group on the host that has most of it how much of it is spread and how much together. Then it is a lower bound of
that one program at those sizes, and far nearer to it than its minimum is to the best of all programs.
"""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.compute import Parts, parts_coefficients
from hap.cost_models.evaluate import evaluate
from hap.cost_models.profile import CallCurve
from hap.graph import Value
from hap.placement import PARTIAL, GroupSizes, Shard
from hap.plan import Strategy
from hap.rules.choices import Choices, choices
from hap.search import masses
from hap.search.chain import find_chain
from hap.search.companions import find_companions
from hap.search.crossing import seconds_apart
from hap.search.doubled import ANYWHERE, SPREAD, TOGETHER
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.rounding import round_shares
from tests.search.models import gpt2, mixer, mlp
from tests.search.test_bound_measured import PLAIN, measured
from tests.search.test_masses import hosts

LAYERS = mlp(batch=512, width=64, layers=3)
DEEP = mlp(batch=512, width=64, layers=12)  # so many that layers are alike, each with groups of its own
SLOW = 0.001  # TFLOP/s, at which calls take much longer than their launches


def facts_of(found: Choices, devices: ClusterSpec) -> Facts:
    return Facts(found.graph, found.strategies, devices, "adamw")


def group_of(strategy: Strategy) -> str | None:
    return next((p.group for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)), None)


def of_step_s(found: Choices, devices: ClusterSpec, strategies: Mapping[str, Strategy], sizes: GroupSizes) -> float:
    """What the program of ``masses`` says of one program at these sizes."""
    facts = facts_of(found, devices)
    rate = masses._rate(facts)
    assert rate is not None
    program, n, where = masses._Program(facts, *rate), rate[0], [d.host for d in devices.devices]
    together = {}
    for group, atoms in sizes.items():
        on = Counter[str]()
        for host, many in zip(where, atoms, strict=True):
            on[host] += many
        together[group] = (max(on.values()) / sum(atoms) - 1 / n) / (1 - 1 / n)
    members: dict[int, list[str]] = {}
    for node in found.graph.nodes:
        members.setdefault(program.fine[node.name], []).append(node.name)
    for kind, names in members.items():
        taken = Counter[tuple[int, str]]()
        for name in names:
            option, group = found.strategies[name].index(strategies[name]), group_of(strategies[name])
            if group is None:
                taken[option, ANYWHERE] += 1
            else:
                taken[option, TOGETHER] += together[group]  # type: ignore[assignment]
                taken[option, SPREAD] += 1 - together[group]  # type: ignore[assignment]
        for variable, lies in zip(program.x[kind], program.where[names[0]], strict=True):
            part = taken[lies] / len(names)
            program._row("taken", part, part, [(variable, 1.0)])
    solved = program.solver.solve(masses.DUAL_STEPS)
    assert solved is not None and solved.is_optimal
    return solved.bound / MS


def ratio(found: Choices, devices: ClusterSpec, strategies: Mapping[str, Strategy], sizes: GroupSizes) -> float:
    step_s = evaluate(found.graph, strategies, sizes, devices).step_s
    return of_step_s(found, devices, strategies, sizes) / step_s


def fitting(found: Choices, name: str, made: Mapping[Value, object]) -> list[Strategy]:
    inputs = found.graph.by_name[name].inputs
    asked = [(s, zip(inputs, s.inputs, strict=True)) for s in found.strategies[name]]
    return [s for s, reads in asked if all(p != PARTIAL or made[v] == PARTIAL for v, p in reads)]


def on_hosts(found: Choices, devices: ClusterSpec, put: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Every group on one host."""
    return {
        name: round_shares([float(d.host == put[name]) for d in devices.devices], group.n)
        for name, group in found.groups.items()
    }


def inputs_turned(devices: ClusterSpec, found: Choices = LAYERS) -> tuple[dict[str, Strategy], GroupSizes]:
    """By samples on one host, but for inputs' gradients: these are summed over the other one, in the same time as
    weights' gradients."""
    facts = facts_of(found, devices)
    siblings = {c.call for c in find_companions(facts, find_chain(facts)).values() if c.is_sibling}
    strategies, batch = all_but(siblings, found)
    return strategies, on_hosts(found, devices, dict.fromkeys(found.groups, "h0") | {batch: "h1"})


def all_but(turned: Collection[str], found: Choices = LAYERS) -> tuple[dict[str, Strategy], str]:
    """Strategies by samples, but for these products, which are summed over what their inputs' columns are dealt out
    to; and the samples' group."""
    made = dict[Value, object]()
    batch = next(
        p.group for s in found.strategies["i_args_0"] for p in s.outputs if isinstance(p, Shard) and p.dim == 0
    )
    strategies = {}
    for node in found.graph.nodes:
        options = fitting(found, node.name, made)
        wanted = [s for s in options if group_of(s) == batch]
        if node.name in turned and node.op == "aten.mm.default":
            wanted = [s for s in options if group_of(s) not in (None, batch) and PARTIAL in s.outputs]
        strategies[node.name] = (wanted or options)[0]
        made |= {Value(node.name, i): p for i, p in enumerate(strategies[node.name].outputs)}
    return strategies, batch


def test_weights_gradients_stand_beside_inputs_gradients() -> None:
    graph = LAYERS.graph
    facts = facts_of(LAYERS, hosts((SLOW, 1), (SLOW, 1), network="1GB/s"))
    path = find_chain(facts)
    found = find_companions(facts, path)
    products = [n for n in graph.nodes if n.op == "aten.mm.default" and n.name not in path]
    assert len(products) == 2 and all(n.phase == "backward" for n in products)
    for node in products:
        one = found[node.name]
        assert one.is_sibling and one.closes and graph.by_name[one.call].op == "aten.mm.default"
        assert one.value in graph.by_name[one.call].inputs
        assert graph.by_name[one.reader].op == "aten.t.default" and one.reader != node.name
    assert not path & found.keys()


@pytest.mark.parametrize("network", ["1000GB/s", "10GB/s", "1GB/s", "100MB/s"])
@pytest.mark.parametrize("found", [LAYERS, DEEP], ids=["shared", "of every layer"])
def test_two_hosts_at_once_are_not_counted_twice(found: Choices, network: str) -> None:
    """Where the network is quick the bound is what the step takes; where it is slow, what crosses is paid for."""
    devices = hosts((SLOW, 1), (SLOW, 1), network=network)
    assert (found is LAYERS) == (found.groups.keys() <= masses.Doubled.of(facts_of(found, devices)).shared)
    assert 0.9 < ratio(found, devices, *inputs_turned(devices, found)) <= 1 + 1e-6


@pytest.mark.parametrize("wrong", ["never apart", "all paid for"])
@pytest.mark.parametrize("found", [LAYERS, DEEP], ids=["shared", "of every layer"])
def test_that_is_seen(found: Choices, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what may run beside other groups claimed in full, the bound is above what the step takes."""
    if wrong == "never apart":
        monkeypatch.setattr(masses, "_apart", lambda *_: iter(()))
    else:
        monkeypatch.setattr(
            masses._Program, "_paid_s", lambda self, facts, ours, parts, where: self._busiest_s(parts, where)
        )
    devices = hosts((SLOW, 1), (SLOW, 1), network="1000GB/s")
    assert ratio(found, devices, *inputs_turned(devices, found)) > 1.2


@pytest.mark.parametrize("networks", [["1GB/s"] * 3, ["10GB/s", "1GB/s", "1GB/s"]], ids=["alike", "not"])
def test_exchanges_take_what_the_slowest_way_lets_through(networks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that turns what it computes between rows and columns, dealt out evenly, after every call."""

    class Acts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.empty(4095))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.bias
            for act in (torch.relu, torch.tanh, torch.sigmoid, torch.neg):
                x = act(x)
            return x.square().mean()

    with torch.device("meta"):
        found = choices(capture(Acts(), torch.empty(4095, 4095), name="acts"))
    devices = hosts(*[(1000, 1)] * 3, network=networks)
    both, strategies = itertools.cycle(found.groups), dict[str, Strategy]()
    for node in found.graph.nodes:
        options, group = found.strategies[node.name], next(both)
        strategies[node.name] = next((s for s in options if group_of(s) == group), options[0])
    sizes = {name: round_shares([1.0] * 3, group.n) for name, group in found.groups.items()}
    assert 0.9 < ratio(found, devices, strategies, sizes) <= 1 + 1e-6
    monkeypatch.setattr(masses, "seconds_apart", lambda ports: tuple(1.1 * s for s in seconds_apart(ports)))
    assert ratio(found, devices, strategies, sizes) > 1.001


def test_without_them_less_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step all of which is done on one host, forward by columns and backward by samples."""
    devices = hosts(*[(SLOW, 1)] * 4, network="1GB/s")
    strategies, _ = all_but([n.name for n in LAYERS.graph.nodes if n.phase == "forward"])
    sizes = on_hosts(LAYERS, devices, dict.fromkeys(LAYERS.groups, "h0"))
    assert 0.9 < ratio(LAYERS, devices, strategies, sizes) <= 1 + 1e-6
    monkeypatch.setattr(masses, "find_companions", lambda *_: {})
    assert ratio(LAYERS, devices, strategies, sizes) < 0.8


def test_what_is_read_whole_may_be_followed_by_any_group() -> None:
    """All is done by every rank, but for two weights' gradients, on two hosts at once: no collective is between."""
    found, devices = experts(), hosts((SLOW, 1), (SLOW, 1), network="1000GB/s")
    graph, tried = found.graph, 0
    first, second = (graph.gradients[f"layers.{i}"].node for i in (2, 1))
    assert {first, second} <= find_companions(facts_of(found, devices), find_chain(facts_of(found, devices))).keys()
    for one, other in itertools.product(found.strategies[first], found.strategies[second]):
        groups, made = (group_of(one), group_of(other)), (one.outputs[0], other.outputs[0])
        if None in groups or groups[0] == groups[1] or PARTIAL in made:
            continue
        strategies = {name: options[0] for name, options in found.strategies.items()} | {first: one, second: other}
        for target, home in zip(("layers.2", "layers.1"), made, strict=True):
            name = next(n.name for n in graph.sources("parameter") if n.target == target)
            strategies[name] = next(s for s in found.strategies[name] if s.outputs[0] == home)
        put = dict.fromkeys(found.groups, "h0") | {groups[1] or "": "h1"}
        assert 0.99 < ratio(found, devices, strategies, on_hosts(found, devices, put)) <= 1 + 1e-6
        tried += 1
    assert tried >= 4


def turning() -> Choices:
    """Products over the last dim; the first two, which are alike, change places in the middle and with them what groups
    mean: a type of calls has their names by its own neighbourhood, a value's readers by a smaller one."""
    act = {"r": torch.relu, "t": torch.tanh, "n": torch.neg, "g": torch.sigmoid}

    class Turning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.empty(64))
            self.layers = torch.nn.ParameterList(torch.empty(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left = iter(self.layers)
            for step in "LtrLtrTnLtrLtg":
                if step == "L":
                    x = torch.addmm(self.bias, x.reshape(-1, 64), next(left)).view(x.shape)
                else:
                    x = x.transpose(0, 1) if step == "T" else act[step](x)
            return x.square().mean()

    with torch.device("meta"):
        return choices(capture(Turning(), torch.empty(64, 64, 64), name="turning"))


@pytest.mark.parametrize("names", ["of each", "of the first"])
def test_groups_that_change_places_have_the_names_of_each_value(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All goes by one group on one host, but for the inputs' gradient beside one weight's, which goes by another."""
    if names == "of the first":
        monkeypatch.setattr(masses._Program, "_named", lambda self, transport, *_: transport)
    found, devices = turning(), hosts((SLOW, 1), (SLOW, 1), network="1000GB/s")
    companions = find_companions(facts_of(found, devices), find_chain(facts_of(found, devices)))
    one, other = (name for name, group in found.groups.items() if group.label in ("batch", "args.0 dim 1"))
    ratios = []
    for (on, off), turned in itertools.product(((one, other), (other, one)), {c.call for c in companions.values()}):
        strategies, made = dict[str, Strategy](), dict[Value, object]()
        for node in found.graph.nodes:
            options = fitting(found, node.name, made)
            wanted = [s for s in options if group_of(s) == (off if node.name == turned else on)]
            strategies[node.name] = (wanted or options)[0]
            made |= {Value(node.name, i): p for i, p in enumerate(strategies[node.name].outputs)}
        put = dict.fromkeys(found.groups, "h0") | {off: "h1"}
        ratios.append(ratio(found, devices, strategies, on_hosts(found, devices, put)))
    assert max(ratios) > 1.05 if names == "of the first" else 0.99 < max(ratios) <= 1 + 1e-6


def test_a_measured_call_that_bends_is_below_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half of its share it takes nearly as long as whole: a line through its neighbours would be far above."""
    cluster, found = measured(0), mlp(batch=64, width=256)
    facts = facts_of(found, cluster)
    parts = [facts.parts(n.name, s) for n in found.graph.nodes if not n.is_source for s in found.strategies[n.name]]

    def curve(one: Parts) -> CallCurve:
        most = 1e-2 if one.op_class == "matmul" else 1e-5
        return CallCurve(shares=(0.25, 0.5, 1.0), seconds=(most, 1.9 * most, 2 * most), spread=0.0)

    curves = {one.call: curve(one) for one in parts}
    kinds = tuple(kind.model_copy(update={"calls": curves}) for kind in cluster.profile.kinds)
    ranks = tuple(rank.model_copy(update={"factor": 1.0}) for rank in cluster.profile.ranks)
    bending = cluster.profile.model_copy(update={"kinds": kinds, "ranks": ranks}).calibrate(PLAIN)
    for group in found.groups:
        strategies, made = dict[str, Strategy](), dict[Value, object]()
        for node in found.graph.nodes:
            options = fitting(found, node.name, made)
            strategies[node.name] = ([s for s in options if group_of(s) == group] or options)[0]
            made |= {Value(node.name, i): p for i, p in enumerate(strategies[node.name].outputs)}
        sizes = on_hosts(found, bending, dict.fromkeys(found.groups, bending.devices[0].host))
        assert 0.9 < ratio(found, bending, strategies, sizes) <= 1 + 1e-6
        monkeypatch.setattr(masses, "floor_line", parts_coefficients)
        assert ratio(found, bending, strategies, sizes) > 1.3
        monkeypatch.undo()


def climbed(seed: int, steps: int, models: Mapping[str, Choices]) -> float:
    """The nearest to its bound that a program comes by changes at random of strategies and sizes, which are kept if it
    comes nearer. It begins with companions of one group and the path of another, on different hosts."""
    rng = random.Random(seed)
    found = models[rng.choice(sorted(models))]
    networks = ["100MB/s", "1GB/s", "10GB/s", "100GB/s", "1000GB/s"]
    network = rng.choice(networks)
    many, speed = rng.choice([2, 2, 3, 4]), rng.choice([0.001, 0.01, 0.1])
    alike = rng.random() < 0.6
    kinds = [
        (speed if alike else speed * rng.choice([1, 1.3, 2]), 1 if alike else rng.choice([1, 2])) for _ in range(many)
    ]
    slower = rng.choice([network, rng.choice(networks)])
    devices = hosts(*kinds, network=[network, *(rng.choice([network, slower]) for _ in kinds[1:])])
    facts = facts_of(found, devices)
    if masses._rate(facts) is None:
        return 0.0
    companions = find_companions(facts, find_chain(facts))
    on, off = rng.sample(sorted(found.groups), 2)
    strategies, made = dict[str, Strategy](), dict[Value, object]()
    for node in found.graph.nodes:
        options = fitting(found, node.name, made)
        wanted = off if node.name in companions else on
        strategies[node.name] = rng.choice([s for s in options if group_of(s) == wanted] or options)
        made |= {Value(node.name, i): p for i, p in enumerate(strategies[node.name].outputs)}
    names = sorted({d.host for d in devices.devices})
    sizes = on_hosts(found, devices, {g: rng.choice(names) for g in found.groups} | {on: names[0], off: names[1]})
    nearest = ratio(found, devices, strategies, sizes)
    for _ in range(steps):
        other: dict[str, Any] = dict(strategies)
        dealt = dict(sizes)
        if rng.random() < 0.5:
            group, some = rng.choice(sorted(found.groups)), rng.sample(names, rng.choice([1, 1, 2]))
            shares = [rng.choice([1.0, 1.0, 0.5]) * (d.host in some) for d in devices.devices]
            dealt[group] = round_shares(shares, found.groups[group].n)
        else:
            for name in rng.choices(sorted(companions) if rng.random() < 0.5 else sorted(strategies), k=2):
                other[name] = rng.choice(found.strategies[name])
        if fits(found, other) and (now := ratio(found, devices, other, dealt)) >= nearest:
            strategies, sizes, nearest = other, dealt, now
    return nearest


def experts() -> Choices:
    """Products of many matrices at once, whose weights' gradients are made before their inputs'."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.empty(8, 32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.layers:
                x = torch.bmm(x, weight).relu()
            return x.square().mean()

    with torch.device("meta"):
        model, x = Experts(), torch.empty(8, 64, 32)
    return choices(capture(model, x, name="experts"))


def fits(found: Choices, strategies: Mapping[str, Strategy]) -> bool:
    made = {Value(n.name, i): p for n in found.graph.nodes for i, p in enumerate(strategies[n.name].outputs)}
    return all(strategies[n.name] in fitting(found, n.name, made) for n in found.graph.nodes)


@pytest.mark.parametrize(
    ("seed", "steps"), [(1, 12), *(pytest.param(n, 40, marks=pytest.mark.long) for n in range(40))]
)
def test_no_program_is_below_its_bound(seed: int, steps: int) -> None:
    models = {"layers": LAYERS, "mixer": mixer(16, 32, 64), "experts": experts(), "deep": DEEP}
    assert climbed(seed, steps, models) <= 1 + 1e-6


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_nor_is_one_with_attention(seed: int) -> None:
    assert climbed(seed, 30, {"gpt2": gpt2(layers=1, batch=16, length=64, width=64)}) <= 1 + 1e-6
