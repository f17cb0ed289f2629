"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters that come and go while others generate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.serve_local import server_options
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.adapters import LoadedAdapters, adapter_name
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM

from ...support.live_server import RunningServer, make_engine, running, slow_steps
from ...support.lora_world import write_adapter

PROMPT = "Once upon a time there was a little girl"
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(MODELS / "stories260K")
    for seed, name in enumerate(("red", "green")):
        write_adapter(folder / name, base, seed=seed)
    return folder


@pytest.fixture(scope="module")
def texts(root: Path) -> dict[str, str]:
    """The greedy texts of an engine that was started with the adapters."""
    loras = {name: root / name for name in ("red", "green")}
    llm = LLM("stories260K", dtype="float32", num_threads=1, loras=loras)
    results = llm.generate([PROMPT] * 3, GREEDY, lora=[None, *loras])
    return {name: result.text for name, result in zip(["tiny", *loras], results, strict=True)}


@pytest.fixture
def server(root: Path) -> Iterator[RunningServer]:
    options = ServerOptions(lora_folders=(root,))
    with running(make_engine("stories260K", max_loras=2, block_size=4), options) as it:
        yield it


def change(server: RunningServer, what: str, status: int = 200, key: str = "", **body: Any) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with server.http(headers=headers) as http:
        response = http.post(f"/v1/{what}_lora_adapter", json=body)
    assert response.status_code == status, response.text
    if status == 200:
        return response.text
    message = response.json()["error"]["message"]
    assert "\n" not in message
    return message


def text(server: RunningServer, model: str, **fields: Any) -> str:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 20, **fields}
    with server.http() as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def names(server: RunningServer) -> list[str]:
    return [card.id for card in server.openai().models.list()]


def num_held(server: RunningServer) -> int:
    """Adapters whose weights are held."""

    def count(engine: Engine) -> int:
        bank = engine.runner.decoder.lora_bank
        assert bank is not None
        return len(bank.keys)

    return server.on_engine(count)


def test_an_adapter_comes_and_goes(server: RunningServer, texts: dict[str, str]) -> None:
    assert names(server) == ["tiny"] and num_held(server) == 0
    said = change(server, "load", lora_name="poet", lora_path="red")
    assert said == "Success: LoRA adapter 'poet' added successfully."
    assert names(server) == ["tiny", "poet"]
    assert text(server, "poet") == texts["red"] != texts["tiny"] == text(server, "tiny")
    said = change(server, "unload", lora_name="poet")
    assert said == "Success: LoRA adapter 'poet' removed successfully."
    assert names(server) == ["tiny"] and num_held(server) == 0
    with server.http() as http:
        body = {"model": "poet", "prompt": PROMPT}
        assert http.post("/v1/completions", json=body).status_code == 404
    assert text(server, "tiny") == texts["tiny"]
    assert server.wait_until_idle().kv_blocks_used == 0


def test_a_name_loaded_anew_has_no_prefix_of_the_old_one(
    server: RunningServer, texts: dict[str, str]
) -> None:
    for folder in ("red", "green", "red"):
        change(server, "load", lora_name="poet", lora_path=folder)
        assert text(server, "poet") == texts[folder] == text(server, "poet")
        change(server, "unload", lora_name="poet")
    hits = server.on_engine(lambda engine: engine.stats.prefix_cache_hits)
    assert hits > 0  # of the second request of each
    assert server.wait_until_idle().kv_blocks_used == 0


@pytest.mark.parametrize("overlapped", [False, True], ids=["serial", "async"])
def test_requests_in_flight_keep_their_adapter(
    root: Path, texts: dict[str, str], overlapped: bool
) -> None:
    engine = make_engine("stories260K", max_loras=2, async_scheduling=overlapped)
    with running(engine, ServerOptions(lora_folders=(root,))) as server:
        change(server, "load", lora_name="poet", lora_path="red")
        long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
        expected = text(server, "poet", **long)
        ended: list[str] = []
        thread = threading.Thread(target=lambda: ended.append(text(server, "poet", **long)))
        with slow_steps(server):
            thread.start()
            server.wait_for(lambda engine: engine.stats.num_running == 1)
            change(server, "unload", lora_name="poet")
            change(server, "load", lora_name="poet", lora_path="green")
            message = change(server, "load", 400, lora_name="third", lora_path="green")
            assert message == (
                "2 adapters are loaded, 1 of them unloaded and still in use: --max-loras 2"
            )
            assert text(server, "poet") == texts["green"]
            assert thread.is_alive()
            with server.http() as http:
                assert 'running_lora_adapters="poet"' in http.get("/metrics").text
            thread.join()
        assert ended == [expected] and expected.startswith(texts["red"])
        assert server.wait_until_idle().kv_blocks_used == 0
        assert server.on_engine(lambda engine: not engine.loras.loaded.retired)
        assert num_held(server) == 1
        change(server, "load", lora_name="third", lora_path="green")
        assert num_held(server) == 2


