"""One of several processes that decode together: `worker.py ADDRESS PROCESSES NUMBER CHECKPOINT SAVES`.

Prints the tokens of a batch that data=2, model=4 split, saves the cache and decodes on.
"""

import json
import sys

import jax

address, processes, number, checkpoint, saves = sys.argv[1:]
if int(processes) > 1:
    jax.distributed.initialize(address, int(processes), int(number))

import numpy as np  # noqa: E402

import kvjax  # noqa: E402
from kvjax.generation import decode, generate  # noqa: E402
from kvjax.models import load  # noqa: E402

mesh = jax.make_mesh((2, 4), ("data", "model"))
loaded = load(checkpoint, "float32", placement=kvjax.Placement(mesh=mesh, batch="data", heads="model"))
method = "fier:budget=24,group=8,chunk=32,dense_layers=1,host=yes"
cache = loaded.init_cache(method, capacity=128, batch=2, dtype="float32")
prompt = [list(range(1, 60)), [7] * 40]
done = generate(loaded.model, cache, prompt, max_new_tokens=20, chunk=64, measure=True)
kvjax.save(saves, done.cache)
restored = kvjax.restore(saves, done.cache)
more = decode(loaded.model, restored, done.logits, max_new_tokens=20)
if jax.process_index() == 0:
    print(json.dumps({"tokens": done.tokens.tolist(), "more": more.tokens.tolist(), "devices": jax.device_count()}))
assert np.all(done.attended > 0)
