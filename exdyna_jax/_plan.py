"""Whether it pays, before anything runs: bytes and time of an exchange, for a model, a cluster and a density."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from exdyna_jax._checks import check_capacity, check_params
from exdyna_jax._dense import dense
from exdyna_jax._density import make_density, slots, tiers
from exdyna_jax._exchange import announce_bytes, compare_bytes, dense_bytes, gather_bytes, reduce_bytes, share_bytes
from exdyna_jax._exdyna import exdyna
from exdyna_jax._gtop_k import gtop_k, swaps
from exdyna_jax._layout import Layout, make_layout
from exdyna_jax._top_k import top_k

_MOST_WORKERS = 1_000_000  # each is looked at
METHODS = ("dense", "top_k", "gtop_k", "exdyna", "exdyna bfloat16")


def transfer_seconds(link_bytes: float, rounds: int, bandwidth: float, latency: float) -> float:
    r"""The cost model: :math:`r \alpha + 8 b / B`.

    Args:
      link_bytes: b, that leave a host over its link in an exchange.
      rounds: r, messages that wait for each other on their way over links.
      bandwidth: B of a host's link, in bit/s, in each direction at once.
      latency: :math:`\alpha`, seconds from one host's program to another's for a message without content.

    Links inside a host count as free. A ring passes through the hosts one by one, so that of each host only one worker sends over the link,
    and what one worker sends is what the link carries. A number that goes t times around it, once for an all-gather and twice for an
    all-reduce, but for the last hop of each turn, meets :math:`t H - \lfloor t / w \rfloor` links between H hosts of w workers: for w = 1
    the familiar :math:`t (n - 1)`. Where workers talk in pairs, or each to each, it is one round, and all that have a partner on another
    host share the link.
    """
    return rounds * latency + 8 * link_bytes / bandwidth


class Cost(NamedTuple):
    """Of one method, for one exchange."""

    elements: float  # different ones that the update gets; for Top-k the union, if the workers' gradients are independent
    bytes_sent: float  # by one worker, as in `metrics`
    link_bytes: float  # that leave a host over its link
    rounds: int  # messages over links that wait for each other
    transfer_seconds: float
    selection_seconds: float  # of a worker's own work: error feedback, selection, writing the update

    @property
    def seconds(self) -> float:
        return self.transfer_seconds + self.selection_seconds


class Plan(NamedTuple):
    """What `plan` found. Prints as a table, and a sentence."""

    size: int  # N, elements of the gradient that are sparsified
    density: float  # d
    k: int  # elements that are asked for
    num_workers: int  # n
    workers_per_host: int
    bandwidth: float  # bit/s
    latency: float  # s
    selection: dict[str, float]  # ms of a worker's own work for a million elements, by method
    costs: dict[str, Cost]  # by method: dense, top_k, gtop_k, exdyna, "exdyna bfloat16"
    break_even_density: float | None  # up to which exdyna is faster than dense; None: at no density
    break_even_bandwidth: float  # bit/s, below which exdyna is faster than dense; inf: at any, 0: it sends no less

    @property
    def hosts(self) -> int:
        return self.num_workers // self.workers_per_host

    @property
    def pays(self) -> bool:
        """Whether an exchange takes less time with exdyna than the dense all-reduce, and something crosses a link at all."""
        return self.hosts > 1 and self.costs["exdyna"].seconds < self.costs["dense"].seconds

    @property
    def verdict(self) -> str:
        """In a sentence, or two."""
        if self.num_workers == 1:
            return "It does not pay: a single worker exchanges nothing."
        if self.hosts == 1:
            return f"It does not pay: all {self.num_workers} workers are on one host, and nothing crosses a link. Average densely."
        ours, theirs = self.costs["exdyna"].seconds, self.costs["dense"].seconds
        times = f"an exchange takes {_ms(ours)} ms with exdyna and {_ms(theirs)} ms dense"
        where = []
        if self.break_even_density is not None:
            where.append(f"up to density {self.break_even_density:.2g}")
        if 0 < self.break_even_bandwidth < math.inf:
            where.append(f"on links slower than {_bits(self.break_even_bandwidth)}")
        if self.pays:
            return f"It pays: {times}, {theirs / ours:.3g} times less. It does {' and '.join(where)}."
        would = f"would {', or '.join(where)}" if where else "would at no density, and on no link"
        return f"It does not pay: {times}. It {would}."

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("method", "elements", "MB sent", "MB on link", "rounds", "transfer ms", "selection ms", "ms", "of dense")
        ]
        whole = self.costs["dense"].seconds
        for name, cost in self.costs.items():
            sizes = f"{cost.elements:,.0f}", f"{cost.bytes_sent / 1e6:,.3f}", f"{cost.link_bytes / 1e6:,.3f}", f"{cost.rounds}"
            times = (_ms(seconds) for seconds in (cost.transfer_seconds, cost.selection_seconds, cost.seconds))
            rows.append((name, *sizes, *times, f"{cost.seconds / whole:.3g}" if whole else "-"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, *others = widths
        lines = [
            f"{self.size:,} elements, density {self.density:g} (k = {self.k:,}), {self.num_workers} workers on {self.hosts} "
            f"host{'s' * (self.hosts > 1)}, {_bits(self.bandwidth)} a link, {self.latency * 1e6:g} us a message",
            "",
            *("  ".join([row[0].ljust(first), *(x.rjust(w) for x, w in zip(row[1:], others, strict=True))]) for row in rows),
            "",
            self.verdict,
        ]
        return "\n".join(lines)


def plan(
    params: Any,
    density: float,
    num_workers: int,
    *,
    workers_per_host: int = 1,
    bandwidth: float = 1e9,
    latency: float = 50e-6,
    min_size: int = 0,
    capacity_factor: float = 1.5,
    selection: Mapping[str, float] | float | None = None,
) -> Plan:
    r"""Says what an exchange would cost: dense, with Top-k, gTop-k, and ExDyna with values of 32 and of 16 bits.

    Bytes are those of this library's buffers, padding and counts included: the figures that `metrics` would show. Time is

    .. math:: T = \frac{c N}{10^9} + r \alpha + \frac{8 b}{B}

    with c the milliseconds of a worker's own work for a million elements, and the r messages and b bytes over a host's link of the cost
    model, `transfer_seconds`, whose docstring says how they are counted. Computing and exchanging are taken to follow each other.

    Top-k's workers select k elements each. If their gradients are independent, :math:`N (1 - (1 - k/N)^n)` different ones come together:
    the build-up. Its buffers hold :math:`n k` in any case.

    Args:
      params: the parameters, arrays or shapes, or how many there are (then float32, as one leaf).
      density: d, as for `exdyna_jax.exdyna`; of a schedule, one value.
      num_workers: n.
      workers_per_host: that share a link; hosts are all alike.
      bandwidth: of the link, in bit/s: 1e9 is Gigabit Ethernet.
      latency: seconds for a message without content, program to program: about 50e-6 on Ethernet, more where processes share cores.
      min_size, capacity_factor: as for `exdyna_jax.exdyna`.
      selection: milliseconds of a worker's own work for a million elements, by method ("dense", "top_k", "gtop_k", "exdyna"; what is not
        named costs nothing), or one number for every method but dense. None measures them here, which takes some ten seconds, by one
        worker on its own that looks at the whole gradient: for ExDyna an upper bound. Where workers share a processor, measure them
        together.

    Returns:
      A `Plan`, a named tuple with `costs` by method, `break_even_density` and `break_even_bandwidth` of ExDyna (float32) against dense,
      `pays`, and `verdict`, a sentence. `print` it for a table.

    Raises:
      ValueError: for arguments out of range, workers that don't fill their hosts, or a model too large for int32 indices.

    Example:
      >>> import exdyna_jax
      >>> found = exdyna_jax.plan(25.6e6, 1e-3, 16, bandwidth=1e9, selection={"dense": 2, "top_k": 12, "gtop_k": 12, "exdyna": 2})
      >>> print(found.verdict)
      It pays: ...
      >>> round(found.costs["dense"].bytes_sent), round(found.costs["exdyna"].bytes_sent)
      (192000000, ...)
    """
    check_capacity(capacity_factor)
    cluster = _cluster(num_workers, workers_per_host)
    _check_positive("bandwidth", bandwidth, "bit/s, such as 1e9")
    if not _is_number(latency) or not 0 <= latency < math.inf:
        raise ValueError(f"latency={latency!r} is not a number of seconds, such as 50e-6.")
    if not (isinstance(min_size, int) and not isinstance(min_size, bool)) or min_size < 0:
        raise ValueError(f"min_size={min_size!r} is not a number of elements: leaves with fewer go dense, 0 sparsifies all.")
    if callable(density) or isinstance(density, jax.Array):
        raise ValueError(f"density={density!r} is not a number: plan with single values of a schedule.")
    asked = make_density(density, None)
    tree = _tree(params)
    below = math.inf if asked.most == 1 else min_size
    layouts = {wire: make_layout(tree, None, below, wire) for wire in (None, jnp.bfloat16)}
    layout = layouts[None]
    riding = sum(leaf.size for leaf in layout.dense)
    elements = layout.size + riding
    if not elements:
        raise ValueError("params have no floating-point elements, hence no gradient to exchange: give the model's parameters, or a count.")
    k = tiers(asked, layout.size)[0] if layout.size else elements
    work = _selection(selection, elements, asked.most)

    def cost(method: str, k: int, layout: Layout) -> Cost:
        traffic = _traffic(method, k, layout, cluster, capacity_factor)
        if method == "dense" or not layout.size:
            exchanged: float = elements
        else:
            exchanged = riding + (_union(k, layout.size, num_workers) if method == "top_k" else k)
        seconds = transfer_seconds(traffic.link_bytes, traffic.rounds, bandwidth, latency)
        return Cost(exchanged, *traffic, seconds, work[method.split()[0]] * elements / 1e9)

    costs = {method: cost(method, k, layouts[jnp.bfloat16 if "bfloat16" in method else None]) for method in METHODS}
    whole = costs["dense"]
    sparse = make_layout(tree, None, min_size, None)
    return Plan(
        size=layout.size or elements,
        density=asked.most,
        k=k,
        num_workers=num_workers,
        workers_per_host=workers_per_host,
        bandwidth=float(bandwidth),
        latency=float(latency),
        selection=work,
        costs=costs,
        break_even_density=_break_even_density(lambda k: cost("exdyna", k, sparse).seconds < whole.seconds, sparse.size, cluster),
        break_even_bandwidth=_break_even_bandwidth(costs["exdyna"], whole, latency, cluster),
    )


def _break_even_density(faster: Callable[[int], bool], size: int, cluster: "_Cluster") -> float | None:
    """The highest density k / N at which it is faster; more elements never take less time."""
    if cluster.hosts == 1 or not size or not faster(1):
        return None
    low, high = 1, size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low / size


def _break_even_bandwidth(ours: Cost, theirs: Cost, latency: float, cluster: "_Cluster") -> float:
    """Where what it saves on the link takes as long as what it costs besides."""
    saved = 8 * (theirs.link_bytes - ours.link_bytes)
    spent = ours.selection_seconds - theirs.selection_seconds + (ours.rounds - theirs.rounds) * latency
    if cluster.hosts == 1 or saved <= 0:
        return 0.0
    return saved / spent if spent > 0 else math.inf


def _union(k: int, size: int, n: int) -> float:
    """Different ones that n workers are expected to select, k of N each, independently."""
    return size * (1 - (1 - k / size) ** n)


class _Traffic(NamedTuple):
    """Of one exchange; as in `Cost`."""

    bytes_sent: float
    link_bytes: float
    rounds: int


def _together(*parts: _Traffic) -> _Traffic:
    sent, link, rounds = zip(*parts, strict=True)
    return _Traffic(sum(sent), sum(link), sum(rounds))


class _Cluster(NamedTuple):
    """n workers, host by host."""

    n: int
    per_host: int

    @property
    def hosts(self) -> int:
        return self.n // self.per_host

    def ring(self, sent: float, turns: int) -> _Traffic:
        """Each worker sends to the next one only; once around for a gather, twice for a sum."""
        if self.hosts == 1:
            return _Traffic(sent, 0, 0)
        return _Traffic(sent, sent, turns * self.hosts - turns // self.per_host)

    def everyone(self, share: float) -> _Traffic:
        """Each worker sends a share to each other one, all at once."""
        return _Traffic((self.n - 1) * share, self.per_host * (self.n - self.per_host) * share, min(self.hosts - 1, 1))

    def swap(self, sent: float, partners: list[int]) -> _Traffic:
        """Each worker sends to its partner."""
        out = [0] * self.hosts
        for worker, partner in enumerate(partners):
            out[worker // self.per_host] += worker // self.per_host != partner // self.per_host
        return _Traffic(sent, max(out) * sent, min(max(out), 1))


def _traffic(method: str, k: int, layout: Layout, cluster: _Cluster, capacity_factor: float) -> _Traffic:
    """What a method sends to exchange k elements."""
    n, span = cluster.n, layout.span
    if method == "dense":
        return cluster.ring(dense_bytes(layout, n), 2)
    if not layout.leaves:  # as the spine does it
        return _together(cluster.ring(compare_bytes(n), 1), _reduced(0, 0, layout, cluster))
    if method == "gtop_k":
        merged = (cluster.swap(*swap) for swap in swaps(k, layout.dtype, n))
        return _together(*merged, cluster.ring(announce_bytes(k, n), 2), _reduced(k, 0, layout, cluster))
    if method == "top_k":
        return _together(cluster.ring(gather_bytes(k, span, n), 1), _reduced(min(n * k, span), 0, layout, cluster))
    capacity = slots(k, n, capacity_factor, span)
    return _together(cluster.ring(gather_bytes(capacity, span, n), 1), _reduced(n * capacity, 1, layout, cluster))


def _reduced(values: int, scalars: int, layout: Layout, cluster: _Cluster) -> _Traffic:
    """Sums of values, scalars and dense leaves: all around the ring, or by way of the owners of the rounded values."""
    sent = reduce_bytes(values, scalars, layout, cluster.n)
    if layout.wire is None:
        return cluster.ring(sent, 2)
    owners = cluster.everyone(share_bytes(values, cluster.n))
    results = cluster.ring(sent - owners.bytes_sent, 1)
    return _together(owners, results, cluster.ring(0, 2)) if layout.dense else _together(owners, results)


_MEASURED = 4_000_000  # elements at most: beyond the caches, and time grows in proportion
_REPEATS = 8


@functools.cache
def measure_selection(size: int, density: float) -> dict[str, float]:
    """Milliseconds that a worker's own work takes for a million elements, by method: whole updates, without an exchange.

    The methods take turns, and of each the least time counts, since whatever else runs here only adds to it.
    """
    gradient = jax.random.normal(jax.random.key(0), (min(size, _MEASURED),))
    methods = {"dense": dense(None), "top_k": top_k(density, None), "gtop_k": gtop_k(density, None), "exdyna": exdyna(density, None)}
    steps = {name: jax.jit(tx.update, donate_argnums=1) for name, tx in methods.items()}
    states = {name: tx.init(gradient) for name, tx in methods.items()}
    least = dict.fromkeys(methods, math.inf)
    for turn in range(_REPEATS + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            update, states[name] = step(gradient, states[name])
            jax.block_until_ready((update, states[name]))
            if turn:  # the first compiles
                least[name] = min(least[name], time.perf_counter() - start)
    return {name: seconds * 1e9 / gradient.size for name, seconds in least.items()}


def _selection(given: Mapping[str, float] | float | None, size: int, density: float) -> dict[str, float]:
    names = ("dense", "top_k", "gtop_k", "exdyna")
    if given is None:
        return dict(measure_selection(size, density))
    costs = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names[1:], given)
    for name, ms in costs.items():
        if name not in names:
            raise ValueError(f"selection={given!r} names {name!r}, which is none of {', '.join(names)}.")
        if not _is_number(ms) or not 0 <= ms < math.inf:
            raise ValueError(f"selection={given!r}: {ms!r} is not a number of milliseconds for a million elements, such as 2.0.")
    return {name: float(costs.get(name, 0)) for name in names}


def _tree(params: Any) -> Any:
    """A tree of shapes, of parameters or of a count of them."""
    if isinstance(params, Real):
        count = float(params)
        if isinstance(params, bool) or not 0 < count < math.inf or not count.is_integer():
            raise ValueError(f"params={params!r} is not a positive whole number of parameters, such as 25.6e6, nor a tree of arrays.")
        return jax.ShapeDtypeStruct((int(count),), jnp.float32)
    check_params(params)
    return params


def _cluster(num_workers: Any, workers_per_host: Any) -> _Cluster:
    for name, value in (("num_workers", num_workers), ("workers_per_host", workers_per_host)):
        if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= _MOST_WORKERS:
            raise ValueError(f"{name}={value!r} is not an int from 1 to {_MOST_WORKERS:,}.")
    if num_workers % workers_per_host:
        raise ValueError(
            f"num_workers={num_workers} don't fill hosts of workers_per_host={workers_per_host}: all hosts are taken to be alike."
        )
    return _Cluster(int(num_workers), int(workers_per_host))


def _check_positive(name: str, value: Any, such_as: str) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} is not a positive number of {such_as}.")


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _ms(seconds: float) -> str:
    """Milliseconds, to three digits."""
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _bits(rate: float) -> str:
    """A rate in a unit that people read."""
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if rate >= unit:
            return f"{rate / unit:.3g} {name}"
    return f"{rate:.3g} bit/s"