def test_an_adapter_is_replaced_in_place(server: RunningServer, texts: dict[str, str]) -> None:
    change(server, "load", lora_name="poet", lora_path="red")
    assert text(server, "poet") == texts["red"]
    message = change(server, "load", 400, lora_name="poet", lora_path="green")
    assert message == "lora_name: 'poet' is served already: unload it first"
    change(server, "load", lora_name="poet", lora_path="green", load_inplace=True)
    assert text(server, "poet") == texts["green"] and names(server) == ["tiny", "poet"]


def test_only_folders_below_the_allowed_one_are_read(
    server: RunningServer, root: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(MODELS / "stories260K")
    outside = write_adapter(tmp_path / "outside", base)
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    (root / "files" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    refused = "lora_path: not a folder below --allowed-lora-path"
    for path in (str(outside), "../outside", "/etc", "/nowhere", "link", "files", "none", "a\0b"):
        assert change(server, "load", 400, lora_name="x", lora_path=path) == refused
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    assert "not valid JSON" in change(server, "load", 400, lora_name="x", lora_path="broken")
    assert names(server) == ["tiny"] and num_held(server) == 0


@pytest.mark.parametrize(
    ("what", "status", "body", "named"),
    [
        ("load", 400, {"lora_name": "tiny", "lora_path": "red"}, "'tiny' is served already"),
        ("load", 400, {"lora_name": "a\nb", "lora_path": "red"}, "lora_name"),
        ("load", 400, {"lora_path": "red"}, "lora_name"),
        ("load", 400, {"lora_name": "a", "lora_path": "red", "lora_int": 1}, "lora_int"),
        ("unload", 404, {"lora_name": "nobody", "lora_int_id": 3}, "no adapter 'nobody'"),
    ],
)
def test_what_is_refused(
    server: RunningServer, what: str, status: int, body: dict[str, Any], named: str
) -> None:
    assert named in change(server, what, status, **body)


def test_only_the_administrator_may_where_there_are_keys(root: Path) -> None:
    options = ServerOptions(api_keys=("a", "b"), admin_api_key="admin", lora_folders=(root,))
    with running(make_engine("stories260K", max_loras=1), options) as server:
        body: dict[str, Any] = {"lora_name": "poet", "lora_path": "red"}
        change(server, "load", 401, **body)
        assert "an admin's API key" in change(server, "load", 403, key="b", **body)
        change(server, "load", key="admin", **body)
        assert "an admin's API key" in change(server, "unload", 403, key="a", lora_name="poet")
        change(server, "unload", key="admin", lora_name="poet")


def test_the_endpoints_are_off_unless_folders_are_allowed(root: Path) -> None:
    with running(make_engine("stories260K", max_loras=1)) as server, server.http() as http:
        assert http.post("/v1/load_lora_adapter", json={}).status_code == 404
        assert "/v1/load_lora_adapter" not in http.get("/openapi.json").json()["paths"]
    with pytest.raises(BadInput, match="names the key that may"):
        ServerOptions(api_keys=("a",), lora_folders=(root,))
    with pytest.raises(BadInput, match="is not a folder"):
        ServerOptions(lora_folders=(root / "nowhere",))
    with pytest.raises(BadInput, match="give --api-key too"):
        ServerOptions(admin_api_key="admin")


@pytest.mark.parametrize(
    "given", [{"allow_runtime_lora_updating": True}, {"allowed_lora_path": [Path()]}]
)
def test_the_switch_and_the_folder_go_together(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="go together"):
        server_options(given, host="127.0.0.1")


def test_keys_and_limits_of_loaded_adapters() -> None:
    loaded = LoadedAdapters({"a": Path("a")}, 2)
    first = loaded.key("a")
    loaded.remove("a")
    second = loaded.add("a")
    assert first != second and adapter_name(second) == "a" and loaded.retired == {first}
    with pytest.raises(BadInput, match="1 of them unloaded and still in use: --max-loras 2"):
        loaded.add("b")
    loaded.retired.discard(first)
    assert loaded.add("b") == loaded.key("b") and loaded.key("a") == second
    with pytest.raises(BadInput, match="is loaded already"):
        loaded.add("a")
    with pytest.raises(BadInput, match="no adapter 'c': this engine has a, b"):
        loaded.remove("c")
    with pytest.raises(BadInput, match="max_loras = 1: 2 adapters are given"):
        EngineConfig("stories260K", loras={"a": Path("a"), "b": Path("b")}, max_loras=1)


def test_an_engine_without_room_for_adapters_says_so(root: Path) -> None:
    with pytest.raises(BadInput, match="takes no LoRA adapters"):
        make_engine("stories260K").load_lora("poet", root / "red")


@pytest.mark.whole
def test_every_tensor_parallel_worker_loads_it(root: Path, texts: dict[str, str]) -> None:
    config = EngineConfig(
        "stories260K", dtype="float32", num_threads=1, max_loras=1, tensor_parallel_size=2
    )
    engine = Engine(config)
    try:
        for name in ("red", "green"):
            engine.load_lora("poet", root / name)
            engine.add_request(name, PROMPT, GREEDY, lora="poet")
            written = ""
            while engine.has_unfinished():
                written += "".join(output.new_text for output in engine.step())
            assert written == texts[name]
            engine.unload_lora("poet")
    finally:
        engine.close()
