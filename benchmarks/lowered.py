"""Writes the lowered program of every preset's step, and compares two folders of them.

    python benchmarks/lowered.py write FOLDER [--tree DIR] [--platform cpu] [--only fier]
    python benchmarks/lowered.py compare BEFORE AFTER

A change that should not change what runs, such as a new layout or another name, leaves every
program equal. `write` lowers the programs of `PROGRAMS` for each cache of `CACHES`: nothing
runs, and no GPU is needed for `--platform cuda` (that needs jax >= 0.11, and it includes the
kernels). Each program becomes a file: StableHLO without locations, with names of functions and
of results removed. `digests.json` has two digests of each:

- "text": of the file.
- "graph": of what the results are computed from. Calls, and a `case` of one branch, are
  inlined, equal operations are one, and operations without an effect on the results are left
  out, as XLA does first. Equal graphs compile to the same program, up to the order of
  independent operations.

`compare` lists the programs whose graphs differ, then those that differ only in text; the exit
status is 1 if a graph differs or is missing. `diff BEFORE/cpu/NAME AFTER/cpu/NAME` shows what
changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"batch": 2, "q_heads": 8, "kv_heads": 2, "head_dim": 128, "capacity": 4096}
VOCABULARY = 64
CHUNK = 256  # tokens of a chunk of a prompt
STEPS = 8
WINDOW = 512  # of a sliding window

# A name, and text of a preset, or a function that makes policies with kvjax. Presets with dense
# first layers get none.
Make = Callable[[Any], Any]
CACHES: dict[str, str | Make] = {
    "full": "full",
    "fier": "fier",
    "fier per head": "fier:group_reduce=per_head",
    "fier page": "fier:page=16,local=64,sink=4",
    "fier host": "fier:store=host",
    "fier host float8": "fier:store=float8",
    "fier codes": "fier:store=turbo4",
    "turboquant": "turboquant",
    "evict": "evict:rule=keydiff",
    "fier hot": "fier:store=host+2048",
    "fier share": "fier:share=2",
    "fier share host": "fier:share=2,store=host",
    "pariskv": "pariskv:dense_below=0",
    "pariskv dense below": "pariskv",
    "pariskv per head": "pariskv:dense_below=0,group_reduce=per_head",
    "pariskv attend": "pariskv:dense_below=0,buffer=attend",
    "pariskv small codes": "pariskv:dense_below=0,subspace=4,radius_bits=4",
    "pariskv host": "pariskv:dense_below=0,store=host",
    "pariskv hot": "pariskv:dense_below=0,store=host+2048",
    "pariskv share": "pariskv:dense_below=0,share=2",
    "quest": "quest",
    "quest per head": "quest:group_reduce=per_head",
    "quest select": "quest:newest=select",
    "quest host": "quest:store=host",
    "quest hot": "quest:store=host+2048",
    "quest share": "quest:share=2",
    "freekv": "freekv",
    "freekv per head": "freekv:group_reduce=per_head,budget=1024",
    "freekv hot": "freekv:store=host+8192",
    "freekv centre": "freekv:summary=centre",
    "freekv share": "freekv:share=2",
    "freekv dense below": lambda kv: kv.Speculative(
        kv.Retrieval(selector=kv.Fier(), budget=256, dense_below=512), tau=0.9
    ),
    "arkvale": "arkvale",
    "magicpig": "magicpig",
    "magicpig host": "magicpig:store=host",
    "pqcache": "pqcache",
    "pqcache host": "pqcache:store=host",
    "shadowkv": "shadowkv",
    "shadowkv device": "shadowkv:host=false",
    "logquant": "logquant",
    "logquant sink": "logquant:sink=4,bits=4,key_axis=token",
    "kivi": "kivi",
    "kivi values": "kivi:value_window=64",
    "compressed host": lambda kv: kv.Compressed(
        store=kv.HostOffload(page=32), sink=4, local=24
    ),
    "quantised store": lambda kv: kv.Retrieval(
        selector=kv.Fier(), store=kv.Quantized(bits=4), budget=256
    ),
    "log sparse": lambda kv: kv.Retrieval(
        selector=kv.Fier(), demote=kv.LogSparse(window=64), local=64, budget=256
    ),
    "exact": "exact",
    "exact per head": "exact:group_reduce=per_head",
    "exact share": "exact:share=2",
    "streaming_llm": "streaming_llm",
    "streaming_llm rope": "streaming_llm:rope_theta=10000.0",
    "logevict": "logevict",
    "h2o": "h2o",
    "tova": "tova",
    "snapkv": "snapkv",
    "pyramidkv": "pyramidkv",
    "adakv": "adakv",
    "mikv": "mikv",
    "raas": "raas",
    "razorattention": lambda kv: kv.contrib.razorattention.Compensated(
        kv.Evicting(evictor=kv.Sliding(), budget=64)
    ),
    "duoattention": lambda kv: kv.PerHead(
        heads=(1,), selected=kv.Full(), others=kv.Evicting(evictor=kv.Sliding(), budget=64)
    ),
}


def layers_of(kv: Any, name: str) -> list[Any]:
    """The policies of the layers past the dense ones: one, or an anchor and a follower."""
    made = CACHES[name]
    policies = kv.presets.parse(made) if isinstance(made, str) else made(kv)
    if not isinstance(policies, kv.PerLayer):
        return [policies]
    first = sum(policy == kv.Full() for policy in policies.first)
    return [policies.policy(first + i) for i in range(2 if "share" in name else 1)]


def model_of(kv: Any) -> Any:
    """A model whose layers only attend: a token's row of `embedding` is query, key and value."""
    import jax
    import jax.numpy as jnp

    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, embedding: Any) -> None:
            self.embedding = embedding

        def tree_flatten(self) -> Any:
            return (self.embedding,), None

        @classmethod
        def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
            return cls(*leaves)

        def __call__(
            self, tokens: Any, cache: Any, *, steps: bool = False, **settings: Any
        ) -> Any:
            want_info, last = settings.pop("info", False), settings.pop("last_logits", False)
            by = {
                name: value for name, value in settings.items() if name in ("lengths", "active")
            }
            T, spec = tokens.shape[1], cache.spec
            if steps or T == 1:
                cache = kv.flush(cache)
            x = jnp.take(self.embedding, tokens, axis=0).reshape(
                *tokens.shape, spec.q_heads, spec.head_dim
            )
            attend, decodes = (
                (kv.decode_info, {"flush": False}) if steps else (kv.attention_info, {})
            )
            selection, after, infos = None, [], []
            for layer in cache.layers:
                k = x[:, :, : spec.kv_heads]
                out, layer, info = attend(layer, x, k, k, selection=selection, **decodes, **by)
                if info is not None and info.selection is not None:
                    selection = info.selection
                x, after, infos = x + out, [*after, layer], [*infos, info]
            x = x[:, -1:] if last else x
            logits = x.reshape(*x.shape[:2], -1).astype(jnp.float32) @ self.embedding.T.astype(
                jnp.float32
            )
            logits = logits[:, 0] if last else logits
            return (
                (logits, kv.Cache(tuple(after)), tuple(infos))
                if want_info
                else (logits, kv.Cache(tuple(after)))
            )

    spec = kv.CacheSpec(**SIZES)
    return Model(jax.ShapeDtypeStruct((VOCABULARY, spec.q_heads * spec.head_dim), jnp.bfloat16))


