"""Block sizes of tuned.json: which entry serves a shape, that those shipped hold, and that
`--tune` writes them.
"""

import json
import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kvjax.kernels_pallas import tuned
from kvjax.kernels_pallas.attend import (
    attend_coded_zones,
    attend_quantized,
    attend_slots,
    attend_span,
    attend_zones,
)
from kvjax.kernels_pallas.host import host_rows
from kvjax.kernels_pallas.score import rerank, score_1bit, score_pages
from kvjax.kernels_pallas.select import (
    select_1bit,
    select_4bit,
    select_pages,
    top_k,
    top_k_grouped,
)
from kvjax.kernels_pallas.vote import collide, most_voted
from tests.kernels.conftest import HAS_KERNELS

SHIPPED = tuned.FILE
H200 = "NVIDIA H200"


@dataclass(frozen=True)
class Config:
    blocks: int = 8
    warpgroups: int = 4

    def __post_init__(self):
        if self.blocks not in (1, 2, 4, 8):
            raise ValueError(f"blocks must be 1, 2, 4 or 8; got {self.blocks}")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where the lookup reads, for now empty."""
    path = tmp_path / "tuned.json"
    path.write_text("{}")
    monkeypatch.setattr(tuned, "FILE", path)
    tuned.entries.cache_clear()
    tuned._say_once.cache_clear()
    yield path
    tuned.entries.cache_clear()


@pytest.fixture
def on_h200(monkeypatch):
    """Kernels are traced as for an H200."""
    monkeypatch.setattr(tuned, "device_kind", lambda operands: H200)


def entry(shape, **config):
    return {"shape": shape, "config": config}


def text(**kernels):
    """A file with these kernels' entries, of an H200."""
    return json.dumps({H200: kernels})


def test_the_nearest_entry_serves_a_shape_and_none_that_is_far_away(file):
    near, nearer = {"rows": 8, "S": 2048, "D": 128}, {"rows": 8, "S": 3000, "D": 128}
    narrow = {"rows": 8, "S": 4096, "D": 64}
    file.write_text(
        text(toy=[entry(near, blocks=1), entry(nearer, blocks=2), entry(narrow, blocks=4)])
    )
    found = partial(tuned.config_of, H200, "toy", rows=8, D=128)
    assert found(S=2048) == found(S=1366) == found(S=2200) == {"blocks": 1}
    assert found(S=3000) == found(S=2900) == found(S=4500) == {"blocks": 2}
    assert found(S=4501) is found(S=1365) is found(S=0) is None
    assert tuned.config_of(H200, "toy", rows=12, S=3000, D=128) == {"blocks": 2}
    assert tuned.config_of(H200, "toy", rows=13, S=3000, D=128) is None
    assert tuned.config_of(H200, "toy", rows=8, S=4096, D=64) == {"blocks": 4}
    assert (
        tuned.config_of(H200, "toy", rows=8, S=4096, D=96)
        is tuned.config_of(H200, "toy", rows=8, S=2048)
        is None
    )
    assert tuned.config_of(H200, "other", rows=8, S=2048, D=128) is None


def test_a_config_is_the_entrys_and_else_the_rules(file, on_h200):
    file.write_text(text(toy=[entry({"rows": 8}, blocks=2)]))
    rule = Config(4, 1)
    with tuned.asked() as asked:
        assert tuned.select("toy", rule, (), rows=8) == Config(2, 4)
        assert tuned.select("toy", rule, (), rows=80) is rule
    assert asked == [
        ("toy", {"rows": 8}, rule, Config(2, 4), H200),
        ("toy", {"rows": 80}, rule, rule, H200),
    ]


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200 MIG 1g.18gb", None])
def test_another_kind_of_device_gets_the_rule(file, monkeypatch, device):
    file.write_text(text(toy=[entry({"rows": 8}, blocks=2)]))
    monkeypatch.setattr(tuned, "device_kind", lambda operands: device)
    rule = Config(4, 1)
    assert tuned.select("toy", rule, (), rows=8) is rule


