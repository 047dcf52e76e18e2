"""The example of a server, by the client that people use: skipped where it is not installed."""

import asyncio
import importlib.util
import json
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

import kvjax
from tests.checkpoint import write_checkpoint

openai, _, uvicorn = (
    pytest.importorskip(name, reason="pip install 'kvjax[serve]'")
    for name in ("openai", "starlette", "uvicorn")
)

FILE = Path(__file__).parents[2] / "examples" / "openai_server.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return kvjax.models.load(write_checkpoint(tmp_path_factory.mktemp("chat") / "chat"))


@pytest.fixture(scope="module")
def app(checkpoint):
    spec = importlib.util.spec_from_file_location("openai_server", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["openai_server"] = module
    spec.loader.exec_module(module)
    return module.make_app(checkpoint, "tiny", slots=2, capacity=128, block=4, max_waiting=8)


@pytest.fixture(scope="module")
def server(app):
    """A running server of the app, with its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    server.url = urlunsplit(("http", f"127.0.0.1:{listener.getsockname()[1]}", "/v1", "", ""))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield server
    server.should_exit = True
    thread.join()


@pytest.fixture
def url(server):
    return server.url


def run(url, talk):
    """The result of talk(client) with an OpenAI client of the server."""

    async def inside():
        async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=2) as client:
            return await talk(client)

    return asyncio.run(inside())


def idle(app):
    engine, end = app.state.serving.engine, time.monotonic() + 30
    while (counts := engine.stats()).decoding or counts.waiting:
        assert time.monotonic() < end, counts
        time.sleep(0.02)
    assert not app.state.serving._queues


def test_answers_are_those_of_the_checkpoint(url, app, checkpoint):
    messages = [{"role": "user", "content": "Hello"}]

    async def talk(client):
        return await asyncio.gather(
            client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=9, temperature=0
            ),
            client.completions.create(
                model="tiny", prompt="Call me", max_tokens=9, temperature=0
            ),
            client.completions.create(
                model="tiny", prompt=["Call", "me"], max_tokens=5, temperature=0
            ),
            client.completions.create(
                model="tiny", prompt="Call me", max_tokens=9, n=3, seed=4
            ),
            client.models.list(),
        )

    chat, text, two, drawn, models = run(url, talk)
    assert (
        chat.choices[0].message.content == checkpoint.generate(messages, max_new_tokens=9).text
    )
    alone = checkpoint.generate("Call me", max_new_tokens=9)
    assert text.choices[0].text == alone.text
    assert text.usage.completion_tokens == len(alone.tokens)
    assert [one.text for one in two.choices] == checkpoint.generate(
        ["Call", "me"], max_new_tokens=5
    ).texts
    assert [one.index for one in drawn.choices] == [0, 1, 2]
    assert models.data[0].id == "tiny"
    idle(app)


def test_the_parts_of_a_message_are_read_as_its_text(url, checkpoint):
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": text} for text in ("Hello", "you")],
        }
    ]

    async def talk(client):
        return await client.chat.completions.create(
            model="tiny", messages=parts, max_tokens=9, temperature=0
        )

    message = {"role": "user", "content": "Hello\nyou"}
    assert (
        run(url, talk).choices[0].message.content
        == checkpoint.generate([message], max_new_tokens=9).text
    )


def test_streamed_text_is_the_whole_text(url, app, checkpoint):
    stop = checkpoint.generate("Call me", max_new_tokens=12).text[4:6]

    async def talk(client):
        found = {}
        for name, more in {
            "all": {},
            "stop": {"stop": stop},
            "two": {"n": 2, "seed": 1, "temperature": 1.0},
        }.items():
            settings = {
                "model": "tiny",
                "prompt": "Call me",
                "max_tokens": 12,
                "temperature": 0,
                **more,
            }
            whole = await client.completions.create(**settings)
            parts = [
                part async for part in await client.completions.create(**settings, stream=True)
            ]
            joined = [
                "".join(c.text for part in parts for c in part.choices if c.index == i)
                for i in range(len(whole.choices))
            ]
            found[name] = (
                joined,
                [c.text for c in whole.choices],
                whole.choices[0].finish_reason,
            )
        return found

    found = run(url, talk)
    for streamed, whole, _ in found.values():
        assert streamed == whole
    assert found["all"][1] == [checkpoint.generate("Call me", max_new_tokens=12).text]
    assert found["stop"][1:] == ([found["all"][1][0].partition(stop)[0]], "stop")
    idle(app)


def test_what_cannot_be_served_is_said(url, app):
    asked = {
        "too long": {"prompt": "word " * 400},
        "empty": {"prompt": ""},
        "negative": {"prompt": "a", "max_tokens": -1},
        "unknown": {"prompt": "a", "logprobs": 3},
        "no prompt": {"prompt": None},
        "max_new_tokens": {"prompt": "a", "max_tokens": 0},
        "submit(n=...)": {"prompt": "a", "n": 0},
        "none of them empty": {"prompt": "a", "stop": ["x", ""]},
        "a list of texts": {"prompt": "a", "stop": [5]},
        "seed must be": {"prompt": "a", "seed": 2**70},
    }

    async def talk(client):
        found = {}
        for name, body in asked.items():
            with pytest.raises(openai.BadRequestError) as raised:
                await client.completions.create(model="tiny", **body)
            found[name] = raised.value.body["message"]
        for body in ([], "a", {"messages": "hi"}, {"messages": ["hi"]}, {"messages": []}):
            with pytest.raises(
                openai.BadRequestError, match=r"JSON object|messages must be a list"
            ):
                await client.post("chat/completions", body=body, cast_to=object)
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        for message in (
            {"content": "a"},
            *({"role": "user", "content": what} for what in (None, 5, image, [5])),
        ):
            with pytest.raises(openai.BadRequestError, match="each message needs a role"):
                await client.post(
                    "chat/completions", body={"messages": [message]}, cast_to=object
                )
        body = {"prompt": "a", "stream": True, "stream_options": "x", "max_tokens": 1}
        with pytest.raises(openai.BadRequestError, match="stream_options must be an object"):
            await client.post("completions", body=body, cast_to=object)
        client = client.with_options(max_retries=0)
        many = [
            client.completions.create(model="tiny", prompt="a", n=4, max_tokens=60)
            for _ in range(6)
        ]
        return found, [one for one in await asyncio.gather(*many, return_exceptions=True)]

    found, answers = run(url, talk)
    busy, served = (
        [one for one in answers if isinstance(one, openai.RateLimitError) is kind]
        for kind in (True, False)
    )
    assert "do not fit" in found["too long"]
    assert "empty" in found["empty"]
    assert "max_new_tokens" in found["negative"]
    assert "logprobs" in found["unknown"]
    assert "prompt" in found["no prompt"]
    for words in list(asked)[5:]:
        assert words in found[words], found[words]
    assert len(busy) > 1
    assert "submit again" in busy[0].body["message"]
    assert busy[0].response.headers["Retry-After"] == "1"
    assert len(served) > 1
    assert all(
        choice.finish_reason in ("length", "stop") for one in served for choice in one.choices
    )
    idle(app)


def test_a_client_that_leaves_frees_its_slot_and_changes_no_other(url, app, checkpoint):
    async def talk(client):
        settings = {
            "model": "tiny",
            "prompt": "Call me",
            "max_tokens": 100,
            "temperature": 0,
            "stream": True,
        }
        leaving = await client.completions.create(**settings)
        other = asyncio.create_task(
            client.completions.create(model="tiny", prompt="Call", max_tokens=20, temperature=0)
        )
        async for _ in leaving:
            break
        await leaving.close()
        return (await other).choices[0].text

    assert run(url, talk) == checkpoint.generate("Call", max_new_tokens=20).text
    idle(app)


def test_a_client_that_leaves_before_its_first_event_frees_its_slot(url, app, server):
    body = json.dumps({"prompt": "Call me", "max_tokens": 110, "stream": True}).encode()
    where = urlsplit(url)
    head = f"POST {where.path}/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    for _ in range(4):
        with socket.create_connection((where.hostname, where.port)) as client:
            client.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
    run(url, lambda client: client.models.list())  # those that have left are seen before it
    end = time.monotonic() + 30
    while server.server_state.tasks or app.state.serving._queues:
        assert time.monotonic() < end
        time.sleep(0.02)
    idle(app)


def test_a_step_that_fails_tells_all_clients(url, app, monkeypatch):
    """The last test of this app, whose engine then is broken."""

    def fail(*arguments, **settings):
        raise RuntimeError("device lost")

    monkeypatch.setattr(kvjax.serve.engine, "_run_loop", fail)

    async def talk(client):
        client = client.with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError) as raised:
            await client.completions.create(model="tiny", prompt="a", max_tokens=9)
        with pytest.raises(
            openai.InternalServerError, match="a step of this engine has failed"
        ):
            await client.completions.create(model="tiny", prompt="a", max_tokens=9, stream=True)
        return raised.value.body["message"]

    assert "device lost" in run(url, talk)
    idle(app)
