"""The laws of decoding, on a model of two layers that satisfies the protocol in fifty lines."""

import dataclasses
import signal
from contextlib import contextmanager

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import generation as gen
from kvjax.generation import (
    Detokenizer,
    decode,
    decode_step,
    generate,
    interrupts_wait,
    prefill,
    stream,
    warm_up,
)
from kvjax.generation import prefilling as reading
from kvjax.generation.loops import PAD, LoopInputs, decode_loop
from kvjax.generation.processors import Processors
from kvjax.generation.prompt_inputs import check_fit, pad_prompt
from kvjax.generation.sampling import sampling

LAYERS, VOCAB, WIDTH, N, K, D = 2, 61, 32, 4, 2, 8
FIER = kvjax.presets.fier(
    budget=24, layers=kvjax.presets.Layers(dense=1)
)  # one for all tests, which so share its programs
# Its recent block is full every fourth step, so that a short run seals some chunks.
FLUSHING = kvjax.Retrieval(
    selector=kvjax.selectors.Fier(group=4),
    budget=16,
    sink=2,
    local=6,
    demote=kvjax.Fifo(leave=4),
    dense_below=0,
)


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB
    max_position_embeddings: int = 600


def rotate(x, positions):
    """RoPE of x [B, T, H, D]."""
    angle = positions[..., None, None] * 100.0 ** -jnp.linspace(0, 1, D // 2)[None, None, None]
    low, high = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class Tiny(nnx.Module):
    config = Config()

    def __init__(self, rngs, layers=LAYERS):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.qkv = nnx.List(
            [
                nnx.Linear(WIDTH, (N + 2 * K) * D, use_bias=False, rngs=rngs)
                for _ in range(layers)
            ]
        )
        self.out = nnx.List([nnx.Linear(N * D, WIDTH, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(
        self,
        tokens,
        cache,
        *,
        lengths=None,
        active=None,
        last_logits=False,
        first_chunk=False,
        info=False,
    ):
        B, T = tokens.shape
        positions = (cache.length[:, None] + jnp.arange(T)[None]).astype(jnp.float32)
        x, layers, infos = self.embed[...][tokens], [], []
        for qkv, out, layer in zip(self.qkv, self.out, cache.layers, strict=True):
            q, k, v = jnp.split(qkv(x).reshape(B, T, N + 2 * K, D), [N, N + K], axis=2)
            mixed, layer, seen = kvjax.attention_info(
                layer, 3 * rotate(q, positions), rotate(k, positions), v,
                lengths=lengths, active=active, first_chunk=first_chunk, flush=False,
            )  # fmt: skip
            x = x + out(mixed.reshape(B, T, N * D))
            layers.append(layer)
            infos.append(seen)
        alike = jax.tree.map(
            lambda old, new: new, cache.layers, tuple(layers)
        )  # as a scan over layers needs them
        cache = dataclasses.replace(cache, layers=alike)
        cache = kvjax.flush(cache) if T == 1 else cache
        if last_logits:
            ends = jnp.full(B, T) if lengths is None else lengths
            x = jnp.take_along_axis(x, jnp.maximum(ends - 1, 0)[:, None, None], axis=1)[:, 0]
        logits = 3 * self.head(x)
        return (logits, cache, infos) if info else (logits, cache)


@pytest.fixture(scope="module")
def model():
    return Tiny(nnx.Rngs(0))


def new_cache(batch=1, capacity=128, policy=None, layers=LAYERS):
    spec = kvjax.CacheSpec(
        batch=batch, q_heads=N, kv_heads=K, head_dim=D, capacity=capacity, dtype=jnp.float32
    )
    return kvjax.init(policy or kvjax.presets.full(), spec, layers=layers)


def words(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


@contextmanager
def compilations():
    """A list that grows by one for each program that is compiled inside of the block."""
    seen = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def assert_close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-4, rtol=2e-4)


# ------------------------------------------------------------------------------------------------------------ prefill


def test_prefill_in_chunks_equals_prefill_at_once(model):
    prompt = words(70, 33, 5)
    tokens, lengths = pad_prompt(prompt, rows=3)
    whole, a = prefill(model, new_cache(3), tokens, lengths, chunk=128)
    parts, b = prefill(model, new_cache(3), tokens, lengths, chunk=32)
    assert a.length.tolist() == b.length.tolist() == [70, 33, 5]
    assert_close(whole, parts)
    for row, text in enumerate(prompt):  # each row is what it would be alone
        alone, _ = prefill(model, new_cache(), [text], chunk=32)
        assert_close(alone[0], parts[row])


def test_prefill_takes_rows_of_several_lengths_as_generate_does(model):
    prompt = words(33, 5)
    got, cache = prefill(model, new_cache(2), prompt, chunk=32)
    want, _ = prefill(model, new_cache(2), *pad_prompt(prompt, rows=2), chunk=32)
    np.testing.assert_array_equal(got, want)
    assert cache.length.tolist() == [33, 5]


def test_prefill_skips_rows_of_length_0(model):
    _, cache = prefill(model, new_cache(2), [[1, 2, 3], [4, 5, 6]])
    logits, cache = prefill(model, cache, [[7, 8], [9, 9]], [2, 0])
    assert cache.length.tolist() == [5, 3]
    alone, _ = prefill(model, new_cache(), [[1, 2, 3, 7, 8]])
    assert_close(logits[0], alone[0])


def test_prefill_works_under_a_trace(model):
    tokens, lengths = pad_prompt(words(70, 33), rows=2)
    want, _ = prefill(model, new_cache(2), tokens, lengths)
    traced = jax.jit(lambda m, c, t, n: prefill(m, c, t, n, chunk=32))
    got, cache = traced(model, new_cache(2), jnp.asarray(tokens), jnp.asarray(lengths))
    assert cache.length.tolist() == [70, 33]
    assert_close(got, want)


def test_prefill_reports_progress(model):
    seen = []
    prefill(model, new_cache(), words(70), chunk=32, progress=seen.append)
    assert seen == [32, 64, 70]


@pytest.mark.parametrize("policy", [FIER, kvjax.presets.snapkv(32)], ids=["fier", "snapkv"])
@pytest.mark.parametrize("tokens", [20, 40, 48, 90])
def test_lowered_programs_of_a_prompt_are_those_that_run(model, monkeypatch, policy, tokens):
    real, seen = reading._prefill_chunk, {"run": [], "lowered": []}

    def note(how, act):
        def call(model, cache, tokens, lengths, *, first_chunk):
            program = tokens.shape, tokens.dtype, lengths.shape, lengths.dtype, first_chunk
            if program not in seen[how]:
                seen[how].append(program)
            return act(model, cache, tokens, lengths, first_chunk=first_chunk)

        return call

    run = note("run", real)
    run.lower = note("lowered", real.lower)
    monkeypatch.setattr(reading, "_prefill_chunk", run)
    monkeypatch.setattr(reading, "CPU_CHUNKS", (40, 16))

    lowered = [
        one.lower()
        for one in reading.prompt_programs(model, new_cache(2, policy=policy), tokens)
    ]
    assert all(isinstance(one, jax.stages.Lowered) for one in lowered)
    prefill(model, new_cache(2, policy=policy), np.ones((2, tokens), np.int32))
    assert seen["run"] == seen["lowered"]
    assert len(seen["run"]) == (2 if tokens > 40 and policy is FIER else 1)


def test_chunks_are_few_shapes_and_waste_little():
    sizes = {T: gen.chunk_size(T, 32768) for T in range(1, 100_000, 97)}
    assert len(set(sizes.values())) < 30
    for T, size in sizes.items():
        assert 16 <= size <= 32768
        assert T <= 1024 or size * -(-T // size) <= 1.25 * T  # padding of all chunks
        assert gen.chunk_size(2 * size, size) == size  # which warm_up counts on


def test_prefill_of_a_long_prompt_holds_no_square(model):
    T, chunk = 8192, 512
    cache = new_cache(capacity=T)
    part = jnp.zeros((1, chunk), jnp.int32)
    program = reading._prefill_chunk.lower(
        model, cache, part, jnp.full(1, chunk), first_chunk=False
    ).compile()
    # Scores of a chunk against the whole of T in all heads would be N * chunk * T * 4 bytes =
    # 64 MiB.
    assert program.memory_analysis().temp_size_in_bytes < N * chunk * T * 4 / 2


# ----------------------------------------------------------------------------------------------------------- generate


def greedy_by_hand(model, cache, prompt, steps, stop=()):
    """One row by prefill and decode_step, the loop in Python."""
    logits, cache = prefill(model, cache, [prompt])
    out = []
    while len(out) < steps and not (out and out[-1] in stop):
        out.append(int(jnp.argmax(logits[0])))
        logits, cache = decode_step(model, cache, jnp.array(out[-1:]))
    return out, cache, logits


@pytest.mark.parametrize("policy", [kvjax.Full(), FLUSHING], ids=["full", "flushing"])
def test_generate_equals_a_loop_of_steps_for_each_row_of_a_ragged_batch(model, policy):
    prompt = words(40, 7, 1)
    result = generate(model, new_cache(3, policy=policy), prompt, max_new_tokens=12)
    assert result.tokens.shape == (3, 12)
    for row, text in enumerate(prompt):
        want, _, logits = greedy_by_hand(model, new_cache(policy=policy), text, 12)
        assert result.rows[row] == want
        assert_close(result.logits[row], logits[0])
    assert result.cache.length.tolist() == [52, 19, 13]


def test_rows_end_at_the_first_of_several_stop_tokens_which_is_kept_and_fed(model):
    prompt = words(9, 30)
    free = generate(model, new_cache(2), prompt, max_new_tokens=20).rows
    stop = (free[0][3], free[1][8], 0)
    result = generate(model, new_cache(2), prompt, max_new_tokens=20, stop_tokens=stop)
    for row in range(2):
        cut = next(i for i, token in enumerate(free[row]) if token in stop) + 1
        assert result.rows[row] == free[row][:cut]
        assert result.tokens[row, cut:].tolist() == [PAD] * (20 - cut)
        assert result.cache.length[row] == len(prompt[row]) + cut
        _, _, logits = greedy_by_hand(model, new_cache(), prompt[row], 20, stop)
        assert_close(result.logits[row], logits[0])


def test_the_loop_ends_when_all_rows_have_ended(model):
    free = generate(model, new_cache(), words(9), max_new_tokens=4).rows[0]
    steps = []

    def counted(model, tokens, cache, **settings):
        if tokens.shape[1] == 1:
            jax.debug.callback(lambda: steps.append(1))
        return model(tokens, cache, **settings)

    spy = jax.tree_util.Partial(counted, model)
    result = generate(spy, new_cache(), words(9), max_new_tokens=100, stop_tokens=free[1])
    jax.effects_barrier()
    assert len(steps) == len(result.rows[0]) == free.index(free[1]) + 1


def test_two_turns_equal_one_run_over_the_concatenation(model):
    first, second = words(20, 33), words(9, 4, seed=1)
    one = generate(model, new_cache(2), first, max_new_tokens=6)
    two = generate(model, one.cache, second, max_new_tokens=6)
    joined = [a + new + b for a, new, b in zip(first, one.rows, second, strict=True)]
    whole = generate(model, new_cache(2), joined, max_new_tokens=6)
    assert two.rows == whole.rows
    assert two.cache.length.tolist() == whole.cache.length.tolist()


def test_decode_goes_on_where_a_run_ended_for_length(model):
    prompt = words(20, 33)
    whole = generate(model, new_cache(2), prompt, max_new_tokens=10)
    half = generate(model, new_cache(2), prompt, max_new_tokens=4)
    rest = decode(model, half.cache, half.logits, max_new_tokens=6)
    assert [a + b for a, b in zip(half.rows, rest.rows, strict=True)] == whole.rows


def test_decode_leaves_inactive_rows_alone(model):
    logits, cache = prefill(model, new_cache(2), *pad_prompt(words(20, 33), rows=2))
    result = decode(model, cache, logits, max_new_tokens=5, active=[False, True])
    assert result.lengths.tolist() == [0, 5]
    assert result.cache.length.tolist() == [20, 38]
    assert jnp.array_equal(result.logits[0], logits[0])


@pytest.mark.parametrize("policy", [kvjax.presets.full(), FIER])
def test_a_row_inserted_into_a_running_batch_equals_that_row_alone(model, policy):
    a, b, late = words(50, 31, 44)
    running = generate(model, new_cache(2, policy=policy), [a, b], max_new_tokens=5)
    logits, prefix = prefill(model, new_cache(policy=policy), [late])
    cache = kvjax.insert(running.cache, prefix, 1)
    result = decode(model, cache, running.logits.at[1].set(logits[0]), max_new_tokens=8)

    alone = generate(model, new_cache(policy=policy), [late], max_new_tokens=8)
    assert result.rows[1] == alone.rows[0]
    undisturbed = generate(model, new_cache(policy=policy), [a], max_new_tokens=13)
    assert running.rows[0] + result.rows[0] == undisturbed.rows[0]
    assert result.cache.length.tolist() == [63, 52]


def test_sampled_rows_do_not_depend_on_the_batch_when_they_bring_their_keys(model):
    prompt, keys = words(20, 33), jax.random.split(jax.random.key(5), 2)
    warm = sampling(1.0, top_k=30)
    both = generate(model, new_cache(2), prompt, max_new_tokens=10, sampling=warm, key=keys)
    for row in range(2):
        alone = generate(
            model, new_cache(), prompt[row : row + 1], max_new_tokens=10, sampling=warm, key=keys[row : row + 1]
        )  # fmt: skip
        assert alone.rows[0] == both.rows[row]
    other = generate(
        model, new_cache(2), prompt, max_new_tokens=10, sampling=warm, key=jax.random.key(6)
    )
    assert other.rows != both.rows


@pytest.mark.parametrize(("capacity", "larger"), [(128, False), (256, False), (100, True)])
def test_a_larger_cache_is_advised_only_where_the_cache_is_too_small(capacity, larger):
    with pytest.raises(
        ValueError, match="5 stored \\+ 100 prompt \\+ 50 new tokens do not fit"
    ) as told:
        check_fit(5, 100, 50, capacity, None if larger else 128)
    assert ("or make the cache with capacity=155" in str(told.value)) == larger


def test_measure_counts_what_steps_attend_to(model):
    prompt, policy = words(60, 40), FIER
    stop = generate(model, new_cache(2, policy=policy), prompt, max_new_tokens=9).rows[0][2]
    result = generate(
        model,
        new_cache(2, policy=policy),
        prompt,
        max_new_tokens=9,
        stop_tokens=stop,
        measure=True,
    )
    # A step sees what is stored and its own token.
    dense = np.mean(
        [
            n + 1 + i
            for n, new in zip((60, 40), result.lengths.tolist(), strict=True)
            for i in range(new)
        ]
    )
    np.testing.assert_allclose(result.attended, [dense, 24.0], rtol=1e-6)
    plain = generate(
        model, new_cache(2, policy=policy), prompt, max_new_tokens=9, stop_tokens=stop
    )
    assert plain.rows == result.rows
    assert plain.attended is None


# ---------------------------------------------------------------------------------------------- what it compiles, frees


def test_a_second_call_of_the_same_shapes_compiles_nothing(model):
    def run(seed, new, temperature):
        caches = new_cache(2), new_cache(2)
        prompt, more = words(40, 7 + seed, seed=seed), words(9, 5, seed=seed)
        with compilations() as seen:
            warm = sampling(temperature, top_p=0.9)
            settings = dict(max_new_tokens=new, sampling=warm, stop_tokens=(seed, 60), chunk=32)
            one = generate(model, caches[0], prompt, key=jax.random.key(seed), **settings)
            generate(model, one.cache, more, key=jax.random.key(1), **settings)
            for _ in stream(
                model, caches[1], prompt, key=jax.random.key(2), block=3, **settings
            ):
                pass
        return len(seen)

    assert run(1, 11, 0.5) > 0
    assert run(2, 13, 0.8) == 0


IN_HOST_MEMORY = dataclasses.replace(FLUSHING, store=kvjax.stores.HostOffload())


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", [FIER, IN_HOST_MEMORY], ids=["device", "host"])
def test_warm_up_compiles_all_that_a_run_needs(model, policy):
    settings = dict(max_new_tokens=7, stop_tokens=(0, 1), chunk=32, measure=True)
    warm_up(model, new_cache(policy=policy), 75, **settings)
    caches = [new_cache(policy=policy) for _ in range(2)]
    with compilations() as seen:
        generate(model, caches[0], words(75), **settings)
        list(stream(model, caches[1], words(75), block=3, **settings))
    assert not seen


def test_a_loop_over_a_cache_in_host_memory_compiles_once(model):
    run = gen.Stream(model, new_cache(policy=IN_HOST_MEMORY), jnp.ones((1, VOCAB)), 6)
    run.advance(2)
    with compilations() as seen:
        run.advance(2)
        run.advance(2)
    assert not seen


@pytest.mark.parametrize("policy", [FIER, FLUSHING], ids=["fier", "flushing"])
def test_a_step_alone_is_a_step_of_the_loop(model, monkeypatch, policy):
    """Where conditions of a loop make the host wait, streams of single tokens run none."""
    settings = dict(
        max_new_tokens=9, stop_tokens=(*range(9), 38), measure=True, log_probabilities=True,
        sampling=sampling(0.8), key=jax.random.key(2), processors=Processors(repetition_penalty=1.3),
    )  # fmt: skip
    runs, blocks = [], []
    for backends in ((), ("cpu",)):
        monkeypatch.setattr("kvjax.generation.loops.WAITS", backends)
        runs.append(stream(model, new_cache(2, policy=policy), words(30, 11), **settings))
        blocks.append(list(runs[-1]))
    assert [block.shape for block in blocks[0]] == [block.shape for block in blocks[1]]
    np.testing.assert_array_equal(*[np.concatenate(block, axis=1) for block in blocks])
    loop, alone = runs
    assert loop.rows == alone.rows
    assert min(map(len, loop.rows)) < 9  # one drew a stop token
    np.testing.assert_array_equal(loop.log_probabilities[0], alone.log_probabilities[0])
    np.testing.assert_array_equal(loop.attended, alone.attended)
    np.testing.assert_array_equal(loop.logits, alone.logits)
    jax.tree.map(np.testing.assert_array_equal, loop.cache, alone.cache)


@pytest.mark.parametrize("block", [None, 1])
def test_warm_up_compiles_the_step_of_a_stream_of_single_tokens(model, block, monkeypatch):
    monkeypatch.setattr("kvjax.generation.loops.WAITS", ("cpu",))
    settings = dict(max_new_tokens=5, chunk=32)
    warm_up(model, new_cache(), 40, block=block, **settings)
    caches = [new_cache(), new_cache()]
    with compilations() as seen:
        list(stream(model, caches[0], words(40), **settings))
        if block is None:
            generate(model, caches[1], words(40), **settings)
    assert not seen


def test_a_call_reads_one_array_and_puts_one(model, monkeypatch):
    run = stream(model, new_cache(), words(20), max_new_tokens=9, measure=True)
    run.advance(1)
    read = []
    monkeypatch.setattr(
        "kvjax.generation.reports.on_host", lambda x: read.append(x) or kvjax.memory.on_host(x)
    )
    before = jax.tree.leaves(run._call(1))
    run.advance(1)
    assert len(read) == 1
    after = jax.tree.leaves(run._call(1))
    from_host = [
        a for a, b in zip(before, after, strict=True) if isinstance(b, np.generic | np.ndarray)
    ]
    assert [np.shape(a) for a in from_host] == [(1,)]  # the number of tokens of each row


def test_caches_are_donated(model):
    empty = new_cache()
    logits, cache = prefill(model, empty, words(10))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(empty))
    held = jax.tree.leaves(cache)
    places = {leaf.unsafe_buffer_pointer() for leaf in held}
    _, stepped = decode_step(model, cache, jnp.argmax(logits, -1))
    assert all(leaf.is_deleted() for leaf in held)
    large = [leaf for leaf in jax.tree.leaves(stepped) if leaf.size > 8]
    assert {leaf.unsafe_buffer_pointer() for leaf in large} <= places


def test_the_loop_needs_no_more_memory_than_a_step(model):
    cache = new_cache(capacity=8192)
    step = decode_step.lower(model, cache, jnp.zeros(1, jnp.int32)).compile().memory_analysis()
    loop = decode_loop.lower(
        model, cache, jnp.zeros((1, VOCAB)), jnp.ones(1, bool),
        LoopInputs(None, jnp.int32(0), jnp.int32(1), jnp.zeros(8, jnp.int32)), measure=False,
    ).compile().memory_analysis()  # fmt: skip
    assert (
        loop.alias_size_in_bytes >= kvjax.memory.nbytes(cache).device
    )  # the loop updates the donated cache
    assert loop.temp_size_in_bytes <= step.temp_size_in_bytes + 4096


# ------------------------------------------------------------------------------------------------------------- stream


def test_a_stream_looks_for_the_leaves_of_its_model_once(model):
    looked = []

    @jax.tree_util.register_pytree_node_class
    class Counted:
        def __init__(self, model):
            self.model = model

        def tree_flatten(self):
            looked.append(1)
            return (self.model,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        def __call__(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    run = stream(Counted(model), new_cache(), words(5), max_new_tokens=4, block=1)
    before = len(looked)
    assert before > 0
    list(run)
    assert len(looked) == before


@pytest.mark.parametrize("block", [1, 4, 100])
def test_stream_yields_the_tokens_of_generate(model, block):
    prompt = words(20, 33)
    settings = dict(
        max_new_tokens=10,
        sampling=sampling(1.0),
        key=jax.random.key(0),
        stop_tokens=range(3),
        measure=True,
    )
    want = generate(model, new_cache(2), prompt, **settings)
    run = stream(model, new_cache(2), prompt, block=block, **settings)
    pieces = list(run)
    assert all(piece.shape[1] <= block for piece in pieces)
    joined = np.concatenate(pieces, axis=1)
    assert np.array_equal(joined, want.tokens[:, : joined.shape[1]])
    assert run.rows == want.rows
    assert run.cache.length.tolist() == want.cache.length.tolist()
    assert_close(run.logits, want.logits)
    assert_close(run.attended, want.attended)


def test_a_stream_that_is_left_early_can_be_continued(model):
    want = generate(model, new_cache(), words(20), max_new_tokens=10).rows[0]
    run = stream(model, new_cache(), words(20), max_new_tokens=10)
    for _, _ in zip(range(4), run, strict=False):
        pass
    assert run.rows[0] == want[:4]
    assert decode(model, run.cache, run.logits, max_new_tokens=6).rows[0] == want[4:]


class Bytes:
    """A tokenizer of bytes, as byte-level BPE is where it has no merges."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Spaced:
    """A tokenizer that strips the space of its first word, as sentencepiece's does."""

    def decode(self, ids, skip_special_tokens):
        return "".join(f" w{i}" for i in ids if i).removeprefix(" ")


@settings(max_examples=60, deadline=None)
@given(st.text(), st.data())
def test_text_comes_in_pieces_that_join_and_never_cut_a_character(text, data):
    pieces, given_out, whole = Detokenizer(Bytes()), "", list(text.encode())
    while whole:
        n = data.draw(st.integers(1, 5))
        given_out += pieces.push(whole[:n])
        assert text.startswith(given_out)
        whole = whole[n:]
    assert given_out + pieces.finish() == text


@given(st.lists(st.integers(0, 3)))
def test_pieces_of_a_tokenizer_that_strips_spaces_join_to_its_whole_text(ids):
    pieces = Detokenizer(Spaced())
    joined = "".join([pieces.push([i]) for i in ids]) + pieces.finish()
    assert joined == Spaced().decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_comes_at_the_end_as_the_replacement_mark():
    pieces = Detokenizer(Bytes())
    assert pieces.push(list("aé".encode())[:2]) == "a"
    assert pieces.finish() == "�"


def test_stream_of_text_equals_the_decoded_tokens(model):
    run = stream(model, new_cache(), words(20), max_new_tokens=10, tokenizer=Bytes())
    text = "".join(run)
    assert text == bytes(run.rows[0]).decode(errors="replace")
    with pytest.raises(ValueError, match=r"one row at a time, but the cache has B=2"):
        stream(model, new_cache(2), words(3, 4), max_new_tokens=1, tokenizer=Bytes())


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([[]], {}, "row 0 of the prompt is empty"),
        ([[1], []], dict(batch=2), "row 1 of the prompt is empty"),
        ([], {}, "prompt has 0 rows but the cache has B=1"),
        ([[1], [2]], {}, "prompt has 2 rows but the cache has B=1"),
        ([1, 2], {}, r"for one row write \[tokens\]"),
        (
            "a text",
            {},
            "prompt must be token ids, got text; encode it with the model's tokenizer",
        ),
        (["a text"], {}, "prompt must be token ids, got text"),
        ([[1.5]], {}, "integer token ids, got float64"),
        ([[-1]], {}, "token id -1; ids must be from 0 to"),
        ([[61]], {}, "prompt has the token id 61, but the model's vocabulary is 61"),
        ([[1]], dict(stop_tokens=99), "stop_tokens has the token id 99"),
        ([[1]], dict(stop_tokens=[-4]), "stop_tokens must be at least 0, got -4"),
        ([[1]], dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        ([[1]], dict(max_new_tokens=2.0), "max_new_tokens must be an integer"),
        ([[1]], dict(chunk=1), "chunk must be at least 2, got 1"),
        ([[1]], dict(sampling=sampling(1.0)), "a draw needs a key"),
        (
            [[1]],
            dict(sampling=0.7),
            r"sampling must be a Sampling, got 0\.7; make one: kvjax\.generation\.sampling\.sampling",
        ),
        ([[1]], dict(processors=3), r"processors must be a Processors, got 3; make one: kvjax"),
        ([[1]], dict(stop_tokens="</s>"), "stop_tokens are token ids, got .*encode the text"),
        (np.zeros((1, 3)), {}, r"prompt must be integers \[B, T\], got float64"),
        (np.ones((1, 3), int), dict(lengths=[4]), "of at most T=3"),
        (np.ones((1, 3), int), dict(lengths=[2.7]), "lengths must be integers"),
        (np.ones((1, 3), int), dict(lengths=[True]), "lengths must be integers"),
        (np.ones((1, 3), int), dict(lengths=[0]), "row 0 of the prompt is empty"),
        (
            [[1] * 100],
            dict(max_new_tokens=29),
            "row 0: 100 prompt . 29 new tokens do not fit in the cache's capacity of 128 tokens; ask for at "
            "most 28 new tokens, or make the cache with capacity=129",
        ),
        (
            [[1] * 130],
            {},
            "shorten the prompt by 3 tokens, or make the cache with capacity=131",
        ),
        (
            [[1] * 600],
            dict(capacity=1000),
            "do not fit in the model's 600 positions; shorten the prompt by 1 ",
        ),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_fails_before_any_work(
    model, prompt, settings, message
):
    settings = {"max_new_tokens": 1, **settings}
    cache = new_cache(settings.pop("batch", 1), settings.pop("capacity", 128))
    with pytest.raises(ValueError, match=message):
        generate(model, cache, prompt, **settings)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    with pytest.raises(ValueError, match=message):
        stream(model, cache, prompt, **settings)


def test_what_the_cache_holds_counts_against_its_capacity(model):
    result = generate(model, new_cache(), words(100), max_new_tokens=8)
    with pytest.raises(
        ValueError, match=r"row 0: 108 stored \+ 10 prompt \+ 11 new tokens do not fit"
    ):
        generate(model, result.cache, words(10), max_new_tokens=11)
    with pytest.raises(
        ValueError, match=r"row 0: 108 stored \+ 21 new tokens .* at most 20 new tokens"
    ):
        decode(model, result.cache, result.logits, max_new_tokens=21)


def test_misshapen_arguments_are_named(model):
    logits = jnp.zeros((1, VOCAB))
    with pytest.raises(ValueError, match=r"logits must be floats \[B=1, V\]"):
        decode(model, new_cache(), logits[0], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"active must be bool\[B=1\], got int"):
        decode(model, new_cache(), logits, max_new_tokens=1, active=[1])
    with pytest.raises(ValueError, match=r"token must be \[B=1\]"):
        decode_step(model, new_cache(), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"tokens must be \[B=1, T >= 1\]"):
        prefill(model, new_cache(), np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=r"lengths must be integers \[B=1\]"):
        prefill(model, new_cache(), np.zeros((1, 3), np.int32), [1, 2])
    with pytest.raises(ValueError, match="tokens must be integers, got float"):
        prefill(model, new_cache(), np.zeros((1, 3)))
    with pytest.raises(ValueError, match="block must be at least 1"):
        stream(model, new_cache(), words(3), max_new_tokens=1, block=0)


def test_an_interrupt_leaves_a_stream_usable(model):
    """Ctrl-C in a notebook that takes its steps inside of `interrupts_wait`: the next step goes
    on where the interrupted one was, and no token is lost or doubled.
    """
    prompt = [[1, 2, 3]]

    def run():
        return stream(
            model, new_cache(capacity=512, policy=FIER), prompt, max_new_tokens=400, block=7
        )

    wanted = run()
    list(wanted)
    interrupted, again, armed = 0, run(), [False]

    def interrupt(*_):
        if armed[0]:
            armed[0] = False
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, interrupt)
    own = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background of a shell it is ignored
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.0037)
    try:
        while again._now.left:
            try:
                armed[0] = True
                with interrupts_wait():
                    next(again)
                armed[0] = (
                    False  # inside of `try`: an interrupt outside of it would end the tests
                )
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, own)
    assert interrupted > 3
    assert again.rows == wanted.rows
    assert again.cache.length.tolist() == wanted.cache.length.tolist()
