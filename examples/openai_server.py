"""An OpenAI-compatible server around `kvjax.Engine`, in one file.

    pip install -e '.[serve]'
    python examples/openai_server.py [DIRECTORY] --cache fier:budget=256 --slots 8 \\
        --capacity 4096 --port 8000

DIRECTORY is a checkpoint in Hugging Face format; without it the small model that kvjax ships
with is served. Routes: POST /v1/completions and /v1/chat/completions (stream, n, stop,
temperature, top_p, top_k, min_p, seed, max_tokens, chat_template_kwargs), GET /v1/models and
/health. Any other field that would change an answer is refused by name, such as logprobs. One
thread owns the engine and steps it; each connection has a queue. A client that leaves cancels
its requests, and one that reads slowly holds up no other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import reprlib
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import jax

import kvjax
from kvjax.generation import Detokenizer
from kvjax.generation.sampling import sampling
from kvjax.serve import EngineBusy

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise SystemExit(
        f"this server needs {error.name}, which is not installed: pip install -e '.[serve]'"
    ) from error

# All fields that a request may have; others are refused by name. Null is as if not given.
USED = {"model", "stream", "stream_options", "n", "stop", "seed", "max_tokens"}
USED |= {"temperature", "top_p", "top_k", "min_p"}
USED_BY = {
    True: {"messages", "chat_template_kwargs", "max_completion_tokens"},  # chats
    False: {"prompt"},
}
HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",  # by which a server may draft
}
# Fields of what this server cannot do, with the values by which a client asks for nothing.
IDLE: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
}
STREAM_OPTIONS = {"include_usage", "include_obfuscation"}  # the second changes no answer
MOST_BYTES = 16 * 2**20  # of a request
MOST_STOPS = 16  # stop strings of a request
LONGEST_STOP = 200  # characters


_shortened = reprlib.Repr()  # whose arguments Python 3.11 does not take
_shortened.maxstring = 120
_shortened.maxother = 120
brief = _shortened.repr


class Serving:
    """An engine that a thread steps while there is work, and the queues that wait for news of
    its requests.
    """

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
                try:
                    news = self.engine.step()
                except Exception:  # it has ended all requests, with the reason
                    logging.exception("a step of the engine failed")
                    news = self.engine.step()
                for request in news:
                    self._tell(request)

    def _tell(self, request: Any) -> None:
        loop, queue = self._queues.get(id(request), (None, None))
        if loop is not None and queue is not None:
            loop.call_soon_threadsafe(queue.put_nowait, None)

    def words(self, error: Exception) -> str:
        """An error as clients may read it: they need not know where files are."""
        folder, text = self.checkpoint.directory, str(error)
        for path in (folder.resolve(), folder):
            text = text.replace(str(path), self.name)
        return text

    async def submit(self, prompts: list[Any], **settings: Any) -> list[Any]:
        requests: list[Any] = []
        try:
            for prompt in prompts:
                requests += await asyncio.to_thread(self.engine.submit, prompt, **settings)
        except Exception:
            self.cancel(requests)
            raise
        for request in requests:
            self._queues[id(request)] = asyncio.get_running_loop(), asyncio.Queue()
        self._work.set()
        return requests

    def cancel(self, requests: list[Any]) -> None:
        """Ends requests that are not done. Waits for nothing, so that it also runs in a task
        that is cancelled.
        """
        for request in requests:
            self._queues.pop(id(request), None)
            asyncio.get_running_loop().run_in_executor(None, self.engine.cancel, request)

    async def news(self, request: Any) -> AsyncIterator[list[int]]:
        """The new tokens of a request, as they come."""
        given, queue = 0, self._queues[id(request)][1]
        while True:
            done, tokens = request.done, request.tokens[given:]
            given += len(tokens)
            if tokens:
                yield tokens
            elif done:
                return
            else:
                await queue.get()


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
            self._held
            + self._text.push([i for i in ids if i not in self._ids])
            + (self._text.finish() if last else "")
        )
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held, self.stopped = "", True
            return text[: min(ends)]
        keep = 0 if last else max((held_back(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def held_back(text: str, stop: str) -> int:
    """How many of the last characters of a text may be the beginning of a stop string."""
    tail = text[max(len(text) - len(stop) + 1, 0) :]
    return next((len(tail) - i for i in range(len(tail)) if stop.startswith(tail[i:])), 0)


def refuse(status: int, message: str, code: str, **headers: str) -> Response:
    error = {
        "message": message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": None,
        "code": code,
    }
    return JSONResponse({"error": error}, status, headers=headers)


class NoSuchModel(ValueError):
    """A request for another model than the one that is served."""


def check_fields(body: Any, chat: bool, name: str) -> None:
    """Raises ValueError for a field that this server does not know, or cannot follow."""
    if not isinstance(body, dict):
        raise ValueError(f"the request must be a JSON object, got {brief(body)}")
    given = {field: value for field, value in body.items() if value is not None}
    if given.get("model", name) != name:
        raise NoSuchModel(
            f"the model {brief(given['model'])} does not exist; this server has {name!r}"
        )
    answers = given.get("n", 1)
    best_of = given.get("best_of", answers)
    if best_of != answers or type(best_of) is not type(answers):
        raise ValueError("this server takes no best_of other than n")
    known = USED | USED_BY[chat] | HARMLESS | {"best_of"}
    for field in given.keys() - known:
        idle = IDLE.get(field, ())
        # By type, too: 0 asks for log probabilities, and false does not.
        value = given[field]
        numbers = type(value) in (int, float)
        same = [one for one in idle if one == value and (type(one) is type(value) or numbers)]
        if not same or (numbers and any(isinstance(one, bool) for one in same)):
            raise ValueError(f"this server takes no {brief(field)}: {brief(value)}")
    for field, kind in (
        ("stream", bool),
        ("stream_options", dict),
        ("chat_template_kwargs", dict),
    ):
        if not isinstance(given.get(field, kind()), kind):
            what = "true or false" if kind is bool else "an object"
            raise ValueError(f"{field} must be {what}, got {brief(given[field])}")
    for option, value in given.get("stream_options", {}).items():
        if option not in STREAM_OPTIONS or not isinstance(value, bool | None):
            raise ValueError(
                f"this server takes no {brief(option)}: {brief(value)} in stream_options"
            )
    # A template is a program: one of a client could run for hours, and write any control token.
    if "chat_template" in given.get("chat_template_kwargs", {}):
        raise ValueError(
            "this server takes no chat_template; chat_template_kwargs are settings of its own"
        )


def message_of(message: Any) -> dict[str, Any]:
    """A message with its content as one text, which a client may give in parts. Most chat
    templates know texts alone, and would spell a list as Python does.

    Beside tool calls there may be no content, and templates read their arguments as objects.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"each message needs a role, and a content; got {brief(message)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise ValueError(f"tool_calls must be a list, got {brief(calls)}")
    if content is None and calls:
        content = ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [
        part.get("text")
        for part in parts
        if isinstance(part, dict) and part.get("type") == "text"
    ]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(parts):
        raise ValueError(
            f"each message needs a role, and as content a text or parts of type text; got {brief(message)}"
        )
    found = {**message, "content": "\n".join(known)}
    if calls:
        found["tool_calls"] = [call_of(call) for call in calls]
    return found


