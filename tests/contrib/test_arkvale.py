"""ArkVale against numpy written from its paper: digests of pages, and the pages that a step
attends to.
"""

import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, presets
from kvjax.testing import _drive as drive
from tests import oracles
from tests.test_oracles import data, steps

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=160, dtype="float32")
PAGE, SINK, LOCAL, PAGES = 8, 4, 12, 3


def score(q: np.ndarray, keys: np.ndarray) -> float:
    """The largest product of a query [D] with a point of the box around the keys that a page
    has, [page, D].
    """
    q, keys = q.astype(np.float64), keys.astype(np.float64)
    centre = (keys.max(axis=0) + keys.min(axis=0)) / 2
    return q @ centre + np.abs(q) @ np.abs(keys - centre).mean(axis=0)


@pytest.mark.parametrize("keys", ["random", pytest.param("live", marks=pytest.mark.thorough)])
def test_a_step_attends_to_the_pages_with_the_best_digests(
    keys: str, checkpoint: str | None
) -> None:
    budget = SINK + LOCAL + PAGES * PAGE
    policy = presets.arkvale(budget=budget, page=PAGE, sink=SINK, local=LOCAL).rest
    same = total = 0
    spec, tokens = (
        (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    )
    for at in steps(policy, spec, tokens):
        assert at.fresh, "a step attends with its own selection"
        stop = at.held - LOCAL
        pages = [
            list(range(first, min(first + PAGE, stop))) for first in range(SINK, stop, PAGE)
        ]
        scores = [
            np.mean([score(q, at.k[page[0] : page[0] + PAGE]) for q in at.q]) for page in pages
        ]
        best = np.argsort(-np.array(scores), kind="stable")[:PAGES]
        chosen = sorted(
            {*range(SINK), *(t for i in best for t in pages[i]), *range(stop, at.held)}
        )
        want, _ = oracles.attention(at.q, at.k[chosen], at.v[chosen], spec.head_dim**-0.5)
        same += bool(np.abs(at.out - want).max() <= 2e-5 * max(1.0, np.abs(want).max()))
        total += 1
    assert same >= 0.97 * total, (same, total)


@pytest.mark.parametrize("budgets", [(6, 6), (6, 2)], ids=["all selected", "cache of pages"])
@pytest.mark.parametrize("per", ["head", "layer"])
def test_pages_of_the_step_before_stay_and_a_layer_may_select_once(
    per: str, budgets: tuple[int, int]
) -> None:
    """ArkVale's released code: recalled pages replace those of the cache that score lowest, and
    all of it is attended.

    A cache that also keeps what a step did not select differs from one that does not in most
    steps.
    """
    pages, topk = budgets
    fixed = SINK + LOCAL
    more = {"per": per, "topk": fixed + topk * PAGE}
    policies = presets.arkvale(
        budget=fixed + pages * PAGE, page=PAGE, sink=SINK, local=LOCAL, **more
    )
    cache = kvjax.init_layer(policies.rest, SPEC)
    tokens, prompt = drive.random_tokens(SPEC), 90
    cache, _ = drive.fill(cache, tokens, np.full(SPEC.batch, prompt))
    (B, K), G, D = (SPEC.batch, SPEC.kv_heads), SPEC.group, SPEC.head_dim
    held: dict[tuple[int, int], set[int]] = {at: set() for at in np.ndindex(B, K)}
    stale = 0
    for n in range(prompt, 130):
        out, cache, _ = drive.step(cache, tokens, np.full(B, n))
        stop, count = n + 1 - LOCAL, -(-(n + 1 - LOCAL - SINK) // PAGE)
        for row in range(B):
            q = tokens.q[row, n].reshape(K, G, D)
            firsts = [
                SINK + i * PAGE for i in range(count)
            ]  # the last page has a digest of all that it will have
            keys = [
                [tokens.k[row, first : min(first + PAGE, n + 1), h] for first in firsts]
                for h in range(K)
            ]
            scores = np.array(
                [
                    [np.mean([score(x, page) for x in q[h]]) for page in keys[h]]
                    for h in range(K)
                ]
            )
            scores = (
                np.broadcast_to(scores.mean(axis=0), scores.shape) if per == "layer" else scores
            )
            for h in range(K):
                order = np.argsort(-scores[h], kind="stable")
                best, resident = order[:topk].tolist(), held[row, h]
                if (
                    resident and (stop - SINK) % PAGE
                ):  # the newest page is on the device until it is full
                    resident = resident | {count - 1}
                kept = (
                    [i for i in order if i in resident and i not in best]
                    if resident
                    else order[topk:].tolist()
                )
                chosen = set((best + kept)[:pages])
                stale += chosen != set(order[:pages].tolist())
                held[row, h] = chosen
                at = [t for i in chosen for t in range(firsts[i], min(firsts[i] + PAGE, stop))]
                at = sorted({*range(SINK), *at, *range(stop, n + 1)})
                want, _ = oracles.attention(
                    q[h], tokens.k[row, at, h], tokens.v[row, at, h], D**-0.5
                )
                got = np.asarray(out).reshape(B, K, G, D)[row, h]
                np.testing.assert_allclose(
                    got, want, atol=2e-5, err_msg=f"row {row}, head {h}, step {n}"
                )
    assert (stale > 20) == (topk < pages)


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per='all'.*one of head, layer"):
        presets.arkvale(per="all")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"topk=32.*sink \+ local \+ one unit = 64 \+ 64 \+ 32 to the budget of 1024",
    ):
        presets.arkvale(topk=32)
    with pytest.raises(ValueError, match=r"by query head; use another group_reduce"):
        presets.arkvale(topk=512, group_reduce="per_head")
    with pytest.raises(ValueError, match=r"cannot have group_reduce='per_head'"):
        presets.arkvale(per="layer", group_reduce="per_head")
