"""`python -m exdyna_jax plan`: does it pay, before anything runs."""

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from exdyna_jax._plan import Plan, plan

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class _Parser(argparse.ArgumentParser):
    """Complains in one line, with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def main(arguments: list[str] | None = None) -> None:
    parser = _Parser(prog="python -m exdyna_jax", description="Gradient sparsification for JAX.")
    planner = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser).add_parser(
        "plan",
        help="bytes and time of an exchange against the dense all-reduce",
        description="Bytes and time of an exchange, dense, with Top-k, gTop-k and ExDyna, and whether it pays.",
    )
    planner.add_argument("--params", type=_number, required=True, help="parameters of the model, such as 25.6e6")
    planner.add_argument("--density", type=_number, required=True, help="share of them to send, such as 1e-3")
    planner.add_argument("--workers", type=int, required=True, help="that take part")
    planner.add_argument("--workers-per-host", type=int, default=1, help="that share a link (default: 1)")
    planner.add_argument(
        "--bandwidth", type=_bandwidth, default=1e9, help="of a host's link, in bit/s: 1e9, 100Mbit, 10Gbit/s (default: 1e9)"
    )
    planner.add_argument("--latency", type=_latency, default=50e-6, help="of a message, in seconds: 50e-6, 50us, 0.1ms (default: 50e-6)")
    planner.add_argument("--capacity-factor", type=_number, default=1.5, help="of the buffers, as for exdyna (default: 1.5)")
    planner.add_argument(
        "--selection",
        type=_selection,
        help="milliseconds of a worker's own work for a million elements: 2, or dense=1,top_k=12,gtop_k=12,exdyna=2 (default: measured)",
    )
    planner.add_argument("--json", type=_file, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(arguments)
    asked = functools.partial(
        plan,
        args.params,
        args.density,
        args.workers,
        workers_per_host=args.workers_per_host,
        bandwidth=args.bandwidth,
        latency=args.latency,
        capacity_factor=args.capacity_factor,
    )
    try:
        if args.selection is None:
            asked(selection=1.0)  # complains before anything is measured
            print("measuring a worker's own work on this machine (--selection says it instead) ...", file=sys.stderr, flush=True)
        found = asked(selection=args.selection)
        if args.json:
            args.json.write_text(json.dumps(figures(found), indent=2, allow_nan=False) + "\n")
    except (ValueError, OSError) as error:
        planner.error(str(error))
    except KeyboardInterrupt:
        planner.exit(130, f"{planner.prog}: interrupted\n")
    print(found)


def figures(found: Plan) -> dict[str, Any]:
    """For JSON, which knows no infinity: a break-even bandwidth of null is none at all, 0 that it never pays."""
    costs = {name: cost._asdict() | {"seconds": cost.seconds} for name, cost in found.costs.items()}
    bandwidth = found.break_even_bandwidth
    bounded = {"costs": costs, "break_even_bandwidth": bandwidth if math.isfinite(bandwidth) else None}
    return found._asdict() | bounded | {"hosts": found.hosts, "pays": found.pays, "verdict": found.verdict}


def _reader(what: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """For `type=`: turns a failure into a line that says what was expected."""

    def wrap(read: Callable[[str], Any]) -> Callable[[str], Any]:
        def reading(text: str) -> Any:
            try:
                return read(text)
            except (ValueError, AttributeError, KeyError) as error:
                raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from error

        return reading

    return wrap


@_reader("a number, such as 1e6")
def _number(text: str) -> float:
    return float(text)


@_reader("a rate in bit/s, such as 1e9, 100Mbit or 10Gbit/s")
def _bandwidth(text: str) -> float:
    number, prefix = _match(r"([-+.\deE]*\d\.?) *([kmgtKMGT]?)(?:bit/s|bits/s|bit|bps|b/s)?", text)  # no B: that would be bytes
    return float(number) * _PREFIXES[prefix.lower()]


@_reader("a time in seconds, such as 50e-6, 50us or 0.1ms")
def _latency(text: str) -> float:
    number, unit = _match(r"([-+.\deE]*\d\.?) *(s|ms|us|ns|)", text)
    return float(number) * _SECONDS[unit]


@_reader("milliseconds for a million elements, such as 2, or dense=1,top_k=12,gtop_k=12,exdyna=2")
def _selection(text: str) -> float | dict[str, float]:
    if "=" not in text:
        return float(text)
    pairs = [part.split("=") for part in text.split(",")]
    return {name.strip(): float(ms) for name, ms in pairs}


def _match(pattern: str, text: str) -> tuple[Any, ...]:
    found = re.fullmatch(pattern, text.strip())
    if found is None:
        raise ValueError
    return found.groups()


def _file(text: str) -> Path:
    """A path that can be written; found out before anything is measured. Leaves no file behind if there was none."""
    path = Path(text)
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write {text!r}: {error.strerror}") from error
    if not existed:
        path.unlink()
    return path


if __name__ == "__main__":
    main()
