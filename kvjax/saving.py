"""Caches on disk: a conversation that goes on after a restart, a prefix that is read once and continued many times.

A cache is saved by orbax-checkpoint together with a description of what made it: the format, and every field of each
layer's policy and spec. Restoring takes a cache of the wanted kind (`like`: made by `kvjax.init`, which also says on
which devices and in which memory the arrays shall lie), and refuses a save that was made by anything else, naming
each difference, for arrays of the right shapes may still mean something else.

A directory holds numbered saves. A save is written beside the last one and takes its name when it is complete, so one
that is cut off leaves the last good one readable.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from kvjax.attention import Cache, LayerCache, init_layer
from kvjax.memory import shapes

FORMAT = 1  # of states; a change of what a state's fields mean makes it one more


def save(directory: str | Path, cache: Cache | LayerCache, *, keep: int = 1) -> int:
    """Saves `cache` and returns the number of the save. The newest `keep` complete saves stay.

    Reads the arrays from the device and waits until all is on disk.
    """
    if keep < 1:
        raise ValueError(f"save(keep=...) must be at least 1, got {keep}")
    path = Path(directory).absolute()
    with _manager(path, keep=keep) as manager:
        step = -1 if manager.latest_step() is None else int(manager.latest_step())
        leaves = dict(_named(cache))
        manager.save(
            step + 1,
            args=ocp.args.Composite(arrays=ocp.args.StandardSave(leaves), about=ocp.args.JsonSave(describe(cache))),
        )
        manager.wait_until_finished()
    return step + 1


def restore(directory: str | Path, like: Cache | LayerCache) -> Any:
    """The newest complete save, as a cache of the kind of `like`, on its devices and in its memory.

    `like` may be a cache of arrays, or one of shapes, as `jax.eval_shape` of `kvjax.init` makes: what has no sharding
    goes to the default device, and to host memory where `kvjax.init` would put it there.

    Raises:
      FileNotFoundError: the directory has no complete save.
      ValueError: the save is of another format, policy, spec or shape; the message lists every difference.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; kvjax.save makes one")
    with _manager(path, keep=None) as manager:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"{path} holds no complete save of a cache; kvjax.save makes one")
        saved = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        different = differences(saved, describe(like))
        if different:
            raise ValueError(
                f"the save in {path} was made by another kind of cache; make `like` as it was, or save anew: "
                + "; ".join(different)
            )
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)
            for (name, leaf), home in zip(_named(like), _homes(like), strict=True)
        }
        found = manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted)))["arrays"]
    leaves = [jax.device_put(found[name], wanted[name].sharding) for name, _ in _named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def describe(cache: Cache | LayerCache) -> dict[str, Any]:
    """What made a cache, as JSON: format, the policy and spec of each layer, shape and dtype of each array."""
    layers = cache.layers if isinstance(cache, Cache) else (cache,)
    return {
        "format": FORMAT,
        "layers": [{"policy": _plain(layer.policy), "spec": _plain(layer.spec)} for layer in layers],
        "arrays": {name: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for name, leaf in _named(cache)},
    }


def differences(saved: Any, wanted: Any, where: str = "") -> list[str]:
    """Every place at which two descriptions differ, as text.

    >>> differences({"a": {"budget": 64}, "b": 1}, {"a": {"budget": 128}, "b": 1})
    ['a.budget is 64 in the save, 128 wanted']
    """
    if isinstance(saved, dict) and isinstance(wanted, dict):
        names = dict.fromkeys((*saved, *wanted))
        parts = [
            differences(saved.get(n, "absent"), wanted.get(n, "absent"), f"{where}.{n}" if where else n) for n in names
        ]
        return [line for part in parts for line in part]
    if isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        return [
            line
            for i, (a, b) in enumerate(zip(saved, wanted, strict=True))
            for line in differences(a, b, f"{where}[{i}]")
        ]
    if isinstance(saved, list) and isinstance(wanted, list):
        return [f"{where} has {len(saved)} entries in the save, {len(wanted)} wanted"]
    return [] if saved == wanted else [f"{where} is {saved} in the save, {wanted} wanted"]


def _plain(value: Any) -> Any:
    """A frozen dataclass as a dict that begins with its name; all else as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__qualname__, **fields}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _named(cache: Any) -> list[tuple[str, Any]]:
    """The arrays by their path."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(cache)]


def _homes(cache: Cache | LayerCache) -> list[Any]:
    """The sharding of each array; of one that has none, that which `kvjax.init` would give it."""
    layers = cache.layers if isinstance(cache, Cache) else (cache,)
    found = []
    for layer in layers:
        given = [leaf.sharding for leaf in jax.tree.leaves(layer)]
        if None in given:
            new = jax.tree.leaves(shapes(partial(init_layer, layer.policy, layer.spec)))
            given = [theirs or ours.sharding for theirs, ours in zip(given, new, strict=True)]
        found += given
    return found


def _manager(path: Path, keep: int | None) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
    return ocp.CheckpointManager(path, options=options, item_names=("arrays", "about"))
