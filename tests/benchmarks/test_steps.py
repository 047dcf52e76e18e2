"""The benchmarks of whole steps: they run, and they time the whole step."""

import argparse
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from benchmarks.throughput import fill
from kvjax import presets
from kvjax.models import Decoder, DecoderConfig, Experts

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=256, dtype=jnp.dtype(jnp.float32)
)


@pytest.fixture
def scripts(monkeypatch):
    """Imports a benchmark as a script does, with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: __import__(name)
    for name in [
        n
        for n, m in sys.modules.items()
        if str(getattr(m, "__file__", "")).startswith(str(FOLDER))
    ]:
        del sys.modules[name]


def asked_by_name():
    """Each benchmark with its options that take names of methods, parts or libraries."""
    options = "methods?|caches|implementations|shapes|product|libraries|presets|programs|chips|parts|only|selections"
    for path in sorted(FOLDER.glob("*.py")):
        declared = re.findall(rf'add_argument\(\s*"--({options})"', path.read_text())
        found = [name for name in declared if (path.stem, name) not in OTHER_NAMES]
        if found:
            yield path.stem, sorted(set(found))


# Options of those names that take something else, and what they take.
OTHER_NAMES = {
    ("lossless", "shapes"): "tokens x rows",
    ("lowered", "only"): "a regular expression",
    ("moe_steps", "parts"): "a switch",
    ("mutants", "only"): "modules of a room, whose names it checks itself",
}
NEEDED = {  # what a script asks for first
    "long_generation": ["--text", "LICENSE"],
    "mutants": ["engine"],
    "real_speed": ["--text", "LICENSE"],
    "run": ["--out", "unused"],
    "shared_quality": ["MODEL", "--text", "LICENSE", "--calibrate", "LICENSE"],
    "shares": ["--text", "LICENSE"],
    "speculation": ["MODEL", "--text", "LICENSE"],
    "targets": ["--out", "unused"],
}


CHECKED_LATER = ("run", "targets")  # by what they would start, before they do


@pytest.mark.parametrize(("script", "asked"), list(asked_by_name()))
def test_an_unknown_name_is_refused_in_one_sentence(
    scripts, capsys, monkeypatch, script, asked
):
    """It would be timed as another one, under that name."""

    parse = argparse.ArgumentParser.parse_args

    def parse_only(*args):  # what follows may make a model of 16 GB
        raise AssertionError(f"the name was taken: {parse(*args)}")

    if script not in CHECKED_LATER:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    name = f"benchmarks.{script}" if script in ("run", "tpu") else script
    module = scripts(name)
    module = getattr(module, script) if "." in name else module
    for option in asked:
        with pytest.raises(SystemExit) as ended:
            module.main([*NEEDED.get(script, ()), f"--{option}", "fierr"])
        assert ended.value.code == 2
        *usage, said = capsys.readouterr().err.strip().splitlines()
        assert usage[0].startswith("usage: ")
        assert f"--{option}" in said
        assert "fierr" in said
        known = said.replace(f"--{option}", "").replace("fierr", "")
        assert len(re.findall(r"[a-z0-9_]{3,}", known)) > 4, "it says what there is"


def test_a_placement_may_select_by_share(scripts):
    devices = scripts("devices")
    for name, selection in (
        ("ctx=1+share", "share"),
        ("ctx=1", "exact"),
        ("mesh of 1", "exact"),
    ):
        place = devices.placement_of(name, jax.devices())
        assert place.selection == selection
        assert place.mesh.shape == {"data": 1, "model": 1, "ctx": 1}


def tokens(key, B, heads):
    return jax.random.normal(jax.random.key(key), (B, 1, heads, 16))


@pytest.fixture
def new():
    return tokens(0, 2, 4), tokens(1, 2, 2), tokens(2, 2, 2)


def test_a_step_of_layers_is_repeatable_and_is_that_of_attention(scripts, new):
    decode_step = scripts("decode_step")
    caches = fill(
        kvjax.init(
            kvjax.PerLayer((), presets.fier(32, chunk=16, group=8).rest), SPEC, layers=2
        ),
        254,
    ).layers
    step = jax.jit(lambda cache, q, k, v: kvjax.attention(cache, q, k, v, flush=False))
    run = jax.jit(decode_step.through(decode_step.kvjax_step), donate_argnums=0)
    for held in (14, 15, 16):  # the last finds no place for its token
        assert [int(cache.state.recent.count[0]) for cache in caches] == [held] * 2
        before, wanted = (
            [cache.state.recent.k for cache in caches],
            [step(cache, *new)[0] for cache in caches],
        )
        outs, caches = run(caches, *new)
        assert all(leaf.is_deleted() for leaf in before)
        for out, want in zip(outs, wanted, strict=True):
            np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "chosen"), [(1, 2 / 8), (3, 1 - (6 / 8) ** 3)])
def test_a_step_reads_the_experts_that_tokens_choose(scripts, batch, chosen):
    """And all else but the embedding, also where a size is the number of experts."""
    moe_steps = scripts("moe_steps")
    config = DecoderConfig(
        vocab_size=40,
        hidden_size=8,
        intermediate_size=24,
        layers=2,
        q_heads=2,
        kv_heads=1,
        head_dim=8,
        experts=Experts(count=8, per_token=2, size=16, shared_size=8),
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    of_experts = sum(
        getattr(layer.mlp, name).get_value().nbytes
        for layer in model.layers
        for name in ("gate", "up", "down")
    )
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    others = whole - of_experts - model.embedding.get_value().nbytes
    assert moe_steps.weight_bytes(model, batch) == pytest.approx(others + chosen * of_experts)


def test_the_way_by_hand_is_exact_attention_to_the_best(scripts, new):
    decode_step = scripts("decode_step")
    state = decode_step.random_pair(jax.random.key(3), (2, 2, 64, 16), jnp.float32)
    out, state = jax.jit(decode_step.by_hand(8))(state, *new)
    q, k, v = (np.asarray(a)[:, 0] for a in new)
    keys, values = (np.asarray(a) for a in state)
    np.testing.assert_array_equal(keys[:, :, -1], k)
    np.testing.assert_array_equal(values[:, :, -1], v)
    for b, head in np.ndindex(2, 2):
        weights = np.exp(q[b, 2 * head : 2 * head + 2] @ keys[b, head].T / 4)  # [G, S]
        best = np.argsort(-(weights / weights.sum(axis=1, keepdims=True)).mean(axis=0))[:8]
        kept = weights[:, best] / weights[:, best].sum(axis=1, keepdims=True)
        np.testing.assert_allclose(
            out[b, 0, 2 * head : 2 * head + 2],
            kept @ values[b, head][best],
            rtol=1e-4,
            atol=1e-5,
        )


def test_a_kernel_that_ran_once_for_several_operations_is_told(scripts, monkeypatch):
    module = scripts("device_time")
    found = [("kvjax_a", [2.0] * 20), ("fusion", [1.0] * 10)]
    monkeypatch.setattr(module, "kernels", lambda call, calls: found)
    assert module.device_time(jnp.sin, 1.0, calls=10, starts=2) == (
        5.0,
        {"kvjax_a": 4.0, "fusion": 1.0},
    )
    found.append(("kvjax_b", [1.0] * 10))
    with pytest.raises(SystemExit, match="kvjax_b ran 1 times in a call, not 2"):
        module.device_time(jnp.sin, 1.0, calls=10, starts=2)


def test_the_floor_counts_what_a_step_must_read(scripts):
    layers, rate = scripts("layers"), scripts("device_time").bytes_per_us()
    spec = kvjax.CacheSpec(batch=2, q_heads=32, kv_heads=8, head_dim=128, capacity=1 << 17)
    us = {
        name: layers.floor_us(p, spec, 1 << 17)
        for name, p in scripts("decode_step").policies(2048).items()
    }
    S, chosen = 1 << 17, 2048 * 512
    per_head = {
        "full": S * 512,
        "fier": S * 32 + chosen,
        "fier:turbo4": S * 32 + 2048 * 2 * (128 // 2 + 2),
        "quest": S * 32 + chosen,
        "pariskv": S * 16 + -(-S // 10) * 96 + chosen,
        "logquant": S * (64 + 2 * 4 + 4 * 128 / 42),
    }
    assert us == {
        name: pytest.approx(2 * 8 * bytes_ / rate, rel=1e-6)
        for name, bytes_ in per_head.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fier", "logquant"])
def test_sealing_moves_a_whole_chunk(scripts, name):
    prefill = scripts("prefill")
    policy = prefill.POLICIES[name]().rest
    spec = kvjax.CacheSpec(
        batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=600 + policy.demote.leave
    )
    (layer,) = fill(kvjax.init(kvjax.PerLayer((), policy), spec, layers=1), 599).layers
    held = int(layer.state.store.count[0])
    sealed, after = jax.jit(prefill.seal, static_argnums=1)(layer.state, policy)
    assert int(sealed[0]) == held + policy.demote.leave
    assert int(after.store.count[0]) == held


def test_rows_of_another_run_are_kept_and_those_of_the_same_replaced(scripts, tmp_path):
    layers, out = scripts("layers"), tmp_path / "deep" / "rows.json"
    layers.save(out, "w", [{"a": 1, "us": 5.0}, {"a": 2, "us": 6.0}], ("a", "backend"))
    layers.save(out, "w", [{"a": 2, "us": 7.0}], ("a", "backend"))
    rows = json.loads(out.read_text())["rows"]
    assert [(row["a"], row["us"]) for row in rows] == [(1, 5.0), (2, 7.0)]
    assert all(row["versions"]["jax"] == jax.__version__ for row in rows)


def test_decode_step_runs_without_a_gpu(scripts, tmp_path, capsys):
    out = tmp_path / "rows.json"
    common = [
        "--lengths",
        "320",
        "--batches",
        "1",
        "--calls",
        "2",
        "--budget",
        "160",
        "--out",
        str(out),
    ]
    scripts("decode_step").main(["--quick", *common, "--methods", "cudnn,by hand"])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["method"], row["implementation"]) for row in rows] == [("by hand", "default")]
    assert all(row["us"] > 0 and row["layers"] == 2 and row["kernels"] is None for row in rows)
    with pytest.raises(SystemExit):
        scripts("decode_step").main(common)
    assert "--quick" in capsys.readouterr().err


def test_full_attention_by_cudnn_is_that_of_full(scripts, new):
    """Through XLA, as there is no cuDNN here."""
    q, k, v = new
    policy, lengths = scripts("end_to_end").FullByCudnn("xla"), jnp.array([9, 5])
    prompt = [
        jax.random.normal(jax.random.key(9 + i), (2, 9, heads, 16))
        for i, heads in enumerate((4, 2, 2))
    ]

    def run(policy):
        cache = kvjax.init_layer(policy, SPEC)
        _, cache = kvjax.attention(cache, *prompt, lengths=lengths, first_chunk=True)
        out, cache = kvjax.attention(cache, q, k, v)
        more, cache = kvjax.attention(cache, *prompt)  # a second chunk
        return out, more, cache.length

    for got, want in zip(
        jax.jit(lambda: run(policy))(), jax.jit(lambda: run(kvjax.Full()))(), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_end_to_end_runs_without_a_gpu(scripts, tmp_path):
    out = tmp_path / "rows.json"
    scripts("end_to_end").main(
        [
            "--quick",
            "--lengths",
            "300",
            "--batches",
            "2",
            "--steps",
            "8",
            "--budget",
            "288",
            "--out",
            str(out),
        ]
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["cache"] for row in rows] == list(scripts("end_to_end").METHODS)
    assert all(row["tpot_ms"] > 0 and row["status"] == "ok" for row in rows)
    on_host = {row["cache"] for row in rows if row["cache_bytes_host"] > 0}
    assert on_host == {"pariskv:host", "pariskv:host:float8", "freekv", "freekv:tau=-1"}


@pytest.mark.thorough
def test_all_methods_run_without_a_gpu(scripts, tmp_path):
    out = tmp_path / "rows.json"
    scripts("decode_step").main(
        [
            "--quick",
            "--lengths",
            "512",
            "--batches",
            "2",
            "--calls",
            "2",
            "--budget",
            "160",
            "--out",
            str(out),
        ]
    )
    assert (
        len(json.loads(out.read_text())["rows"]) == 12
    )  # 5 methods in 2 implementations, full, and by hand
    scripts("prefill").main(
        [
            "--quick",
            "--lengths",
            "512",
            "--calls",
            "2",
            "--out",
            str(out.with_name("prefill.json")),
        ]
    )
    rows = json.loads(out.with_name("prefill.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [
        "full",
        "fier",
        "quest",
        "pariskv",
        "logquant",
        "kivi",
    ]
    assert [row["chunk"] for row in rows] == [0, 256, 16, 256, 42, 128]
    assert all(row["seal_us"] > 0 for row in rows[1:])


@pytest.mark.thorough
def test_prefill_runs_without_a_gpu(scripts, tmp_path):
    out = tmp_path / "rows.json"
    scripts("prefill").main(
        [
            "--quick",
            "--lengths",
            "320",
            "--batches",
            "1",
            "--calls",
            "2",
            "--methods",
            "fier",
            "--out",
            str(out),
        ]
    )
    full, fier = json.loads(out.read_text())["rows"]
    assert full["added"] == full["seal_us"] == 0
    assert fier["added"] == pytest.approx(fier["prefill_us"] / full["prefill_us"] - 1)
    assert fier["seal_added"] == pytest.approx(fier["seal_us"] / (256 * fier["token_us"]))