def programs(
    kv: Any, policies: Sequence[Any]
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """The name of each program, a function, and the shapes of its arguments."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from kvjax.memory import shapes

    spec = kv.CacheSpec(**SIZES)
    cache = shapes(lambda: kv.init(list(policies), spec, layers=len(policies)))
    B, sds = spec.batch, jax.ShapeDtypeStruct
    rows, flags, floats = sds((B,), jnp.int32), sds((B,), bool), partial(sds, dtype=jnp.float32)

    def tokens(T: int) -> Any:
        q, k = (
            sds((B, T, n, spec.head_dim), spec.dtype) for n in (spec.q_heads, spec.kv_heads)
        )
        return q, k, k

    def attend(
        verb: Callable[..., Any], cache: Any, q: Any, k: Any, v: Any, **settings: Any
    ) -> Any:
        selection, after, outs = None, [], []
        for layer in cache.layers:
            out, layer, info = verb(layer, q, k, v, selection=selection, **settings)
            selection = (
                info.selection if info is not None and info.selection is not None else selection
            )
            outs, after = [*outs, (out, info)], [*after, layer]
        return outs, kv.Cache(tuple(after))

    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        return attend(kv.attention_info, cache, q, k, v)

    def active(cache: Any, q: Any, k: Any, v: Any, active: Any) -> Any:
        return attend(kv.attention_info, cache, q, k, v, active=active, flush=False)

    def window(cache: Any, q: Any, k: Any, v: Any) -> Any:
        return attend(kv.attention_info, cache, q, k, v, window=WINDOW, flush=False)

    def steps(cache: Any, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return attend(kv.decode_info, cache, q, k, v, lengths=lengths)

    def prompt(cache: Any, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return attend(kv.attention_info, cache, q, k, v, lengths=lengths)

    one = shapes(
        lambda: kv.init(
            list(policies), dataclasses.replace(spec, batch=1), layers=len(policies)
        )
    )
    number = sds((), jnp.int32)
    yield "step", step, (cache, *tokens(1))
    yield "active", active, (cache, *tokens(1), flags)
    yield "window", window, (cache, *tokens(1))
    yield "steps", steps, (cache, *tokens(STEPS), rows)
    yield "prompt", prompt, (cache, *tokens(CHUNK), rows)
    yield "flush", kv.flush, (cache,)
    yield "insert", kv.insert, (cache, one, number)
    wanted = inspect.signature(
        _module("loops").decode_loop
    ).parameters  # earlier checkouts take others
    static = {
        name: value for name, value in (("room", 16), ("measure", True)) if name in wanted
    }
    operands = {
        "model": model_of(kv),
        "cache": cache,
        "logits": floats((B, VOCABULARY)),
        "active": flags,
    }
    operands |= {
        "mean": (floats((len(policies),)), floats(())),
        "keys": None,
        "draws": None,
        "first": number,
    }
    operands |= {
        "limit": number,
        "sampling": _module("sampling").Sampling(),
        "stop": sds((2,), jnp.int32),
    }
    if "inputs" in wanted:
        fields = _module("loops").LoopInputs._fields
        given = {name: operands[name] for name in fields if name in operands}
        operands["inputs"] = _module("loops").LoopInputs(**given)
    loop = partial(_module("loops").decode_loop.__wrapped__, **static)
    yield "loop", loop, tuple(operands[name] for name in wanted if name in operands)


def _module(name: str) -> Any:
    """A module of the decode loop, which earlier checkouts have elsewhere."""
    try:
        return importlib.import_module(f"kvjax.generation.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"kvjax.{name}")


# ------------------------------------------------------------------------------------------------------------- digests


def digest(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def text_of(module: Any) -> str:
    """The text of a module without locations and without names of functions and results."""
    text = module.operation.get_asm(enable_debug_info=False, large_elements_limit=None)
    text = re.sub(r"jax\.result_info = \"(?:[^\"\\]|\\.)*\",? ?", "", text)
    text = text.replace(" {}", "").replace("{, ", "{")
    text = re.sub(r"module @\S+", "module", text)
    text = re.sub(r"dense<\"0x[0-9A-F]{64,}\">", lambda m: f"dense<{digest(m[0])}>", text)
    names: dict[str, str] = {}
    return re.sub(r"@[\w.$-]+", lambda m: names.setdefault(m[0], f"@f{len(names)}"), text)


# Mosaic numbers the kernels of a process, in the order in which they are lowered, for the names of
# the files that it may dump them to.
NUMBERED = re.compile(r'mosaic_gpu\.dump_basename = "[^"]*"(, )?')


def shorten_kernels(module: Any) -> None:
    """Replaces the code of each kernel by a digest of it, without locations and numbers."""
    from jaxlib.mlir import ir

    # kernels are in a dialect that only their compiler knows
    module.context.allow_unregistered_dialects = True

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes:
            config = op.attributes["mhlo.backend_config"]
            parts = dict(_pairs(config))
            if "module" in parts:
                code = ir.Module.parse(config["module"].value_bytes).operation
                parts["module"] = NUMBERED.sub("", code.get_asm(enable_debug_info=False))
                del parts["kernel_hash"]  # of the code with its number
            op.attributes["mhlo.backend_config"] = ir.StringAttr.get(
                digest(*sorted(parts.items()))
            )
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


class Graph:
    """Digests of the results of a module's functions, by what they are computed from."""

    def __init__(self, module: Any) -> None:
        self.functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
        self.known: dict[Any, tuple[list[str], tuple[str, ...]]] = {}

    def main(self) -> str:
        main = self.functions["main"].attributes
        inputs = tuple(f"argument {i}" for i in range(len(main["arg_attrs"])))
        results, effects = self.call("main", inputs)
        return digest(main["arg_attrs"], main["function_type"], *results, *effects)

    def call(self, name: str, operands: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        if (name, operands) not in self.known:
            block = self.functions[name].regions[0].blocks[0]
            self.known[name, operands] = self.block(
                block, dict(zip(block.arguments, operands, strict=True))
            )
        return self.known[name, operands]

    def block(self, block: Any, values: dict[Any, str]) -> tuple[list[str], tuple[str, ...]]:
        """Digests of what the block's last operation returns, and of its operations with side
        effects, in order.
        """
        effects: list[str] = []
        for op in block.operations:
            operands = tuple(values[x] for x in op.operands)
            kind = op.operation.name
            if kind in ("stablehlo.return", "func.return"):
                return list(operands), tuple(effects)
            if kind in ("func.call", "call"):
                results, inside = self.call(op.attributes["callee"].value, operands)
                effects += inside
                values.update(zip(op.results, results, strict=True))
                continue
            if (
                kind == "stablehlo.case" and len(op.regions) == 1
            ):  # of several platforms, the one it is lowered for
                results, inside = self.block(op.regions[0].blocks[0], dict(values))
                effects += inside
                values.update(zip(op.results, results, strict=True))
                continue
            attributes = dict(_pairs(op.attributes))
            config = "\n".join(f"{name}={value}" for name, value in sorted(attributes.items()))
            bodies = []
            for region in op.regions:
                for inner in region.blocks:
                    own = {
                        a: digest("inner", kind, i, a.type)
                        for i, a in enumerate(inner.arguments)
                    }
                    results, inside = self.block(inner, values | own)
                    bodies.append(digest(*results, "effects", *inside))
            whole = digest(
                kind, config, *operands, "bodies", *bodies, *(r.type for r in op.results)
            )
            if attributes.get("has_side_effect") == "true":
                effects.append(whole)
            values.update((r, f"{whole} {i}") for i, r in enumerate(op.results))
        return [], tuple(effects)


def _pairs(attributes: Any) -> Iterator[tuple[str, str]]:
    """Names and values; jaxlib 0.11 iterates over names, earlier ones over both."""
    for one in attributes:
        yield (one, str(attributes[one])) if isinstance(one, str) else (one.name, str(one.attr))


# ------------------------------------------------------------------------------------------------------------ commands


def use_tree(tree: Path) -> Any:
    """kvjax of a checkout."""
    tree = tree.resolve()
    sys.path.insert(0, str(tree))
    import kvjax

    kvjax.__path__.append(
        str(tree)
    )  # the kernels of a checkout are outside the package, and another may be installed
    for module in (kvjax, importlib.import_module("kvjax.kernels_pallas")):
        if not Path(str(module.__file__)).is_relative_to(tree):
            raise ImportError(f"{module.__name__} is that of {module.__file__}, not of {tree}")
    return kvjax


def write(folder: Path, tree: Path, platform: str, only: str) -> None:
    import jax

    kv = use_tree(tree)
    folder = folder / platform
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digests.json"
    digests: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in CACHES:
        if not re.search(only, name):
            continue
        for part, f, args in programs(kv, layers_of(kv, name)):
            key = f"{name.replace(' ', '_')}.{part}"
            try:
                lowered = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,))
                module = lowered.compiler_ir("stablehlo")
                with module.context:
                    shorten_kernels(module)
                    text, graph = text_of(module), Graph(module).main()
            except (
                ValueError,
                NotImplementedError,
            ) as error:  # a policy without this program says so
                text = graph = f"{type(error).__name__}: {error}\n"
            except Exception:
                traceback.print_exc()
                raise SystemExit(f"{key} failed") from None
            (folder / key).write_text(text)
            digests[key] = {"text": digest(text), "graph": digest(graph)}
        jax.clear_caches()
        path.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")
        print(name, flush=True)


