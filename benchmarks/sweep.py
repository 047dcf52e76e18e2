"""Runs a benchmark of one kernel: compares results, times every configuration and the
reference, and writes a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from device_time import bytes_per_us, device_time, simulated, where, write

from kvjax.kernels_pallas import tuned

L2_BYTES = 60e6
LEAST_GAIN = 0.03  # of an entry of tuned.json, over the kernel's rule


def repeats(moved: float) -> int:
    """How many sets of `moved` bytes a call must use in turn, so that L2 has nothing left from
    the call before.
    """
    return int(2 * L2_BYTES // moved) + 1


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The settings of a run: which configs it tries for each shape, and whether it keeps those
    that win.
    """

    most_configs: int | None = None  # that are tried; None: all
    # shapes that have been tuned, by their first inputs; None: no tuning
    settled: list[tuned.Asked] | None = None

    def __call__(
        self,
        name: str,
        kernel: Callable[[Any], Callable[..., Any]],
        reference: Callable[..., Any],
        args: Sequence[Any],
        *,
        configs: Iterable[Any],
        error: Callable[[Any, Any], float],
        most: float,
        moved: float,
        n: int = 1,
    ) -> dict[str, Any]:
        """Microseconds of one of the `n` operations that kernel(config)(*args) does, by config,
        the default's first.

        The default, kernel(None), is the entry of tuned.json for the shape, or else the
        kernel's rule. The rule comes second.

        Each config's output must be within `most` of the reference's by `error`. "kernel" is
        the kernel alone, "mosaic" with those of XLA around it.
        """
        configs, found = _asked(kernel, args, name, configs)
        want = jax.jit(reference)(*args)
        times: dict[Any, float] = {}
        row: dict[str, Any] = {}
        for config in configs[: self.most_configs]:
            f = kernel(config)
            off = error(jax.jit(f)(*args), want)
            if not off <= most:
                raise SystemExit(
                    f"{name} with {config}: error {off}, at most {most} is allowed"
                )
            total, kernels = device_time(f, *args, calls=10, starts=n)
            times[config] = (
                sum(us for kernel_name, us in kernels.items() if f"kvjax_{name}" in kernel_name)
                / n
            )
            if not times[config]:
                raise SystemExit(f"no kernel of {name} ran; these did: {', '.join(kernels)}")
            if not row:
                default = {
                    "config": label_of(config),
                    "kernel": times[config],
                    "mosaic": total / n,
                }
                row = {"error": f"{off:.1e}", **default}
        if self.settled is not None and found and len(times) > 1 and found not in self.settled:
            self.settled.append(found)
            tune(found, times)
        best = min(times, key=lambda config: times[config])
        row |= {"best_config": label_of(best), "best": times[best]}
        row |= {
            "xla": device_time(reference, *args, calls=3)[0] / n,
            "floor": moved / bytes_per_us(),
        }
        return row | {"all": {label_of(config): round(us, 2) for config, us in times.items()}}


def label_of(config: Any) -> str:
    """A config's numbers; "rule" for None, the kernel's own rule."""
    return "rule" if config is None else "x".join(str(x) for x in dataclasses.astuple(config))


def _asked(
    kernel: Callable[[Any], Callable[..., Any]],
    args: Sequence[Any],
    name: str,
    configs: Iterable[Any],
) -> tuple[list[Any], tuned.Asked | None]:
    """The configs to try, the default first, then the kernel's rule; and the kernel's request
    if it gets no config.
    """
    with tuned.asked() as all_asked:
        jax.eval_shape(lambda *args: kernel(None)(*args), *args)
    found = next((x for x in all_asked if x.kernel == name), None)
    return list(
        dict.fromkeys([*((found.config, found.rule) if found else ()), *configs])
    ), found


def tune(found: tuned.Asked, times: dict[Any, float]) -> None:
    """Writes the fastest config for the shape on its device to tuned.json, if it gains enough;
    an old entry of the shape is removed."""
    if found.device is None:
        raise SystemExit(
            "tuned.json has entries by kind of device, and this device's is not known"
        )
    best = min(times, key=lambda config: times[config])
    tuned.entries.cache_clear()  # another benchmark may have written to it
    devices = {device: dict(kernels) for device, kernels in tuned.entries(tuned.FILE).items()}
    kernels = devices.pop(found.device, {})
    kept = [entry for entry in kernels.pop(found.kernel, []) if entry["shape"] != found.shape]
    if times[best] <= (1 - LEAST_GAIN) * times[found.rule]:
        us = {"us": round(times[best], 2), "default_us": round(times[found.rule], 2)}
        made = {name: x for name, x in where().items() if name != "device"}
        kept.append({"shape": found.shape, "config": dataclasses.asdict(best), **us, **made})
    if kept:
        kernels[found.kernel] = kept
    if kernels:
        devices[found.device] = kernels
    tuned.FILE.write_text(_lines(devices) + "\n")
    tuned.entries.cache_clear()


def _lines(x: Any, depth: int = 0) -> str:
    """JSON with a line for each entry of each kernel of each device."""
    if depth == 3 or not x:
        return json.dumps(x)
    indent = "  " * depth
    if isinstance(x, list):
        parts, ends = [_lines(entry, depth + 1) for entry in x], "[]"
    else:
        parts, ends = (
            [f"{json.dumps(name)}: {_lines(x[name], depth + 1)}" for name in sorted(x)],
            "{}",
        )
    return (
        ends[0]
        + "\n"
        + ",\n".join(f"{indent}  {part}" for part in parts)
        + f"\n{indent}"
        + ends[1]
    )


def run(
    name: str,
    what: str,
    distribution: str,
    measure: Callable[..., dict[str, Any]],
    shapes: Iterable[Any],
    swept: int = 1,
    quick: Any = None,
) -> None:
    """Runs measure(Sweep(...), *shape) for each shape, prints a line each, and writes all to
    results/{name}.json. Every block size is tried for the first `swept` shapes. `--quick` runs
    the shape `quick` alone, if there is one."""
    parser = argparse.ArgumentParser(description=f"Device time of {name}, on a GPU.")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every block size for every shape, not only for the first ones",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="write block sizes that win by 3 % or more to kernels_pallas/tuned.json",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"default: results/{name}.json; with --quick nothing is written",
    )
    if quick is not None:
        parser.add_argument(
            "--quick", action="store_true", help="a small shape in the simulator, without a GPU"
        )
    given, rows = parser.parse_args(), []
    if quick is not None and given.quick:
        with simulated():
            print(measure(Sweep(2), *quick))
        return
    if jax.default_backend() != "gpu":
        parser.error("this measures a GPU")
    settled: list[tuned.Asked] | None = [] if given.tune else None
    for shape in shapes:
        most_configs = None if given.all or len(rows) < swept else 1
        rows.append(measure(Sweep(most_configs, settled), *shape))
        if len(rows) == 1:
            print(" | ".join(rows[0]))
        print(
            " | ".join(
                f"{x:.1f}" if isinstance(x, float) else str(x) for x in rows[-1].values()
            ),
            flush=True,
        )
        write(given.out.resolve() if given.out else f"{name}.json", what, distribution, rows)
