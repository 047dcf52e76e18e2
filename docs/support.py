"""Writes docs/support.md: which method takes which feature, found by trying each: `python -m
docs.support`.

Everything is traced at a small size on abstract values, so no program is compiled; a refusal is
an error of tracing or construction, as a user would meet it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import kvjax
from docs import tables
from docs.pictures import small
from kvjax import models, ops
from kvjax.presets import REGISTRY, Preset

MODELS = {
    "gemma2": "Gemma 2; a step selects in plain JAX, as kernels that select take no `soft_cap`",
    "gemma3_text": "Gemma 3, its text (`gemma3` too)",
    "gpt_oss": "gpt-oss, in bf16 or MXFP4, which is expanded while loading",
    "lfm2": "LFM2; its short convolutions keep a state of fixed size",
    "llama": "Llama 1, 2 and 3",
    "mistral": "Mistral and Mistral Small 3, its text (`mistral3` too)",
    "mixtral": "Mixtral",
    "phi3": "Phi-3 and Phi-4-mini",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5-MoE, its text (`qwen3_5_moe` too); its gated delta nets keep a state",
    "qwen3_5_text": "Qwen3.5, its text (`qwen3_5` too); its gated delta nets keep a state",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next; its gated delta nets keep a state",
    "smollm3": "SmolLM3",
}
PAGE = Path(__file__).parent / "support.md"
SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=32, capacity=128, dtype="float32"
)


def tokens(count: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((2, count, heads, 32), jnp.float32) for heads in (4, 2, 2))


def prompt(policy: Any, **settings: Any) -> Any:
    return kvjax.attention(kvjax.init_layer(policy, SPEC), *tokens(40), **settings)[1]


def step(policy: Any, **settings: Any) -> Any:
    return kvjax.attention(prompt(policy), *tokens(1), **settings)


def chunks(policy: Any) -> Any:
    return kvjax.attention(prompt(policy), *tokens(16))


def ragged(policy: Any) -> Any:
    cache = prompt(policy, lengths=jnp.array([40, 7]))
    return kvjax.attention(cache, *tokens(1), active=jnp.array([True, False]))


def window(policy: Any) -> Any:
    return kvjax.attention(prompt(policy, window=32), *tokens(1), window=32)


def several(policy: Any) -> Any:
    return kvjax.decode(prompt(policy), *tokens(4))


def rollback(policy: Any) -> Any:
    return kvjax.rollback(several(policy)[1], jnp.array([40, 41]))


def truncate(policy: Any) -> Any:
    return kvjax.truncate(prompt(policy), jnp.array([20, 0]))


def gradient(policy: Any) -> Any:
    def loss(q: jax.Array) -> jax.Array:
        _, k, v = tokens(1)
        return kvjax.attention(prompt(policy), q, k, v)[0].sum()

    return jax.grad(loss)(tokens(1)[0])


def gradient_of_tokens(policy: Any) -> Any:
    """By keys and values of a prompt, which a gradient through a model needs."""

    def loss(k: jax.Array, v: jax.Array) -> jax.Array:
        cache = kvjax.init_layer(policy, SPEC)
        return kvjax.attention(cache, tokens(40)[0], k, v)[0].sum()

    return jax.grad(loss, argnums=(0, 1))(*tokens(40)[1:])


def vmap(policy: Any) -> Any:
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), prompt(policy))
    return jax.vmap(lambda cache: kvjax.attention(cache, *tokens(1)))(stacked)


def grow(policy: Any) -> Any:
    return kvjax.grow(prompt(policy), 256)


def insert(policy: Any) -> Any:
    one = kvjax.init_layer(policy, dataclasses.replace(SPEC, batch=1))
    return kvjax.insert(prompt(policy), one, 1)


TRACED: dict[str, Callable[[Any], Any]] = {
    "ragged rows": ragged,
    "prompt in chunks": chunks,
    "sliding window": window,
    "several tokens a step": several,
    "`rollback`": rollback,
    "`truncate`": truncate,
    "`insert`": insert,
    "`grow`": grow,
    "`grad` by q": gradient,
    "`grad` by k, v": gradient_of_tokens,
    "`vmap`": vmap,
}
SETTINGS = {"store": "store", "shared selections": "share", "dense layers": "dense_layers"}


def tried(feature: Callable[[Any], Any], policy: Any) -> str:
    """An empty string, or why the policy refuses."""
    try:
        jax.eval_shape(partial(feature, policy))
    except (ValueError, TypeError, NotImplementedError) as error:
        return in_short(str(error))
    return ""


def in_short(message: str) -> str:
    """The message, with policies and their parts by their names alone: Evicting(budget=26)
    becomes Evicting.
    """
    message, settings = " ".join(message.split()), 1
    while settings:
        message, settings = re.subn(r"(?<=\w)\([^()]*\)", "", message)
    return message


def operations(policy: Any) -> list[str]:
    """Names of the operations of a decode step for which there is a kernel."""
    cache = jax.eval_shape(partial(prompt, policy))
    with ops.explained() as found:
        jax.eval_shape(kvjax.attention, cache, *tokens(1))
    return list(dict.fromkeys(call.op for call in found))


SIZED = ("full", "fier", "quest", "pariskv", "exact", "logquant", "kivi", "fier:store=turbo4")
SIZES: dict[str, dict[str, int]] = {
    f"heads of {size}": {"head_dim": size} for size in (64, 80, 96, 128, 192, 256)
}
SIZES |= {"values of 64": {"value_dim": 64}} | {
    f"groups of {n}": {"group": n} for n in (1, 8, 12, 16)
}


def limits(
    name: str, group: int = 4, head_dim: int = 128, value_dim: int | None = None
) -> dict[str, str]:
    """The operations of a step whose kernels do not take a size, and why; or why the method
    does not.
    """
    spec = kvjax.CacheSpec(
        batch=1,
        q_heads=2 * group,
        kv_heads=2,
        head_dim=head_dim,
        value_dim=value_dim,
        capacity=32768,
        dtype="bfloat16",
    )
    missing: dict[str, str] = {}
    inside = False
    call: Any = ops.Op.__call__

    def told(op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if not inside:  # what a kernel replaces does not matter
            if why := op.unsupported(*args, **kwargs):
                missing[f"`{op.name}`"] = (
                    why.removeprefix("the kernel ")
                    .removeprefix(f"{op.name} ")
                    .split(";")[0]
                    .split(",")[0]
                )
            inside = why is None
            try:
                return call(op, *args, **kwargs)
            finally:
                inside = False
        return call(op, *args, **kwargs)

    def run() -> Any:
        heads = ((2 * group, head_dim), (2, head_dim), (2, spec.value_size))
        qkv = [jnp.zeros((1, 1, *one), jnp.bfloat16) for one in heads]
        return kvjax.attention(
            kvjax.init_layer(kvjax.presets.parse(name).policy(31), spec), *qkv
        )

    with mock.patch.object(ops.Op, "__call__", told):
        try:
            jax.eval_shape(run)
        except (ValueError, NotImplementedError) as error:
            return {"the method": in_short(str(error)).split(";")[0]}
    return missing


def sizes() -> str:
    """Which operations run as kernels by size, and why others do not."""
    rows, why = [], dict[tuple[str, str], list[str]]()
    for name in SIZED:
        found = {label: limits(name, **size) for label, size in SIZES.items()}
        rows.append([f"`{name}`", *(", ".join(each) or "✓" for each in found.values())])
        for label, each in found.items():
            for reason in each.items():
                where = why.setdefault(reason, [])
                where += [] if label in where else [label]
    reasons = [[op, ", ".join(where), reason] for (op, reason), where in sorted(why.items())]
    return f"""{table(["method", *SIZES], rows)}
{table(["operation", "sizes", "its kernel"], reasons)}"""


def table(header: list[str], rows: list[list[str]]) -> str:
    return "".join(
        f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows)
    )


def page() -> str:
    presets: list[Preset] = list(REGISTRY.values())
    policies = {preset.name: small(preset) for preset in presets}
    rows: list[list[str]] = []
    why: dict[tuple[str, str], list[str]] = {}
    for preset in presets:
        cells = [f"[`{preset.name}`](methods.md#{preset.name})"]
        for name, feature in TRACED.items():
            refusal = tried(feature, policies[preset.name])
            cells.append("–" if refusal else "✓")
            if refusal:
                why.setdefault((name, refusal), []).append(f"`{preset.name}`")
        takes = preset.settings
        rows.append(cells + ["✓" if setting in takes else "" for setting in SETTINGS.values()])
    kernels = [
        [f"`{name}`", ", ".join(f"`{op}`" for op in operations(policy)) or "none"]
        for name, policy in policies.items()
    ]
    order = list(TRACED)
    refusals = [
        [name, ", ".join(methods), message]
        for (name, message), methods in sorted(
            why.items(), key=lambda item: order.index(item[0][0])
        )
    ]
    families = [[f"`{name}`", MODELS[name]] for name in sorted(models.FAMILIES)]
    missing = [
        [f"`{name}`", models.weights.MISSING[name]] for name in sorted(models.weights.MISSING)
    ]
    return f"""# Support matrix