def compare(before: Path, after: Path) -> bool:
    """Prints what differs, and returns True if no graph does."""
    equal = True
    platforms = sorted(path.parent.name for path in before.glob("*/digests.json"))
    if not platforms:
        wrote = before.parent if (before / "digests.json").exists() else "the folder"
        raise SystemExit(
            f"{before} has no programs: no folder in it has a digests.json; give {wrote} that `write` was given"
        )
    for platform in platforms:
        if not (after / platform / "digests.json").exists():
            print(f"{platform}: not in {after}")
            equal = False
            continue
        old, new = (
            json.loads((root / platform / "digests.json").read_text())
            for root in (before, after)
        )
        both = sorted(old.keys() & new.keys())
        differ = [key for key in both if old[key]["graph"] != new[key]["graph"]]
        reordered = [
            key for key in both if old[key]["text"] != new[key]["text"] and key not in differ
        ]
        for what, keys in (
            ("differs", differ),
            ("missing", sorted(old.keys() - new.keys())),
            ("new", sorted(new.keys() - old.keys())),
            ("another text of an equal graph", reordered),
        ):
            for key in keys:
                print(f"{platform} {key}: {what}")
        print(
            f"{platform}: {len(both) - len(differ)} of {len(old)} programs have equal graphs, ",
            end="",
        )
        print(f"{len(both) - len(differ) - len(reordered)} equal texts")
        equal &= not differ and old.keys() <= new.keys()
    return equal


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument(
        "--tree", type=Path, default=ROOT, help="a checkout; default: this one"
    )
    writing.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    writing.add_argument("--only", default="", help="a regular expression of names of caches")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(args)
    if given.verb == "write":
        write(given.folder, given.tree, given.platform, given.only)
    elif not compare(given.before, given.after):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
