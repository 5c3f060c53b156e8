"""Routes and fields of vLLM and SGLang that routers use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.server_process import NAME, SECONDS, Server, prompt, stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, fox"}]
SENT_BY_ROUTERS = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
SENT_WITH_CHATS = {
    **SENT_BY_ROUTERS,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}
KEY = {"Authorization": "Bearer sk-only"}


@pytest.fixture(scope="module")
def one_key(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one key, open metrics and published events."""
    events = ("--kv-events", "tcp://127.0.0.1:*", "--kv-topic", "kv@pod@tiny")
    key = {"INLAY_API_KEYS": "sk-only"}
    with Server(package, tmp_path_factory.mktemp("log"), "--public-metrics", *events, env=key) as running:
        yield running


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=SECONDS)


def answer(server: Server, path: str, body: dict[str, Any]) -> Any:
    return post(server, path, body).raise_for_status().json()


def test_text_becomes_tokens_and_text_again(server: Server) -> None:
    text = "The fox, 狐狸 and <|endoftext|> " * 200  # long enough for another thread
    made = answer(server, "/tokenize", {"model": NAME, "prompt": text, "return_token_strs": True})
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) > 2000
    assert made["max_model_len"] == 4096
    assert answer(server, "/detokenize", {"tokens": made["tokens"]}) == {"prompt": f"<begin>{text}"}
    bare = answer(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert bare == made["tokens"][1:]
    assert answer(server, "/tokenize", {"prompt": "fox"})["token_strs"] is None
    assert answer(server, "/tokenize", {"prompt": "", "add_special_tokens": False})["tokens"] == []
    assert answer(server, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_a_text_longer_than_a_prompt_may_be_is_counted(server: Server) -> None:
    assert answer(server, "/tokenize", {"prompt": "fox " * 5000})["count"] > 4096


def test_what_is_rendered_is_what_runs(server: Server) -> None:
    chat = {"model": NAME, "messages": CHAT, "max_tokens": 3, "temperature": 0, "n": 2, "stop": "x"}
    rendered = answer(server, "/v1/chat/completions/render", chat)
    assert rendered["token_ids"] == answer(server, "/tokenize", {"messages": CHAT})["tokens"]
    assert rendered["model"] == NAME
    assert rendered["sampling_params"]["temperature"] == 0
    assert rendered["sampling_params"]["max_tokens"] == 3
    assert rendered["sampling_params"]["stop"] == ["x"]
    ran = answer(server, "/v1/chat/completions", chat)
    assert len(rendered["token_ids"]) == ran["usage"]["prompt_tokens"]
    assert rendered["request_id"].startswith("chatcmpl-")

    texts = answer(server, "/v1/completions/render", prompt(3, prompt=["The fox", "A"], cache_salt="mine"))
    assert [each["token_ids"] for each in texts] == [
        answer(server, "/tokenize", {"prompt": text})["tokens"] for text in ("The fox", "A")
    ]
    assert {each["cache_salt"] for each in texts} == {"mine"}
    again = answer(server, "/v1/completions", prompt(3, prompt=texts[0]["token_ids"]))
    assert again["choices"][0]["text"] == answer(server, "/v1/completions", prompt(3))["choices"][0]["text"]


def test_rendering_runs_nothing(server: Server) -> None:
    before = server.figures()["accepted_total"]
    answer(server, "/v1/completions/render", prompt(3))
    assert server.figures()["accepted_total"] == before


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/tokenize", {}, 400, "Send either prompt or messages."),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "Send either prompt or messages."),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "'other' not found"),
        ("/tokenize", {"promt": "a"}, 400, "Did you mean prompt?"),
        ("/detokenize", {"tokens": [1, 2**30]}, 400, "does not exist"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/v1/completions/render", {"model": NAME, "prompt": "fox " * 5000}, 400, "the limit is 4096"),
        ("/v1/completions/render", {"model": NAME, "prompt": "fox", "max_tokens": 10**9}, 400, "max_tokens"),
        ("/v1/completions", {"model": NAME, "prompt": "a", "skip_special_tokens": False}, 400, "skip_special_tokens"),
        ("/v1/completions", {"model": NAME, "prompt": "a", "min_tokens": 99}, 400, "min_tokens"),
        ("/v1/chat/completions", {"model": NAME, "messages": CHAT, "continue_final_message": True}, 400, "continue_"),
    ],
)
def test_what_cannot_be_done_is_an_error(
    server: Server, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    response = post(server, path, body)
    assert response.status_code == status
    assert said in response.json()["error"]["message"]


def test_fields_of_routers_change_nothing(server: Server) -> None:
    plain = answer(server, "/v1/completions", prompt(5))["choices"]
    assert answer(server, "/v1/completions", {**SENT_BY_ROUTERS, **prompt(5)})["choices"] == plain
    chat = {"model": NAME, "messages": CHAT, "max_completion_tokens": 5, "temperature": 0}
    said = answer(server, "/v1/chat/completions", chat)["choices"]
    assert answer(server, "/v1/chat/completions", {**chat, **SENT_WITH_CHATS})["choices"] == said


def test_information(server: Server) -> None:
    for path in ("/server_info", "/get_server_info"):
        found = httpx.get(server.url + path, timeout=SECONDS).raise_for_status().json()
        assert (found["served_model_name"], found["max_running_requests"], found["page_size"]) == (NAME, 4, 32)
    for path in ("/model_info", "/get_model_info"):
        assert httpx.get(server.url + path, timeout=SECONDS).raise_for_status().json()["model_path"] == NAME


def gauges(server: Server) -> dict[str, float]:
    """Figures under vLLM's names, without labels."""
    return {
        name.removeprefix("vllm:").partition("{")[0]: value
        for name, value in server.figures().items()
        if name.startswith("vllm:")
    }


def test_the_load_is_told(server: Server) -> None:
    server.wait_until(lambda figures: figures["decode_sequences"] == figures["prefill_sequences"] == 0)
    idle = httpx.get(f"{server.url}/get_load", timeout=SECONDS).json()
    assert idle == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    assert gauges(server) == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "cache_config_info": 1,
    }
    with stream(server, 3000, prompt=["a"] * 5) as response:
        body = response.iter_bytes()
        next(body)
        now = server.wait_until(lambda figures: figures["decode_sequences"] == 4)
        assert now["waiting_requests"] == 1
        told = gauges(server)
        assert (told["num_requests_running"], told["num_requests_waiting"], told["kv_cache_usage_perc"]) == (4, 1, 1)
        (load,) = httpx.get(f"{server.url}/get_load", timeout=SECONDS).json()
        assert (load["num_reqs"], load["num_waiting_reqs"]) == (5, 1)
        assert load["num_tokens"] >= 5
    server.wait_until(lambda figures: figures["decode_sequences"] == 0)


def test_labels_of_the_gauges(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    assert f'vllm:num_requests_running{{engine="0",model_name="{NAME}"}} 0.0' in text
    assert 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="' in text


def test_one_key(one_key: Server) -> None:
    """Health and, if asked, metrics need no key; the rest does. One key is one tenant, so routers know its blocks."""
    for path in ("/health", "/metrics"):
        assert httpx.get(one_key.url + path, timeout=SECONDS).status_code == 200
    for path in ("/server_info", "/get_load", "/v1/models"):
        assert httpx.get(one_key.url + path, timeout=SECONDS).status_code == 401
        assert httpx.get(one_key.url + path, headers=KEY, timeout=SECONDS).status_code == 200
    for path in ("/tokenize", "/detokenize", "/v1/completions/render", "/v1/chat/completions/render"):
        assert post(one_key, path, {"prompt": "fox"}).status_code == 401
    assert post(one_key, "/tokenize", {"prompt": "fox"}, **KEY).status_code == 200


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    assert post(server, "/tokenize", {"prompt": "x" * (1 << 21)}).status_code == 413


def test_a_server_that_drains_is_not_healthy(package: Path, tmp_path: Path) -> None:
    with Server(package, tmp_path) as ending, stream(ending, 3000) as response:
        body = response.iter_bytes()
        next(body)
        assert httpx.get(f"{ending.url}/health", timeout=SECONDS).status_code == 200
        ending.process.terminate()
        ending.wait_until(lambda figures: httpx.get(f"{ending.url}/health", timeout=SECONDS).status_code == 503)
        assert post(ending, "/tokenize", {"prompt": "fox"}).status_code == 503
