"""Which layers should select: measurements of pairs of layers, and the best anchors for them."""

import itertools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.calibrate import calibrate
from benchmarks.sharing import Sharing, measure
from kvjax import presets
from kvjax.evaluate.capture import Live, LiveLayer
from tests.checkpoint import write_checkpoint


def layers_alike(same_as: list[int]) -> Live:
    """Layer i has the queries and keys of layer same_as[i], and values of its own; its heads
    swap where it is odd.
    """
    rng, T, S, K, G, D = np.random.default_rng(0), 4, 96, 2, 2, 8
    q, k = (
        rng.normal(size=(len(same_as), 1, T, K * G, D)) * 3,
        rng.normal(size=(len(same_as), 1, K, S, D)),
    )

    def layer(own: int) -> LiveLayer:
        v = rng.normal(size=(1, K, S, D))
        return LiveLayer(
            *(jnp.asarray(a, jnp.float32) for a in (q[own], k[own], v)), D**-0.5, None
        )

    return Live(tuple(layer(own) for own in same_as), np.arange(S - T, S))


def test_layers_with_the_same_keys_and_queries_serve_each_other() -> None:
    live = layers_alike([0, 1, 1, 3, 3])
    swapped = live.layers[4]
    swapped = LiveLayer(
        swapped.q.reshape(1, 4, 2, 2, 8)[:, :, ::-1].reshape(1, 4, 4, 8),
        swapped.k[:, ::-1],
        swapped.v,
        swapped.scale,
        None,
    )
    live = Live((*live.layers[:4], swapped), live.positions)
    found = measure(live, presets.fier(24, group=8, chunk=32, layers=presets.Layers(dense=1)))
    assert found.first == 1
    np.testing.assert_allclose(found.overlap[1, 2], 1, atol=1e-6)
    assert found.overlap[1, 3] < 0.6
    assert found.error[1, 3] > 2 * found.error[3, 3]
    assert np.isnan(found.error[2, 1])
    assert found.anchors(2) == (1, 3)
    assert found.heads((1, 3)) == {4: (1, 0)}
    np.testing.assert_allclose(
        found.head_error[3, 4, (0, 1), (1, 0)], found.head_error[3, 3, (1, 0), (1, 0)], rtol=0.5
    )
    assert found.least_error[3, 4] < 0.6 * found.error[3, 4]
    assert found.total_error((1, 2, 3, 4)) <= found.total_error((1, 3)) + 1e-6


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_anchors_have_the_least_error_of_all_choices(count: int) -> None:
    rng = np.random.default_rng(count)
    found = Sharing(
        1, rng.uniform(size=(7, 7)), rng.uniform(size=(7, 7)), rng.uniform(size=(7, 7, 2, 2))
    )
    choices = ((1, *rest) for rest in itertools.combinations(range(2, 7), count - 1))
    errors = [found.total_error(choice, best_heads=True) for choice in choices]
    assert found.total_error(found.anchors(count), best_heads=True) == pytest.approx(
        min(errors)
    )
    assert min(errors) <= found.total_error(found.anchors(count))
    assert found.every(3) == (1, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("all the words of a long text " * 20)
    return file


def test_the_command_writes_a_file_that_presets_read(model, text, tmp_path, capsys):
    cache = "fier:budget=64,group=8,chunk=8,sink=4,local=16,dense_layers=1"
    out = tmp_path / "plan.json"
    calibrate(
        model,
        text,
        cache,
        share=2,
        length="96",
        steps=2,
        dtype="float32",
        out=out,
        as_json=True,
    )
    content = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == content
    shared = presets.fier(
        64, group=8, chunk=8, sink=4, local=16, layers=presets.Layers(dense=1, anchors=str(out))
    )
    assert shared.anchors == tuple(content["anchors"])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"cache": "full"}, "selects nothing that other layers could follow"),
        ({"cache": "fier:share=2"}, "sets share, which this command finds; leave it out"),
        ({"cache": "fier:dense_layers=9", "length": "100"}, "keeps the first 9 layers full"),
        ({"share": 0}, "--share must be at least 1, got 0"),
        ({"out": "plan"}, "end the name in .json, so that --cache fier:anchors=FILE"),
        ({"length": "64,64"}, "must be steps=16 or more above the one before"),
        ({"text": None}, "--text takes a UTF-8 file with a long text; got none"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused_before_the_weights(
    model, text, tmp_path, monkeypatch, settings, error
):
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **given: pytest.fail("weights were read")
    )
    if "out" in settings:
        settings = {**settings, "out": tmp_path / settings["out"]}
    how = {"text": text, "cache": "fier", "dtype": "float32", "length": "96"} | settings
    with pytest.raises(ValueError, match=re.escape(error)):
        calibrate(model, **how)