`python -m docs.support` writes this page: it tries each feature on each method. Methods run on every platform of JAX,
but none has run on a TPU or on one of AMD's GPUs: tests lower each preset's step and prompt for both, and the TPU
compiler has compiled [some](#tpus). The kernels need an NVIDIA GPU of [these](#gpus) and jax 0.11 or later. Elsewhere
plain JAX does the same work, or on any GPU attends to all where an H100 does so faster ([how
fast](performance.md#the-same-in-plain-jax)). An export with kernels is for CUDA alone: make one for each platform.

## Versions

- `jax 0.10.2` with `Python 3.11`: all tests, in plain JAX.
- `jax 0.11.2` with `Python 3.12`: all tests. Kernels run in a simulator, are compiled for each of [these
  GPUs](#gpus), and were measured on two of them.
- The newest jax, `0.12.0.1` when this was written, with `Python 3.12`: a part of the tests. Programs are
  compiled for GPUs and TPUs.

`Python 3.13` runs a part of the tests. `constraints.txt` pins the versions of the first two.

## Methods and features

{table(["method", *TRACED, *SETTINGS], rows)}
– is refused with an error. A blank means that the preset has no such setting. Under `vmap` a history in
host memory takes one token a step.

## What is refused, and why

Each row is the error that the call raises:

{table(["feature", "methods", "error"], refusals)}
## Kernels of a decode step

Operations of a step that have a GPU kernel, with the sizes of this run. `kvjax.ops.explained` says which run
for your sizes and device, and why others do not.

{table(["method", "operations"], kernels)}
In plain JAX by size, in bf16:

{sizes()}
## GPUs

Kernels run by default on GPUs of these compute capabilities. The tests compile them for each, without the cards, and
run them in a simulator. Block sizes follow from a card's multiprocessors and from the shared memory of a block.
`kvjax.ops.explain` and `kvjax generate --verbose` say whether they were "measured on this GPU" or "compiled and
simulated, not measured on this GPU". The environment variable `KVJAX_KERNELS=off` turns kernels off.

<!-- table: gpus -->
<!-- end -->

Without clusters, the blocks that share a row meet in device memory between launches.

The table has the microseconds of a decode step of one layer of Llama-3.1-8B after 131072 tokens. Blank rows were not
measured. If you have one, please run

    kvjax bench --kernels --length 128K --json

and send what it prints in an issue. It checks each kernel against plain JAX as well, and without `--json` it prints a
table. With `--target 8.9` a larger GPU runs the forms of a smaller one.

<!-- table: cards -->
<!-- end -->

## TPUs

Compiled by the TPU compiler, which needs no TPU, and never run on a chip. The table has what it says of a decode
step of one layer of Llama-3.1-8B, budget 2048, in bf16, with the flush that a step may need, beside dense attention
that is written by hand and compiled in the same run: bytes read and written; reads by DMAs of their own, such as those
of selected tokens and pages; copies of arrays as large as the cache's; temporary memory; and the CPU seconds that it
took to compile.

The time is derived, not measured: bytes at the chip's bandwidth, and 30 ns more for each slice that a gather reads by
a DMA of its own. SparseCores, where the compiler gives them a gather, start 32 DMAs in that time, one by each of their
subcores. A kernel for TPUs copies while it computes, so it takes as long as its bytes, its DMAs or its instructions,
whichever is longest. Left out is what XLA's own operations compute while nothing moves, such as the search for the
highest scores, and the 30 ns were measured on no chip. A loop whose rounds depend on the data reads all of what it
slices.

By it, with one row of 131072 tokens, `quest` on a v5e or a v6e and `fier:page=32` on a v5e, which read pages, take at
most <!-- value: pages_at_most --><!-- /value --> of the time of dense attention, and `quest` on a TPU7x takes
about <!-- value: quest_on_tpu7x --><!-- /value --> of it.

On a v5e a DMA of one token takes as long as that of many, and the selected tokens of a step of `fier`, each read
alone, would take <!-- value: tokens_alone --><!-- /value --> times as long as dense attention. So a kernel reads them
in aligned groups of 128 tokens that hold a selected one, once for all query heads of a KV head, and masks the others.
Of a book, the package's model touched <!-- value: groups_of_fier --><!-- /value --> % of the groups with `fier`
and <!-- value: groups_of_pariskv --><!-- /value --> % with `pariskv`, and
SmolLM2-135M <!-- value: groups_of_smollm2 --><!-- /value --> % with `fier`, with as large a share of tokens selected
as 2048 of 131072. With as many groups as the package's model touched, a step of `fier`
takes <!-- value: fier_on_v5e --><!-- /value --> of dense attention's time, and one of
`pariskv` <!-- value: pariskv_on_v5e --><!-- /value -->. Were the tokens side by side, `fier` would
take <!-- value: fier_side_by_side --><!-- /value --> of it, and at worst, with a token in every
group, <!-- value: fier_everywhere --><!-- /value -->; half of dense attention's time has room
for <!-- value: groups_for_half --><!-- /value --> % of the groups. So `fier:page=32`, which selects whole pages,
suits a v5e better.

A TPU7x gives long gathers to its SparseCores, and a v6e does with the option `xla_tpu_offload_gather_to_sparsecore`,
with which the rows of v6e were compiled. A program that is traced for one of them leaves the reading of pages and
tokens to such gathers. The clocks of both chips are not published, so their rows leave out the instructions of FIER's
scores, <!-- value: score_bundles_v6e --><!-- /value --> bundles on a v6e
and <!-- value: score_bundles_tpu7x --><!-- /value --> on a TPU7x: at 2 GHz `fier` would take about half of dense
attention's time on a v6e, and as long as it on a TPU7x.

With eight rows of 32768 tokens there are eight times as many reads, while dense attention takes twice as long. Pages
take at most <!-- value: pages_of_many --><!-- /value --> of its time on a v5e, and `quest`, by
SparseCores, <!-- value: quest_of_many_on_v6e --><!-- /value --> of it on a v6e
and <!-- value: quest_of_many_on_tpu7x --><!-- /value --> on a TPU7x.

Single tokens of `fier` touch most groups of so short a history on a v5e, and
take <!-- value: fier_of_many --><!-- /value --> of dense attention's time; on a TPU7x the SparseCores read each
token in <!-- value: fier_of_many_on_tpu7x --><!-- /value --> of it. Where rows are many, pages pay.
`kivi`, `logquant` and `turboquant` attend their codes where they lie: a step moves little more than the bytes of the
cache.

<!-- table: tpus -->
<!-- end -->

Four Pallas kernels are for TPUs, all for heads of 128 or 256, up to eight query heads that share a selection, and
arrays in bf16. `score_1bit`, FIER's scores, takes groups of 32 keys and 4096 tokens of capacity or more; `score_pages`,
Quest's, takes 128 pages or more. `attend_pages` attends selected pages of a multiple of 16 tokens, and `attend_groups`
single tokens of a cache of a multiple of 128; both read the next ones while they attend, and programs for a v6e or a
TPU7x have neither. They read the index and the cache that a GPU reads.
Instructions come in bundles, of which a v5e issues 1.5 billion a second; waiting for memory is left out, and of the
loop that starts DMAs one round counts. On the other chips a kernel's derived time is that of its bytes and DMAs.

<!-- table: tpu_kernels -->
<!-- end -->

Steps of eight tokens and prompts have the logits of all their queries as temporary memory, and with several rows those
of FIER's scores too. `python -m benchmarks.tpu` compiles any preset for v5e, v6e and TPU7x. If you have a TPU, please
run

    kvjax bench --length 32K,128K --json

and send what it prints in an issue. The notebook [On a TPU](../notebooks/10_on_a_tpu.ipynb) does that in Colab.

An export for a TPU, from a machine with libtpu, needs
`disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]`.

## Models

A checkpoint in Hugging Face format is read if its `model_type` is one of these (Qwen2.5 has `qwen2`). Every method
works with every model without a sliding window; the first table has those that take a window.
`kvjax.presets.windowed` gives layers with a window a cache of that window, beside any method for the others.

{table(["`model_type`", "models"], families)}
A family of your own that computes as one of these goes into `kvjax.models.FAMILIES` before `load`. With the names of a
Llama it is `dataclasses.replace(FAMILIES["llama"], model_type="mine", architecture="MineForCausalLM")`; other names of
fields and tensors are a `kvjax.models.Family`.

Refused with an error: other architectures ([write them yourself](guides/own_model.md)), the parts of a model that
see images, weights quantised in other ways than MXFP4, bidirectional attention, and fields of a config that would
change results and that no family implements. Of these architectures the error says what is missing:

{table(["`model_type`", "needs"], missing)}"""


if __name__ == "__main__":
    PAGE.write_text(tables.fill(page()))