def test_each_kind_of_device_has_its_own_entries(file, monkeypatch):
    file.write_text(
        json.dumps(
            {
                H200: {"toy": [entry({"rows": 8}, blocks=2)]},
                "B": {"toy": [entry({"rows": 8}, blocks=1)]},
            }
        )
    )
    for device, blocks in ((H200, 2), ("B", 1)):
        monkeypatch.setattr(tuned, "device_kind", lambda operands, device=device: device)
        assert tuned.select("toy", Config(4, 4), (), rows=8) == Config(blocks, 4)


@dataclass(frozen=True)
class Device:
    device_kind: str
    platform: str = "gpu"


@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        ([Device(H200), Device(H200)], H200),
        ([Device(H200), Device("NVIDIA H100 80GB HBM3")], None),
        ([Device("cpu", "cpu")], None),
    ],
)
def test_a_program_is_for_the_gpus_of_its_process_if_they_are_alike(monkeypatch, devices, kind):
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert tuned.device_kind() == kind


def test_a_program_compiled_ahead_of_time_is_for_the_device_of_its_mesh(monkeypatch):
    from jax._src.mesh import AbstractDevice  # no public name

    monkeypatch.setattr(jax, "devices", lambda: [Device("NVIDIA H100 80GB HBM3")])
    target = AbstractDevice(H200, num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=target)
    plain = jax.ShapeDtypeStruct((3,), jnp.float32)
    placed = plain.update(
        sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    seen = []
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda x: seen.append(tuned.device_kind([x])), plain)
    jax.eval_shape(lambda x: seen.append(tuned.device_kind([x * 2])), placed)
    jax.eval_shape(lambda x: seen.append(tuned.device_kind([x])), plain)
    assert seen == [H200, H200, "NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[1]", "the file: 1"),
        ('{"NVIDIA H200": 3}', "NVIDIA H200: 3"),
        ('{"NVIDIA H200": {"toy": 3}}', "toy: 3"),
        ('{"NVIDIA H200": {"toy": [{"shape": {"rows": 8}}]}}', "no shape and config"),
        (
            '{"NVIDIA H200": {"toy": [{"shape": {"rows": 0}, "config": {}}]}}',
            "no shape and config",
        ),
        (
            '{"NVIDIA H200": {"toy": [{"shape": {"rows": 8}, "config": {"blocks": "2"}}]}}',
            "no shape and config",
        ),
        (
            '{"NVIDIA H200": {"toy": [{"shape": {"rows": 8}, "config": {"blocks": 2.5}}]}}',
            "no shape and config",
        ),
        (
            '{"NVIDIA H200": {"toy": [{"shape": {"rows": 8}, "config": {"threads": 2}}]}}',
            "unexpected keyword argument 'threads'",
        ),
        (
            '{"NVIDIA H200": {"toy": [{"shape": {"rows": 8}, "config": {"blocks": 3}}]}}',
            "blocks must be 1, 2, 4 or 8; got 3",
        ),
        (
            '{"NVIDIA H200": {"toy": [{"shape": {"rows": 8}, "config": {"blocks": 2}}]}}',
            "it takes no 2",
        ),
    ],
)
def test_what_cannot_be_used_is_left_out_and_said_once(file, on_h200, caplog, text, said):
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    rule, limit = Config(), lambda x: "it takes no 2" if x.blocks == 2 else None
    with caplog.at_level(logging.WARNING, logger="kvjax"):
        for _ in range(2):
            assert tuned.select("toy", rule, (), limit, rows=8) is rule
    (message,) = caplog.messages
    assert said in message


# ------------------------------------------------------------------------------------------------ what the kernels ask


