"""The example of a server, by the client that people use: skipped where it is not installed."""

import asyncio
import importlib.util
import inspect
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
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
def script():
    spec = importlib.util.spec_from_file_location("openai_server", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["openai_server"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def app(script, checkpoint):
    return script.make_app(checkpoint, "tiny", slots=2, capacity=128, block=4, max_waiting=8)


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
    assert [one.text for one in two.choices] == [
        checkpoint.generate(prompt, max_new_tokens=5).text for prompt in ("Call", "me")
    ]
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
            {"role": "assistant", "content": None, "tool_calls": []},
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


HELLO = [{"role": "user", "content": "Hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SPOILT = {**CALL, "function": {"name": "f", "arguments": "{"}}
TAKEN = [
    {"prompt": "a", **more}
    for more in (
        {"logprobs": None, "best_of": 1, "user": "me", "suffix": "", "echo": False},
        {"n": 2, "best_of": 2},
        {"top_k": -1},
        {"top_k": 0},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "logit_bias": {}},
        {"stop": ["x" * 200] * 16},
        {"stream_options": {"include_usage": None, "include_obfuscation": False}},
    )
] + [
    {"messages": HELLO, **more}
    for more in (
        {"logprobs": False, "response_format": {"type": "text"}, "tool_choice": "none"},
        {"tools": [], "store": False, "metadata": {"a": "b"}, "parallel_tool_calls": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    )
]
REFUSED = {
    name: ("completions", {"prompt": "a", **body}, words)
    for name, body, words in (
        ("zero logprobs", {"logprobs": 0}, "no 'logprobs': 0"),
        ("another best_of", {"best_of": 3}, "best_of"),
        ("best_of as a flag", {"best_of": True}, "best_of"),
        ("penalty", {"repetition_penalty": 1.2}, "repetition_penalty"),
        ("repetition as a flag", {"repetition_penalty": True}, "repetition_penalty"),
        ("ignore_eos", {"ignore_eos": True}, "ignore_eos"),
        ("min_tokens", {"min_tokens": 3}, "min_tokens"),
        ("stop_token_ids", {"stop_token_ids": [3]}, "stop_token_ids"),
        ("no field", {"never_heard_of": 1}, "never_heard_of"),
        ("messages of a completion", {"messages": HELLO}, "messages"),
        ("stream as text", {"stream": "false"}, "stream must be true or false"),
        ("stream as a number", {"stream": 1}, "stream must be true or false"),
        ("usage as text", {"stream_options": {"include_usage": "no"}}, "'include_usage': 'no'"),
        ("option", {"stream_options": {"chunk": True}}, "no 'chunk': True in stream_options"),
        ("long stop", {"stop": "x" * 201}, "at most 200 characters"),
        ("many stops", {"stop": ["x"] * 17}, "at most 16 texts"),
    )
} | {
    name: ("chat/completions", {"messages": HELLO, **body}, words)
    for name, body, words in (
        ("logprobs", {"logprobs": True}, "logprobs"),
        ("tool choice", {"tool_choice": "required"}, "tool_choice"),
        ("format", {"response_format": {"type": "json_object"}}, "response_format"),
        ("prompt of a chat", {"prompt": "a"}, "prompt"),
        ("template", {"chat_template_kwargs": 5}, "must be an object"),
        (
            "template of a client",
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "no chat_template",
        ),
        (
            "length of a template",
            {"chat_template_kwargs": {"max_length": 1}},
            "sets max_length",
        ),
        ("content", {"messages": [{"role": "assistant", "content": None}]}, "content"),
        ("calls", {"messages": [{**HELLO[0], "tool_calls": 5}]}, "tool_calls must be a list"),
        (
            "arguments",
            {"messages": [{**HELLO[0], "tool_calls": [SPOILT]}]},
            "must be JSON, got '{'",
        ),
    )
}


TAKEN_OF_TODAY = {
    "max_completion_tokens": 2,
    "reasoning_effort": "none",
    "verbosity": "medium",
    "function_call": "none",
    "prediction": {"type": "content", "content": "The answer is"},
    "prompt_cache_key": "me",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "me",
    "service_tier": "flex",
    "store": True,
}


HARMLESS = {"metadata", "prediction", "user"} | {
    name for name in TAKEN_OF_TODAY if name.startswith("prompt_cache")
}
HARMLESS |= {"safety_identifier", "service_tier", "store"}
OPTIONS = {"extra_headers", "extra_query", "extra_body", "timeout"}  # of the client itself


def test_each_field_of_the_client_is_taken_or_refused_by_name(url):
    """Whatever fields its newest version has."""
    plain = {"model": "tiny", "messages": HELLO, "temperature": 0}

    async def talk(client):
        known = set(inspect.signature(client.chat.completions.create).parameters)
        taken = {name: what for name, what in TAKEN_OF_TODAY.items() if name in known}
        answer = await client.chat.completions.create(**plain, **taken, n=2, seed=3)
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
        for field in known - set(plain) - HARMLESS - OPTIONS:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(**plain, **{field: {"never": "heard"}})
            words = raised.value.body["message"]
            own = {"max_completion_tokens": "max_new_tokens", "max_tokens": "max_new_tokens"}
            assert own.get(field, field) in words, (field, words)

    run(url, talk)


def post(url, body, route="completions"):
    """Status and body of a request in plain HTTP."""
    asked = {"max_tokens": 1, "temperature": 0, **body}
    return send(f"{url}/{route}", json.dumps(asked).encode())


def send(url, data, method="POST"):
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("body", TAKEN, ids=lambda body: ",".join(body)[:60])
def test_fields_that_change_nothing_are_taken(url, body):
    route = "chat/completions" if "messages" in body else "completions"
    status, found = post(url, body, route)
    assert status == 200, found


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_would_change_an_answer_are_refused_by_name(url, case):
    route, body, words = REFUSED[case]
    status, found = post(url, body, route)
    assert status == 400
    assert words in found["error"]["message"]


def test_errors_have_the_form_of_openai_and_no_paths(url, app):
    status, found = post(url, {"prompt": "a", "model": "gpt-0"})
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    status, found = send(url + "/embeddings", b"{}")
    assert (status, found["error"]["code"]) == (404, "unknown_url")
    status, found = send(url + "/completions", None, method="GET")
    assert (status, found["error"]["code"]) == (405, "method_not_allowed")
    for raw in (b"{", b"[" * 100_000, b'{"prompt": ' + b"9" * 10_000 + b"}"):
        status, found = send(url + "/completions", raw)
        assert status == 400
    serving = app.state.serving
    told = serving.words(ValueError(f"{serving.checkpoint.directory}/x has no tokenizer"))
    assert told == "tiny/x has no tokenizer"


def test_a_request_that_is_too_long_is_refused(url, monkeypatch):
    monkeypatch.setattr(sys.modules["openai_server"], "MOST_BYTES", 1000)
    status, found = post(url, {"prompt": "a" * 1000})
    assert status == 400
    assert "at most 1000 bytes" in found["error"]["message"]


def test_a_client_that_leaves_while_it_sends_leaves_no_traceback(url, app, caplog):
    address = urlsplit(url)
    for _ in range(5):
        with socket.create_connection((address.hostname, address.port)) as talk:
            head = f"POST {address.path}/completions HTTP/1.1\r\nHost: x\r\n"
            talk.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    time.sleep(0.5)
    assert post(url, {"prompt": "a"})[0] == 200
    assert not [record for record in caplog.records if record.exc_info]
    idle(app)


@pytest.mark.parametrize("text", ["a" * 999, "ab" * 500, "a" * 500 + "b"])
def test_what_is_held_back_may_be_the_beginning_of_a_stop(text):
    held_back = sys.modules["openai_server"].held_back
    for stop in ("a", "ab", "aab", "a" * 200, "a" * 199 + "b", "b" * 200, "ba" * 100):
        expected = max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        assert held_back(text, stop) == expected


def test_settings_of_the_template_reach_it(url, app, monkeypatch):
    seen = []
    checkpoint = app.state.serving.checkpoint
    encode = type(checkpoint).encode

    def watch(self, prompt, *, template=None):
        seen.append(template)
        return encode(self, prompt, template=template)

    monkeypatch.setattr(type(checkpoint), "encode", watch)
    status, _ = post(
        url, {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat/completions"
    )
    assert status == 200
    assert seen == [{"tools": []}]
    with pytest.raises(ValueError, match="is for chat messages"):
        app.state.serving.engine.submit("a", template={})


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


def test_the_next_turn_of_a_chat_reads_only_what_is_new(url, app, checkpoint):
    """Or less, if the tokens of the answer are those of its text."""
    engine = app.state.serving.engine
    messages = [{"role": "user", "content": "Hello there, how are you today?"}]
    first = checkpoint.encode(messages)

    def say(messages):
        before = engine.stats().prompt_tokens

        async def talk(client):
            return await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=5, temperature=0
            )

        answer = run(url, talk).choices[0].message.content
        idle(app)
        return answer, engine.stats().prompt_tokens - before

    answer, _ = say(messages)
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And now?"},
    ]
    second = checkpoint.encode(messages)
    known = next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        len(first),
    )
    again, read = say(messages)
    assert known > 5
    assert read <= len(second) - known
    assert again == checkpoint.generate(messages, max_new_tokens=5).text


def test_a_step_that_fails_tells_all_clients(url, app, monkeypatch):
    """The last test of this app, whose engine then is broken."""

    def fail(*arguments, **settings):
        raise RuntimeError("device lost")

    monkeypatch.setattr(kvjax.serve.slots, "_run_loop", fail)

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


def test_the_option_for_drafts_is_the_engines(script, checkpoint, monkeypatch):
    """The engine that the server makes, without compiling its programs."""
    monkeypatch.setattr(kvjax.Engine, "warm_up", lambda self: None)
    options = "--cache fier:budget=48,dense_layers=1 --slots 2 --capacity 128 --prefix-gib 0"
    draft = [*options.split(), "--speculate", "self:3"]
    app = script.app_of_options(checkpoint, script.parser_of_options().parse_args(draft))
    assert app.state.serving.engine.speculation() is not None


def test_a_draft_that_needs_one_text_is_refused(script, checkpoint):
    given = script.parser_of_options().parse_args(["--speculate", "prompt-lookup"])
    with pytest.raises(ValueError, match=r"speculate=\.\.\.\) must be 'self'"):
        script.app_of_options(checkpoint, given)


def test_a_directory_without_a_checkpoint_is_refused_in_a_sentence(script, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main([str(tmp_path / "absent")])
    assert (
        f"error: {tmp_path / 'absent'} does not exist; give a directory"
        in capsys.readouterr().err
    )
