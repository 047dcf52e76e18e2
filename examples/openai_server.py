"""An OpenAI-compatible server around `kvjax.Engine`, in one file.

    pip install starlette uvicorn
    python examples/openai_server.py [DIRECTORY] --cache fier:budget=256 --slots 8 --capacity 4096 --port 8000

DIRECTORY is a checkpoint in Hugging Face format; without it the small model that kvjax ships with is served. Routes:
POST /v1/completions and /v1/chat/completions (stream, n, stop, temperature, top_p, seed, max_tokens), GET /v1/models
and /health. One thread owns the engine and steps it; each connection has a queue. A client that leaves cancels its
request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import jax
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import kvjax
from kvjax.generation import Detokenizer, EngineBusy
from kvjax.generation.sampling import sampling


class Serving:
    """An engine that a thread steps while there is work, and the queues that wait for news of its requests."""

    def __init__(self, engine: kvjax.Engine, name: str, checkpoint: Any) -> None:
        self.engine, self.name, self.checkpoint = engine, name, checkpoint
        self._queues: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[None]]] = {}
        self._work = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            while (stats := self.engine.stats()).decoding or stats.waiting:
                for request in self.engine.step():
                    self._tell(request)

    def _tell(self, request: Any) -> None:
        loop, queue = self._queues.get(id(request), (None, None))
        if loop is not None and queue is not None:
            loop.call_soon_threadsafe(queue.put_nowait, None)

    async def submit(self, prompt: Any, **settings: Any) -> list[Any]:
        requests = await asyncio.to_thread(self.engine.submit, prompt, **settings)
        for request in requests:
            self._queues[id(request)] = asyncio.get_running_loop(), asyncio.Queue()
        self._work.set()
        return requests

    async def news(self, request: Any) -> AsyncIterator[list[int]]:
        """The new tokens of a request, as they come."""
        given, queue = 0, self._queues[id(request)][1]
        try:
            while True:
                done, tokens = request.done, request.tokens[given:]
                given += len(tokens)
                if tokens:
                    yield tokens
                if done and given == len(request.tokens):
                    return
                if not tokens:
                    await asyncio.wait_for(queue.get(), timeout=None)
        finally:
            del self._queues[id(request)]
            if not request.done:
                await asyncio.to_thread(self.engine.cancel, request)


class Pieces:
    """Text of tokens, held back where it may be the beginning of a stop string."""

    def __init__(self, tokenizer: Any, stops: list[str], stop_tokens: tuple[int, ...]) -> None:
        self._text, self._stops, self._ids, self._held, self.stopped = (
            Detokenizer(tokenizer),
            stops,
            stop_tokens,
            "",
            False,
        )

    def push(self, ids: list[int], last: bool = False) -> str:
        text = (
            self._held + self._text.push([i for i in ids if i not in self._ids]) + (self._text.finish() if last else "")
        )
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held, self.stopped = "", True
            return text[: min(ends)]
        keep = 0 if last else max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]


def refuse(status: int, message: str, code: str, **headers: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return JSONResponse({"error": error}, status, headers=headers)


async def answer(http: HttpRequest, chat: bool) -> Response:
    serving: Serving = http.app.state.serving
    try:
        body = await http.json()
        prompt = body["messages"] if chat else body["prompt"]
        temperature, seed = body.get("temperature", 1.0), body.get("seed")
        draws = sampling(temperature, top_p=body.get("top_p"))
        key = None if draws.greedy else jax.random.key(seed if seed is not None else uuid.uuid4().int % 2**31)
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        ends = serving.checkpoint.chat_stop_tokens if chat else serving.checkpoint.stop_tokens
        new = body.get("max_completion_tokens") or body.get("max_tokens") or 128
        requests = await serving.submit(
            prompt, max_new_tokens=new, n=body.get("n") or 1, sampling=draws, key=key, stop_tokens=ends
        )
    except EngineBusy as busy:
        return refuse(429, str(busy), "engine_busy", **{"Retry-After": "1"})
    except (KeyError, TypeError, ValueError) as error:
        what = f"the request lacks {error}" if isinstance(error, KeyError) else str(error)
        return refuse(400, what, "cannot_be_served")

    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": serving.name,
    }
    texts = [Pieces(serving.checkpoint.tokenizer, stops, ends) for _ in requests]

    async def pieces(i: int) -> AsyncIterator[tuple[str, str | None]]:
        """Text of answer i, and at last why it ended."""
        request, text = requests[i], texts[i]
        news = serving.news(request)
        async for tokens in news:
            if piece := text.push(tokens):
                yield piece, None
            if text.stopped:
                await news.aclose()
                break
        rest = "" if text.stopped else text.push([], last=True)
        if request.reason == "error":
            raise RuntimeError("the model's numbers are not finite")
        yield rest, "length" if request.reason == "length" and not text.stopped else "stop"

    usage = {"prompt_tokens": len(requests[0].prompt)}
    if not body.get("stream"):
        choices = []
        for i in range(len(requests)):
            found = [piece async for piece in pieces(i)]
            text, reason = "".join(piece for piece, _ in found), found[-1][1]
            content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices.append({"index": i, "finish_reason": reason, **content})
        usage["completion_tokens"] = sum(len(request.tokens) for request in requests)
        usage["total_tokens"] = sum(usage.values())
        kind = "chat.completion" if chat else "text_completion"
        return JSONResponse({**head, "object": kind, "choices": choices, "usage": usage})

    async def events() -> AsyncIterator[str]:
        kind = "chat.completion.chunk" if chat else "text_completion"
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def follow(i: int) -> None:
            first = True
            async for piece, reason in pieces(i):
                delta: Any = {"content": piece} if piece else {}
                if first:
                    delta, first = {"role": "assistant", **delta}, False
                content = {"delta": delta} if chat else {"text": piece}
                await queue.put({"index": i, "finish_reason": reason, **content})
            await queue.put(None)

        tasks = [asyncio.create_task(follow(i)) for i in range(len(requests))]
        try:
            left = len(tasks)
            while left:
                choice = await queue.get()
                if choice is None:
                    left -= 1
                    continue
                yield f"data: {json.dumps({**head, 'object': kind, 'choices': [choice]})}\n\n"
            if (body.get("stream_options") or {}).get("include_usage"):
                usage["completion_tokens"] = sum(len(request.tokens) for request in requests)
                usage["total_tokens"] = sum(usage.values())
                yield f"data: {json.dumps({**head, 'object': kind, 'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    return StreamingResponse(events(), media_type="text/event-stream")


async def completions(http: HttpRequest) -> Response:
    return await answer(http, chat=False)


async def chat_completions(http: HttpRequest) -> Response:
    return await answer(http, chat=True)


async def models(http: HttpRequest) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": http.app.state.serving.name, "object": "model"}]})


async def health(http: HttpRequest) -> Response:
    stats = http.app.state.serving.engine.stats()
    return JSONResponse({"status": "ok", "decoding": stats.decoding, "waiting": stats.waiting})


def make_app(checkpoint: Any, name: str, **settings: Any) -> Starlette:
    engine = kvjax.Engine(checkpoint, **settings)
    engine.warm_up()
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
    app.state.serving = Serving(engine, name, checkpoint)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--cache", default="full")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    loaded = kvjax.models.load(given.directory or kvjax.models.shipped())
    settings = {
        "cache": given.cache,
        "slots": given.slots,
        "capacity": given.capacity,
        "max_waiting": given.max_waiting,
    }
    app = make_app(loaded, loaded.directory.name, **settings)
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning")
