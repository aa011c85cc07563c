"""Models drawn at random: calls of PyTorch, one after another, on what earlier ones made.

``Model(seed)`` takes ``batch(seed)`` and returns a loss. Weights may be shared, some are of no use, and some results
are read by nobody. ``compare(seed)`` runs a step of it by plans drawn at random, with calls computed again, by the
planner's own, after all passes, and dealt to hosts, beside one device in float64.

    python -m tests.zoo.drawn 0 1000
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo_models.case import Case
from hap.capture import interpret, source_values
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.errors import HapError, PlanError
from hap.order import program_parts
from hap.plan import Plan, Recomputed
from hap.rules.choices import Choices
from hap.runtime.lockstep import run_lockstep
from hap.search.planner import plan_graph
from tests._support.plans import make_plan, random_sizes, random_strategies
from tests.zoo.hosts import hosts_error
from tests.zoo.lockstep import possible

SAMPLES, LENGTH, WIDTH, WORDS = 6, 4, 4, 7
LARGEST = 3000  # elements
TOLERANCE, TINY = 1e-8, 1e-4  # beside a gradient's largest element, or the second: terms of one may add up to nothing

T = torch.Tensor
ELEMENTWISE: dict[str, Callable[[T], T]] = {
    **{f.__name__: f for f in (torch.tanh, torch.sin, torch.exp, torch.erf, torch.atan, torch.abs, torch.square)},
    **{f.__name__: f for f in (F.gelu, F.silu, F.relu, F.elu, F.mish, F.softplus, F.hardswish, F.leaky_relu)},
    "over": lambda x: 1 / (1.5 + x.tanh()),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "root": lambda x: torch.sqrt(x.square() + 1),
    "sign": lambda x: torch.sign(x) * x,
    "cube": lambda x: x.pow(3),
    "bucketize": lambda x: x + torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5], dtype=x.dtype)).to(x.dtype),
    "fill": lambda x: x.masked_fill(x > 0.3, 0.1),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.flip(0) * 1.0),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x * 2)).sum(-1),
    "centered": lambda x: x - x.mean() + x.std(),
    "by norm": lambda x: x / (x.norm() + 1),
    "by sign": lambda x: _of_kinds(x, (x > 0).long(), (torch.sin, lambda y: (y + 0.5).sqrt() / (y + 0.1))),
}
PAIRS: dict[str, Callable[[T, T], T]] = {
    **{f.__name__: f for f in (torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, torch.logaddexp)},
    "divide": lambda a, b: a / (2 + b.tanh()),
    "larger": lambda a, b: torch.where(a > b, a, b * 2),
    "where": lambda a, b: torch.where(b > 0, a, 0.0),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
}
ALONG: dict[str, Callable[[T, int, int, int], T]] = {  # dim, its size, a place in it
    "sum": lambda x, d, n, k: x.sum(d),
    "mean": lambda x, d, n, k: x.mean(d, keepdim=True),
    "amax": lambda x, d, n, k: x.amax(d),
    "max": lambda x, d, n, k: x.max(d, keepdim=True).values,
    "median": lambda x, d, n, k: x.median(d).values,
    "kthvalue": lambda x, d, n, k: x.kthvalue(1 + k, d).values,
    "logsumexp": lambda x, d, n, k: x.logsumexp(d),
    "prod": lambda x, d, n, k: (x.tanh() + 1.5).prod(d),
    "var": lambda x, d, n, k: x.var(d, correction=0),
    "vector_norm": lambda x, d, n, k: torch.linalg.vector_norm(x + 2, dim=d),
    "cosine": lambda x, d, n, k: F.cosine_similarity(x, x.flip(d) + 1, dim=d),
    "softmax": lambda x, d, n, k: x.softmax(d),
    "entropy": lambda x, d, n, k: x.softmax(d).mul(x.log_softmax(d)).sum(d),
    "normalize": lambda x, d, n, k: F.normalize(x + 1, dim=d),
    "cumsum": lambda x, d, n, k: x.cumsum(d),
    "cumprod": lambda x, d, n, k: torch.cumprod(x.tanh() + 1.5, d),
    "cummax": lambda x, d, n, k: x.cummax(d).values,
    "logcumsumexp": lambda x, d, n, k: x.logcumsumexp(d),
    "flip": lambda x, d, n, k: x.flip(d),
    "roll": lambda x, d, n, k: x.roll(k, d),
    "sort": lambda x, d, n, k: x.sort(d).values,
    "topk": lambda x, d, n, k: x.topk(1 + k, d).values,
    "gather": lambda x, d, n, k: x.gather(d, x.argsort(d, descending=True)),
    "diff": lambda x, d, n, k: x.diff(dim=d),
    "repeat_interleave": lambda x, d, n, k: x.repeat_interleave(2, d),
    "index_select": lambda x, d, n, k: x.index_select(d, torch.tensor([0, n - 1, k])),
    "scatter_add": lambda x, d, n, k: torch.zeros_like(x).scatter_add(d, x.argsort(d), x),
    "index_add": lambda x, d, n, k: x.index_add(d, torch.tensor([k, 0]), x.index_select(d, torch.tensor([k, k]))),
    "index_fill": lambda x, d, n, k: x.index_fill(d, torch.tensor([k]), 0.5),
    "spectrum": lambda x, d, n, k: torch.fft.irfft(torch.fft.rfft(x, dim=d) * 2, n=n, dim=d),
    "select": lambda x, d, n, k: x.select(d, k),
    "unbind": lambda x, d, n, k: torch.stack([t * (i + 1) for i, t in enumerate(x.unbind(d))], d),
    "narrow": lambda x, d, n, k: x.narrow(d, k, n - k),
    "split": lambda x, d, n, k: torch.cat(x.split((k, n - k), d)[::-1], d),
    "chunk": lambda x, d, n, k: x.chunk(2, d)[-1],
    "glu": lambda x, d, n, k: F.glu(torch.cat([x, x * 2], d), d),
    "weights by place": lambda x, d, n, k: x * torch.linspace(0, 1, n).view(-1, *[1] * (x.dim() - d - 1)),
    "doubled there": lambda x, d, n, k: _written(x, lambda y: y.select(d, k).mul_(2)),
    "added to": lambda x, d, n, k: _written(x, lambda y: y.narrow(d, 0, k + 1).add_(1.5)).tanh_(),
    "copied to": lambda x, d, n, k: _written(x, lambda y: y.select(d, 0).copy_(x.select(d, k) * 3)),
}
SHAPES: dict[str, Callable[[T], T]] = {
    "flat": lambda x: x.reshape(-1),
    "rows": lambda x: x.reshape(x.shape[0], -1),
    "first two": lambda x: x.flatten(0, 1),
    "otherwise": lambda x: x.reshape(x.shape[::-1]),
    "turned": lambda x: x.movedim(0, -1),
    "turned and together": lambda x: x.movedim(0, -1).contiguous(),
    "mT": lambda x: x.mT,
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]),
    "pairs": lambda x: x.unflatten(-1, (x.shape[-1] // 2, 2)),
    "padded": lambda x: F.pad(x, (1, 2)),
    "circular": lambda x: F.pad(x, (1, 1), mode="circular"),
    "triu": lambda x: x.triu(1),
    "rot90": lambda x: x.rot90(1, (0, 1)),
    "windows": lambda x: x.unfold(-1, 2, 1),
    "every other": lambda x: x[..., ::2],
    "pooled": lambda x: F.max_pool1d(x, 2, 1),
    "averaged": lambda x: F.adaptive_avg_pool1d(x, 3),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "distances": lambda x: torch.cdist(x, x.flip(-1) + 0.1),
    "instance_norm": F.instance_norm,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}
WEIGHED: dict[str, tuple[Callable[[torch.Size], Sequence[int]], Callable[[T, T], T]]] = {  # a weight's shape; the call
    "linear": (lambda s: (5, s[-1]), F.linear),
    "einsum": (lambda s: (3, s[-1]), lambda x, w: torch.einsum("...i,oi->...o", x, w)),
    "tensordot": (lambda s: (s[-1], 2), lambda x, w: torch.tensordot(x, w, dims=1)),
    "vector": (lambda s: (s[-1],), lambda x, w: x @ w),
    "scaled": (lambda s: (s[-1],), lambda x, w: x * w.exp()),
    "shifted": (lambda s: (s[-1],), lambda x, w: x + w.softmax(0)),
    "prelu": (lambda s: (1,), F.prelu),
    "detached": (lambda s: (1,), lambda x, w: x.detach() * w),
    "layer_norm": (lambda s: (s[-1],), lambda x, w: F.layer_norm(x, w.shape, w)),
    "rms_norm": (lambda s: (s[-1],), lambda x, w: F.rms_norm(x, w.shape, w)),
    "group_norm": (lambda s: (s[1],), lambda x, w: F.group_norm(x, 1, w)),
    "conv1d": (lambda s: (3, s[1], 2), lambda x, w: F.conv1d(x, w, padding=1)),
    "depthwise": (lambda s: (s[1], 1, 2), lambda x, w: F.conv1d(x, w, padding=1, groups=len(w))),
    "transposed": (lambda s: (s[1], 2, 2), F.conv_transpose1d),
    "addmm": (lambda s: (s[-1], s[-1]), lambda x, w: torch.addmm(x, x, w)),
    "computed again": (
        lambda s: (s[-1], s[-1]),
        lambda x, w: checkpoint(lambda y: (y @ w).tanh(), x, use_reentrant=False),
    ),
    "experts": (lambda s: (3, s[-1], s[-1]), lambda x, w: _by_experts(x, w, 2)),
    "the best expert": (lambda s: (3, s[-1], s[-1]), lambda x, w: _by_experts(x, w, 1)),
    "concatenated": (lambda s: (2,), lambda x, w: torch.cat([x, w.expand(*x.shape[:-1], -1)], -1)),
}
WITH_WORDS: dict[str, Callable[[T, T, T], T]] = {  # words, which of them count, a table
    "embedding": lambda words, counts, table: F.embedding(words, table),
    "indexed": lambda words, counts, table: table[words] * counts[..., None],
    "one_hot": lambda words, counts, table: F.one_hot(words, WORDS).to(table.dtype) @ table,
    "mean of those": lambda words, counts, table: (
        (F.embedding(words, table) * counts[..., None]).sum(1) / counts.sum(1, keepdim=True).clamp(min=1)
    ),
}


def _of_kinds(x: T, kinds: T, functions: Sequence[Callable[[T], T]]) -> T:
    """Of what is of each kind its function."""
    if not x.dim():
        raise ValueError("a number has no parts")
    made = x.clone()
    for kind, function in enumerate(functions):
        made[kinds == kind] = function(made[kinds == kind])
    return made


def _by_experts(x: T, experts: T, each: int) -> T:
    """Rows by as many of the experts, which are matrices."""
    rows = x.reshape(-1, x.shape[-1])
    weight, ids = (rows @ experts.sum(2).t()).softmax(-1).topk(each, dim=-1)
    made = torch.zeros_like(rows)
    for expert in range(len(experts)):
        row, nth = torch.where(ids == expert)
        made[row] += (rows[row] @ experts[expert]).tanh() * weight[row, nth, None]
    return made.reshape(x.shape)


def _written(x: T, write: Callable[[T], Any]) -> T:
    made = x.clone()
    write(made)
    return made


def batch(seed: int) -> tuple[T, T, T, T]:
    """Two tensors, words, and which of them count."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=g, dtype=torch.float64)
    z = torch.randn(SAMPLES, WIDTH, generator=g, dtype=torch.float64)
    return x, z, torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=g), torch.rand(SAMPLES, LENGTH, generator=g) > 0.4