def call_of(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"each of tool_calls needs a function, got {brief(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(
                f"arguments of a tool call must be JSON, got {brief(arguments)}"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def stops_of(stop: Any) -> list[str]:
    """The stop strings of a request."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ValueError(
            f"stop must be a text or a list of texts, none of them empty; got {brief(stop)}"
        )
    if len(stops) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in stops):
        raise ValueError(
            f"stop takes at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters"
        )
    return stops


def settings_of(
    body: Any, serving: Serving, chat: bool
) -> tuple[list[Any], list[str], dict[str, Any]]:
    """Prompts, stop strings, and what `Engine.submit` takes. Raises ValueError for what cannot
    be served.
    """
    check_fields(body, chat, serving.name)

    def known(*names: str, default: Any) -> Any:
        return next((body[name] for name in names if body.get(name) is not None), default)

    prompt = body["messages"] if chat else body["prompt"]
    if chat:
        if not (
            isinstance(prompt, list)
            and prompt
            and all(isinstance(message, dict) for message in prompt)
        ):
            raise ValueError(
                f"messages must be a list of objects with role and content, got {brief(prompt)}"
            )
        prompt = [message_of(message) for message in prompt]
    several = (
        not chat
        and isinstance(prompt, list)
        and bool(prompt)
        and not isinstance(prompt[0], int)
    )
    seed = known("seed", default=uuid.uuid4().int % 2**31)
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {brief(seed)}")
    filters = {name: body.get(name) for name in ("top_p", "top_k", "min_p")}
    if filters["top_k"] in (-1, 0) and type(filters["top_k"]) is int:
        filters["top_k"] = None  # other servers' words for all tokens
    draws = sampling(known("temperature", default=1.0), **filters)
    settings = {
        "max_new_tokens": known("max_completion_tokens", "max_tokens", default=128),
        "n": known("n", default=1),
        "sampling": draws,
        "key": None if draws.greedy else jax.random.key(seed),
    }
    checkpoint = serving.checkpoint
    settings["stop_tokens"] = checkpoint.chat_stop_tokens if chat else checkpoint.stop_tokens
    if chat:
        settings["template"] = known("chat_template_kwargs", default=None)
    return prompt if several else [prompt], stops_of(known("stop", default=[])), settings


async def body_of(http: HttpRequest) -> Any:
    """The JSON of a request, parsed beside the event loop."""
    raw = bytearray()
    async for part in http.stream():
        raw += part
        if len(raw) > MOST_BYTES:
            raise ValueError(f"a request may have at most {MOST_BYTES} bytes")
    return await asyncio.to_thread(json.loads, bytes(raw))


async def unless_gone(http: HttpRequest, work: Any) -> Any:
    """The result of `work`; None if the client leaves before."""
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait([task], timeout=0.5))[0]:
        if await http.is_disconnected():
            task.cancel()
            return None
    return task.result()


async def answer(http: HttpRequest, chat: bool) -> Response:
    serving: Serving = http.app.state.serving
    try:
        body = await body_of(http)
        prompts, stops, settings = await asyncio.to_thread(settings_of, body, serving, chat)
        requests = await serving.submit(prompts, **settings)
    except ClientDisconnect:
        return Response(status_code=499)  # which nobody reads
    except EngineBusy as busy:
        return refuse(429, serving.words(busy), "engine_busy", **{"Retry-After": "1"})
    except NoSuchModel as error:
        return refuse(404, serving.words(error), "model_not_found")
    except (KeyError, TypeError, ValueError, RecursionError, FileNotFoundError) as error:
        lacks = isinstance(error, KeyError)
        what = f"the request lacks {error}" if lacks else serving.words(error)
        return refuse(400, what, "cannot_be_served")
    except RuntimeError as error:
        return refuse(500, serving.words(error), "engine_failed")

    kind = ("chat.completion" if chat else "text_completion") + (
        ".chunk" if chat and body.get("stream") else ""
    )
    name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    head = {"id": name, "object": kind, "created": int(time.time()), "model": serving.name}

    async def pieces(request: Any) -> AsyncIterator[tuple[str, str | None]]:
        """Text of an answer, and at last why it ended."""
        text = Pieces(serving.checkpoint.tokenizer, stops, settings["stop_tokens"])
        async for tokens in serving.news(request):
            if piece := text.push(tokens):
                yield piece, None
            if text.stopped:
                serving.cancel([request])
                break
        rest = "" if text.stopped else text.push([], last=True)
        if request.reason == "error":
            why = serving.words(request.error)
            raise RuntimeError(f"the answer ended by an error: {why}")
        yield rest, "length" if request.reason == "length" and not text.stopped else "stop"

    def usage() -> dict[str, int]:
        read = sum(len(request.prompt) for request in requests[:: settings["n"]])
        new = sum(len(request.tokens) for request in requests)
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}

    async def whole() -> list[list[tuple[str, str | None]]]:
        async def one(request: Any) -> list[tuple[str, str | None]]:
            return [piece async for piece in pieces(request)]

        return await asyncio.gather(*map(one, requests))

    if not body.get("stream"):
        try:
            found = await unless_gone(http, whole())
        except RuntimeError as error:
            return refuse(500, serving.words(error), "answer_failed")
        finally:
            serving.cancel(requests)
        choices = []
        for i, parts in enumerate(found or []):
            text = "".join(piece for piece, _ in parts)
            content = (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            choices.append(
                {"index": i, "finish_reason": parts[-1][1], "logprobs": None, **content}
            )
        return JSONResponse({**head, "choices": choices, "usage": usage()})
    return Events(serving, requests, stream(requests, pieces, body, head, usage))


class Events(StreamingResponse):
    """A stream that cancels its requests when the client leaves, also before the first event
    was asked for.
    """

    def __init__(
        self, serving: Serving, requests: list[Any], events: AsyncIterator[str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._leave = partial(serving.cancel, requests)

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self._leave()


async def stream(
    requests: list[Any],
    pieces: Callable[[Any], Any],
    body: Any,
    head: Any,
    usage: Callable[[], Any],
) -> AsyncIterator[str]:
    """Server-sent events of all answers, as their text comes."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    chat = head["object"].startswith("chat")

    async def follow(i: int, request: Any) -> None:
        first = {"role": "assistant"} if chat else {}
        try:
            async for piece, reason in pieces(request):
                content: Any = (
                    {"delta": {**first, **({"content": piece} if piece else {})}}
                    if chat
                    else {"text": piece}
                )
                first = {}
                choice = {"index": i, "finish_reason": reason, "logprobs": None, **content}
                await queue.put({**head, "choices": [choice]})
        except RuntimeError as error:
            await queue.put(
                {
                    "error": {
                        "message": str(error),
                        "type": "server_error",
                        "code": "answer_failed",
                    }
                }
            )
        await queue.put(None)

    tasks = [asyncio.create_task(follow(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            event = await queue.get()
            left -= event is None
            if event is not None:
                yield f"data: {json.dumps(event)}\n\n"
        if (body.get("stream_options") or {}).get("include_usage"):
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage()})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()


async def completions(http: HttpRequest) -> Response:
    return await answer(http, chat=False)


async def chat_completions(http: HttpRequest) -> Response:
    return await answer(http, chat=True)


async def models(http: HttpRequest) -> Response:
    return JSONResponse(
        {"object": "list", "data": [{"id": http.app.state.serving.name, "object": "model"}]}
    )


async def health(http: HttpRequest) -> Response:
    stats = http.app.state.serving.engine.stats()
    return JSONResponse({"status": "ok", "decoding": stats.decoding, "waiting": stats.waiting})


async def not_served(http: HttpRequest, error: Any) -> Response:
    """An address or a method that this server has not, as OpenAI's clients read it."""
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    what = f"{error.detail}: {http.method} {http.url.path}"
    return refuse(error.status_code, what, code, **(error.headers or {}))


def make_app(
    checkpoint: Any, name: str, *, prefix_bytes: int = 2**30, **settings: Any
) -> Starlette:
    try:  # the next turn of a chat then reads only its new tokens
        engine = kvjax.Engine(checkpoint, prefix_bytes=prefix_bytes, **settings)
    except ValueError:  # some methods keep of a prompt what only its own queries need
        engine = kvjax.Engine(checkpoint, **settings)
    engine.warm_up()
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: not_served},
    )
    app.state.serving = Serving(engine, name, checkpoint)
    return app


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--cache", default="full")
    parser.add_argument(
        "--speculate",
        metavar="self[:TOKENS]",
        help="draft tokens by the selection of --cache, and verify them by attention to all tokens, so that texts are "
        "those of --cache full",
    )
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument(
        "--prefix-gib",
        type=float,
        default=1,
        help="memory of rows that are kept for the next turns of chats; 0 keeps none",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def app_of_options(checkpoint: Any, given: argparse.Namespace) -> Starlette:
    """The app of a command line. Raises ValueError for what the engine does not take."""
    return make_app(
        checkpoint,
        checkpoint.directory.name,
        cache=given.cache,
        speculate=given.speculate,
        slots=given.slots,
        capacity=given.capacity,
        max_waiting=given.max_waiting,
        prefix_bytes=int(given.prefix_gib * 2**30),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of_options()
    given = parser.parse_args(arguments)
    try:
        loaded = kvjax.models.load(given.directory or kvjax.models.shipped())
        print(f"compiling for {loaded.directory.name}", file=sys.stderr)
        app = app_of_options(loaded, given)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    config = uvicorn.Config(app, host=given.host, port=given.port, log_level="warning")
    socket = config.bind_socket()  # which ends the program in a sentence if the port is taken
    print(f"serving at http://{given.host}:{given.port}/v1", file=sys.stderr)
    uvicorn.Server(config).run(sockets=[socket])


if __name__ == "__main__":
    main()