def sds(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


u8, i32, f32 = (partial(sds, dtype=dtype) for dtype in (jnp.uint8, jnp.int32, jnp.float32))


def _quantized(rows, S, D, Q, key_bits, value_bits, key_tokens, key_channels, value_channels):
    def code(bits, tokens, channels):
        return u8(rows, 1, S, D * bits // 8), sds(
            rows, 1, S // tokens, D // channels, dtype=jnp.uint32
        )

    codes = code(key_bits, key_tokens, key_channels), code(value_bits, 1, value_channels)
    return (
        partial(attend_quantized.attend_quantized, scale=0.1),
        sds(rows, 1, Q, D),
        *codes,
        i32(rows),
        i32(rows),
    )


def _slots(rows, M, G, D):
    kept = 2 * [sds(rows, 1, 8192, D)]
    lists = i32(rows, 1, 1, M), sds(rows, 1, 1, M, dtype=bool)
    return partial(attend_slots.attend_slots, scale=0.1), sds(rows, 1, G, D), *kept, *lists


def _span(rows, S, G, D):
    return (
        partial(attend_span.attend_span, scale=0.1),
        sds(rows, 1, G, D),
        *2 * [sds(rows, 1, S, D)],
        *2 * [i32(rows)],
    )


def _zones(rows, M, G, D):
    recent = *2 * [sds(rows, 1, 9, D)], *2 * [i32(rows)]
    return (
        partial(attend_zones.attend_zones, local=1, scale=0.1),
        *_slots(rows, M - 1, G, D)[1:],
        recent,
        None,
    )


def _coded_zones(rows, M, G, D):
    codes = 2 * [
        (
            u8(rows, 1, 99, D // 8),
            u8(rows, 1, 99, D // 8),
            sds(rows, 1, 99, 1, dtype=jnp.uint16),
        )
    ]
    how = {"local": 1, "centres": 2 * ((0.1, 0.3),), "turned": 5, "scale": 0.1}
    q, *_, slots, valid, recent, sink = _zones(rows, M, G, D)[1:]
    args = q, *codes, f32(rows, 1, D), slots, valid, recent, sink
    return partial(attend_coded_zones.attend_coded_zones, **how), *args


def _collide(rows, S, G, D):
    N = D // 8
    return (
        collide.collide,
        f32(rows, 1, G, D),
        u8(rows, 1, S, N),
        i32(rows, 1, N, 256),
        i32(rows, 6),
    )


def _rerank(rows, M, G, D):
    B, S, N = rows // G, 1024, D // 8
    codes = u8(B, 1, S, N), u8(B, 1, S, 3 * N), sds(B, 1, S, N, dtype=jnp.uint16)
    return (
        partial(rerank.rerank, centres=range(8), scale=0.1),
        f32(B, 1, G, D),
        *codes,
        i32(B, 1, G, M),
    )


def _select_4bit(rows, M, W, room, G, D):
    f, q, *codes, slots = _rerank(rows, M, G, D)
    pending = sds(q.shape[0], 1, 40, D), *2 * [i32(q.shape[0])]
    call = partial(
        select_4bit.select_4bit,
        room=room,
        **(f.keywords | {"centres": tuple(range(8))}),
        turned=5,
        pending_slots=W,
    )
    return call, q, *codes, (slots, i32(*q.shape[:3])), pending, pending[1]


def _most_voted(rows, S, room):
    votes = u8(rows, 1, 1, S), i32(rows), i32(rows)
    return partial(most_voted.most_voted, room=room), *votes


def _score_1bit(rows, S, G, D, group):
    keys = u8(rows, 1, S, D // 8), *2 * [sds(rows, 1, S // group, D)]
    return partial(score_1bit.score_1bit, scale=0.1), f32(rows, 1, G, D), *keys


def _select_1bit(rows, S, room, G, H, D, group, softmax):
    span = i32(rows), i32(rows)
    group_reduce = ("mean_softmax" if softmax else "mean_score") if H == 1 else "per_head"
    call = partial(select_1bit.select_1bit, group_reduce=group_reduce, room=room, scale=0.1)
    return (
        call,
        *_score_1bit(rows, S, G, D, group)[1:],
        span,
        (f32(rows, 1, G, 64), *span),
        i32(rows),
    )


def _select_pages(rows, P, W, room, G, H, D, softmax):
    group_reduce = ("mean_softmax" if softmax else "mean_score") if H == 1 else "per_head"
    call = partial(
        select_pages.select_pages,
        group_reduce=group_reduce,
        room=room,
        unit=16,
        scale=0.1,
        pending_slots=16 * W,
    )
    span = i32(rows), i32(rows)
    return (
        call,
        *_score_pages(rows, P, G, D)[1:],
        span,
        (sds(rows, 1, 16 * W, D), *span),
        i32(rows),
    )


def _score_pages(rows, P, G, D):
    return (
        partial(score_pages.score_pages, scale=0.1),
        sds(rows, 1, G, D),
        *2 * [sds(rows, 1, P, D)],
    )


def _top_k(rows, U, k):
    return partial(top_k.top_k, k=k), f32(rows, U), sds(rows, U, dtype=bool)


def _top_k_grouped(rows, U, k, G, softmax):
    parts = [(f32(rows, 1, G, U), sds(rows, 1, 1, U, dtype=bool))]
    return partial(
        top_k_grouped.top_k_grouped,
        group_reduce="mean_softmax" if softmax else "mean_score",
        k=k,
    ), parts


def _host_rows():
    return host_rows.host_rows, sds(1, 2, 99, 2, 1, 64), i32(1, 2, 40)


CODED = dict(key_bits=2, value_bits=4, key_tokens=42, key_channels=1, value_channels=64)
CALLS = {  # by kernel, a call that asks for a shape; such a shape; a config that is not its rule's
    "attend_coded_zones": (
        _coded_zones,
        dict(rows=3, M=66, G=5, D=128),
        dict(blocks=2, warpgroups=1),
    ),
    "attend_quantized": (
        _quantized,
        dict(rows=2, S=84, D=128, Q=3, **CODED),
        dict(blocks=1, warpgroups=1, stages=3),
    ),
    "attend_slots": (_slots, dict(rows=3, M=65, G=4, D=64), dict(blocks=2, warpgroups=1)),
    "attend_span": (
        _span,
        dict(rows=3, S=900, G=4, D=64),
        dict(blocks=5, warpgroups=2, stages=2, keys=16),
    ),
    "attend_zones": (_zones, dict(rows=3, M=66, G=5, D=128), dict(blocks=2, warpgroups=1)),
    "collide": (
        _collide,
        dict(rows=2, S=512, G=3, D=64),
        dict(parts=3, warpgroups=1, keys=1, stages=3, apart=1),
    ),
    "host_rows": (_host_rows, {}, dict(ahead=3, warpgroups=1, blocks=5)),
    "most_voted": (_most_voted, dict(rows=2, S=512, room=99), dict(blocks=2, warpgroups=2)),
    "select_1bit": (
        _select_1bit,
        dict(rows=2, S=512, room=31, G=4, H=1, D=64, group=32, softmax=1),
        dict(blocks=4, unroll=2, units=3, stages=2),
    ),
    "select_4bit": (
        _select_4bit,
        dict(rows=6, M=77, W=33, room=20, G=3, D=128),
        dict(blocks=8, unroll=2, warpgroups=4),
    ),
    "select_pages": (
        _select_pages,
        dict(rows=2, P=77, W=3, room=20, G=4, H=1, D=64, softmax=1),
        dict(blocks=4, unroll=2, tiles=2, warpgroups=2),
    ),
    "rerank": (_rerank, dict(rows=6, M=77, G=3, D=128), dict(warpgroups=4)),
    "score_1bit": (
        _score_1bit,
        dict(rows=2, S=512, G=3, D=128, group=64),
        dict(units=3, stages=8),
    ),
    "score_pages": (_score_pages, dict(rows=5, P=33, G=2, D=64), dict(tiles=2, warpgroups=2)),
    "top_k": (_top_k, dict(rows=2, U=512, k=31), dict(blocks=4, unroll=2)),
    "top_k_grouped": (
        _top_k_grouped,
        dict(rows=3, U=512, k=31, G=4, softmax=1),
        dict(blocks=4, unroll=2),
    ),
}


def asked_of(kernel, shape):
    call, *args = CALLS[kernel][0](**shape)
    with tuned.asked() as found:
        jax.eval_shape(lambda *args: call(*args), *args)  # of its own, or it were traced once
    (one,) = found
    assert (one.kernel, one.shape) == (kernel, shape)
    return one


needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="the kernels need jax >= 0.11")


@needs_kernels
@pytest.mark.parametrize("kernel", CALLS)
def test_a_kernel_takes_the_config_of_an_entry_for_its_shape(file, on_h200, kernel):
    _, shape, config = CALLS[kernel]
    rule = asked_of(kernel, shape).config
    file.write_text(text(**{kernel: [entry(shape, **config)]}))
    tuned.entries.cache_clear()
    assert asked_of(kernel, shape).config == type(rule)(**config) != rule


@needs_kernels
def test_every_shipped_entry_is_taken_by_its_kernel(monkeypatch, caplog):
    devices = json.loads(SHIPPED.read_text())
    assert devices.keys() == {
        H200,
        "NVIDIA H100 80GB HBM3",
    }  # the kinds of device that have been measured
    with caplog.at_level(logging.WARNING, logger="kvjax"):
        for device, kernels in devices.items():
            monkeypatch.setattr(tuned, "device_kind", lambda operands, device=device: device)
            for kernel, shipped in kernels.items():
                for given in shipped:
                    one = asked_of(kernel, given["shape"])
                    assert one.config == type(one.rule)(**given["config"])
                    assert given["us"] <= 0.97 * given["default_us"] + 0.01
                    assert given.keys() >= {"date", "versions"}
    assert not caplog.messages


# -------------------------------------------------------------------------------------------------------- --tune writes


@pytest.fixture
def sweep(monkeypatch, file, on_h200):
    """The benchmarks' module, with times of its own: 10 us a block, less for two warpgroups."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import sweep

    def device_time(f, *args, calls, starts=1):
        config = getattr(f, "keywords", {}).get("config") or Config()
        us = 10.0 * config.blocks + config.warpgroups / 10
        return us, {"kvjax_toy_kernel": us}

    monkeypatch.setattr(sweep, "device_time", device_time)
    yield sweep
    for name in ("sweep", "device_time"):
        del sys.modules[name]


def toy(x, rule, config):
    _ = config or tuned.select("toy", rule, [x], rows=8, D=64)
    return x


def swept(sweep, configs, rule, settled=None):
    kernel = partial(partial, partial(toy, rule=rule))
    return sweep.Sweep(settled=settled)(
        "toy",
        lambda config: kernel(config=config),
        lambda x: x,
        (jnp.ones(3),),
        configs=configs,
        error=lambda a, b: float(jnp.max(jnp.abs(a - b))),
        most=0.0,
        moved=1.0,
    )


def test_a_sweep_writes_what_the_lookup_reads_if_it_is_told_to_and_it_pays(sweep, file):
    rule, configs, settled = Config(4, 4), [Config(8, 4), Config(2, 4)], []
    row = swept(sweep, configs, rule)
    assert (row["config"], row["best_config"]) == ("4x4", "2x4")
    assert json.loads(file.read_text()) == {}

    others = {"NVIDIA H100": {"toy": [entry({"rows": 8, "D": 64}, blocks=8)]}}
    given = {"toy": [entry({"rows": 80, "D": 64}, blocks=1)], "other": [entry({"k": 9})]}
    file.write_text(json.dumps(others | {H200: given}))
    tuned.entries.cache_clear()
    swept(sweep, configs, rule, settled)
    everything = json.loads(file.read_text())
    written = everything[H200]
    assert everything == others | {H200: written}
    assert written["other"] == [entry({"k": 9})]
    assert [e["config"] for e in written["toy"]] == [
        {"blocks": 1},
        {"blocks": 2, "warpgroups": 4},
    ]
    assert (written["toy"][1]["us"], written["toy"][1]["default_us"]) == (20.4, 40.4)
    assert written["toy"][1]["versions"]["jax"] == jax.__version__
    assert tuned.config_of(H200, "toy", rows=8, D=64) == {"blocks": 2, "warpgroups": 4}
    row = swept(sweep, [], rule, settled)  # the first inputs of a shape decide
    assert (row["config"], list(row["all"])) == ("2x4", ["2x4", "4x4"])
    assert json.loads(file.read_text()) == everything


def test_an_entry_gives_way_where_the_rule_is_within_three_percent(sweep, file):
    file.write_text(text(toy=[entry({"rows": 8, "D": 64}, blocks=8)]))
    row = swept(sweep, [Config(1, 1)], Config(1, 2), [])
    assert (row["config"], row["best_config"]) == ("8x4", "1x1")  # by 1 %
    assert json.loads(file.read_text()) == {}


def test_a_sweep_of_a_device_of_unknown_kind_writes_nothing(sweep, file, monkeypatch):
    monkeypatch.setattr(tuned, "device_kind", lambda operands: None)
    with pytest.raises(SystemExit, match="kind of device"):
        swept(sweep, [Config(2, 4)], Config(4, 4), [])
    assert json.loads(file.read_text()) == {}