class Model(nn.Module):
    """``calls``: of each what it is called, what it reads, by place, the number of its weight, and the function."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList([self._weight((5, WIDTH)), self._weight((3, WIDTH))])
        self.calls: list[tuple[str, tuple[int, ...], int | None, Callable[..., T]]] = []
        made, count = self._first(*batch(seed)), self.rng.randint(6, 24)
        while len(self.calls) < count:
            self._draw(made)
        self.results = (len(made) - 1, *self.rng.sample(range(4, len(made)), 2))

    def forward(self, x: T, z: T, words: T, counts: T) -> T:
        made = self._first(x, z, words, counts)
        for call in self.calls:
            made.append(self._made(call, made))
        last, *others = (made[place] for place in self.results)
        return last.square().mean() + sum(t.sin().sum() for t in others) / 10

    def _first(self, x: T, z: T, words: T, counts: T) -> list[T]:
        return [words, counts, F.linear(x, self.weights[0]), F.linear(z, self.weights[1])]

    def _weight(self, shape: Sequence[int]) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=self.generator, dtype=torch.float64) * 0.6)

    def _made(self, call: tuple[str, tuple[int, ...], int | None, Callable[..., T]], made: Sequence[T]) -> T:
        _, read, weight, function = call
        found = function(*(made[place] for place in read), *(() if weight is None else (self.weights[weight],)))
        return found

    def _draw(self, made: list[T]) -> None:
        """One more call, if one of that kind can be."""
        kind = self.rng.choices((ELEMENTWISE, PAIRS, ALONG, SHAPES, WEIGHED, WITH_WORDS), (3, 6, 10, 5, 8, 1))[0]
        name = self.rng.choice(list(kind))
        function: Any = kind[name]
        at = self.rng.randrange(max(2, len(made) - 4), len(made)) if self.rng.random() < 0.6 else self._any(made)
        read: tuple[int, ...] = (at,)
        shape, before, weight = made[at].shape, len(self.weights), None
        try:
            if kind is PAIRS:
                read = (at, self._any(made))
            elif kind is ALONG:
                dim = self.rng.randrange(len(shape))
                place = self.rng.randrange(shape[dim])
                function = _at(function, dim, shape[dim], place)
            elif kind is WITH_WORDS:
                read, weight = (0, 1), self._weight_for((WORDS, 3))
            elif kind is WEIGHED:
                weight, function = self._weight_for(function[0](shape)), function[1]
            call = (name, read, weight, function)
            found = self._made(call, made).detach()
        except (RuntimeError, ValueError, IndexError, TypeError):
            found = torch.empty(0)
        if 0 < found.numel() <= LARGEST and found.dim() < 5 and bool(found.isfinite().all()):
            if found.abs().max() > 4:
                call = (f"{name}, tanh", read, weight, _bounded(function))
                found = found.tanh()
            self.calls.append(call)
            made.append(found)
        else:
            self.weights = self.weights[:before]

    def _any(self, made: Sequence[T]) -> int:
        return self.rng.randrange(2, len(made))

    def _weight_for(self, shape: Sequence[int]) -> int:
        """One that is there already, at times."""
        known = [i for i, w in enumerate(self.weights) if w.shape == tuple(shape)]
        if known and self.rng.random() < 0.4:
            return self.rng.choice(known)
        self.weights.append(self._weight(shape))
        return len(self.weights) - 1

    def __str__(self) -> str:
        lines = (f"{4 + i}: {name} of {read}, {weight}" for i, (name, read, weight, _) in enumerate(self.calls))
        return "\n".join((*lines, f"loss of {self.results}"))


def _at(function: Callable[[T, int, int, int], T], dim: int, size: int, place: int) -> Callable[[T], T]:
    return lambda x: function(x, dim, size, place)


def _bounded(function: Callable[..., T]) -> Callable[..., T]:
    return lambda *given: function(*given).tanh()


def compare(seed: int) -> str | None:
    """None where all is as on one device; what is not, in words. HapError for what is refused."""
    model, rng = Model(seed), random.Random(seed)
    case = Case(model, batch(seed), lambda loss: loss, ())
    found = possible(case)
    graph = found.graph
    values = source_values(graph, model, case.inputs, (), seed=seed)
    expected = interpret(graph, values)
    plans = (*(_drawn(found, rng) for _ in range(3)), plan_graph(found, _cluster(rng), effort="quick"))
    for number, plan in enumerate(plans):
        passes = standard_passes(limit_bytes=rng.choice([100, 1000, 1 << 20]))
        step = run_lockstep(run_passes(lower(graph, plan), passes).program, values)
        pairs = {name: (step.gradients[name], expected[value]) for name, value in graph.gradients.items()}
        for name, (mine, one) in {**pairs, "the loss": (step.loss, expected[graph.loss])}.items():
            if not float((mine - one).abs().max()) <= TOLERANCE * max(float(one.abs().max()), TINY):
                return f"by plan {number} {name} is not one device's"
    dealt = _dealt_to_hosts(case)
    if dealt is not None and not dealt[0] <= TOLERANCE:
        return f"dealt to hosts: {dealt[1]} is {dealt[0]} off"
    return None


def _dealt_to_hosts(case: Case) -> tuple[float, str] | None:
    """The worst error and where it is; None where hosts cannot run a part of the batch each, or would all do all."""
    try:
        return hosts_error(case, (3, 1, 2))
    except PlanError:
        return None
    except AssertionError as e:
        if "runs whole on every host" in str(e):
            return None
        raise


def _drawn(found: Choices, rng: random.Random) -> Plan:
    forward = [node.name for node in program_parts(found.graph)[1]]
    again = tuple(rng.sample(forward, rng.randint(0, len(forward)))) if rng.random() < 0.6 else ()
    ranks = rng.randint(1, 4)
    return make_plan(
        found,
        random_strategies(found, rng),
        random_sizes(found, ranks, rng),
        world_size=ranks,
        regather=rng.random() < 0.4,
        recomputed=(Recomputed(block="drawn", what="all", calls=again),) if again else (),
    )


def _cluster(rng: random.Random) -> ClusterSpec:
    hosts = [
        {
            "name": f"h{h}",
            "devices": [
                {
                    "name": f"d{h}",
                    "count": rng.randint(1, 2),
                    "tflops": {"float64": rng.choice([0.0005, 0.002, 0.01]), "float32": 0.01},
                    "memory": "1GB",
                    "memory_bandwidth": rng.choice(["50MB/s", "5GB/s"]),
                }
            ],
            "link": {"bandwidth": rng.choice(["10MB/s", "1GB/s"]), "latency": rng.choice(["1us", "20us"])},
            "network": {"bandwidth": rng.choice(["20Mbit/s", "1Gbit/s"]), "latency": rng.choice(["1us", "50us"])},
        }
        for h in range(rng.randint(1, 2))
    ]
    return ClusterSpec.model_validate({"name": "drawn", "hosts": hosts})


def main(first: int, last: int) -> None:
    for seed in range(first, last):
        try:
            said = compare(seed)
        except HapError as e:
            print(f"seed {seed}: refused: {e}", flush=True)
            continue
        print(f"seed {seed}: {'alike' if said is None else said}", flush=True)
        if said is not None:
            print(Model(seed))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
