"""A server's own metrics in the record: read by the names of several servers, and compared with what was sent."""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from llmopt.bench.load.address import Address, Sample, Scraper, parse_samples, pass_metrics
from llmopt.bench.load.json_http import _opener
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.report.run_report import run_page
from llmopt.bench.session.run_sessions import run_bench

from tests.support.live_server import make_engine, running
from tests.support.page_parts import sections_of

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16"} 1.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{le="+Inf"} 4.0
vllm:request_queue_time_seconds_count 4.0
vllm:request_queue_time_seconds_sum 2.0
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9.0
"""


def test_names_of_servers_are_one_vocabulary() -> None:
    samples = parse_samples(VLLM)
    assert samples["num_requests_running"] == Sample("gauge", 5.0)
    assert samples["kv_cache_usage"] == Sample("gauge", 0.375)
    assert samples["num_preemptions"] == Sample("counter", 7.0)
    assert samples["request_queue_time_seconds_count"] == Sample("count", 4.0)
    assert not {"cache_config_info", "num_preemptions_created"} & samples.keys()
    assert not any("python" in name or "bucket" in name for name in samples)
    llama = "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 2\n"
    assert parse_samples(llama) == {"num_requests_running": Sample("gauge", 2.0)}
    both = "# TYPE vllm:x gauge\nvllm:x 1\n# TYPE llmopt_x gauge\nllmopt_x 1\n"
    assert parse_samples(both) == {"x": Sample("gauge", 1.0)}


def test_a_pass_is_differences_means_and_maxima() -> None:
    def scrape(running: float, hits: float, seen: float) -> dict[str, Sample]:
        return {
            "num_requests_running": Sample("gauge", running),
            "prefix_cache_hits": Sample("counter", hits),
            "prefix_cache_queries": Sample("counter", hits * 4),
            "queue_seconds_count": Sample("count", seen),
            "queue_seconds_sum": Sample("sum", seen * 0.5),
        }

    metrics = pass_metrics([scrape(0, 10, 1), scrape(6, 12, 2), scrape(3, 30, 5)], 0)
    assert metrics is not None
    assert metrics["counters"]["prefix_cache_hits"] == 20
    assert metrics["gauges"]["num_requests_running"] == {"mean": 3, "max": 6}
    assert metrics["means"] == {"queue_seconds": 0.5}
    assert metrics["prefix_cache_hit_rate"] == 0.25 and metrics["draft_acceptance"] is None
    # A counter that fell belongs to another process.
    restarted = pass_metrics([scrape(0, 10, 1), scrape(0, 2, 1)], 0)
    assert restarted is not None and "prefix_cache_hits" not in restarted["counters"]
    assert pass_metrics([scrape(0, 10, 1)], 3) is None


def test_a_run_has_the_metrics_of_its_server() -> None:
    with running(make_engine()) as server:
        options = {"num_prompts": 6, "num_runs": 2, "output_len": 5, "check_client": False}
        given = {**options, "base_url": server.url, "num_warmups": 2, "max_concurrency": 3}
        run = run_bench(BenchOptions.model_validate(given))
    ours = run.result["llmopt"]
    metrics = ours["server_metrics"]
    assert metrics["reason"] is None and len(metrics["runs"]) == 2
    # The warm-up is not in it: exactly the tokens of the passes.
    assert metrics["counters"]["generation_tokens"] == run.result["total_output_tokens"] == 60
    assert metrics["counters"]["prompt_tokens"] == run.result["total_input_tokens"]
    assert all(each["counters"]["generation_tokens"] == 30 for each in metrics["runs"])
    assert ours["preemptions"] == 0 and metrics["gauges"]["kv_cache_usage"]["max"] >= 0
    (section,) = sections_of("server_metrics", ours)
    assert section in run_page(run.result, {}).sections
    assert ["generation_tokens", "60"] in [list(row) for row in section.tables[1].rows]


class Silent(BaseHTTPRequestHandler):
    """A server whose /metrics is what its class says."""

    status, text = 404, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def without_metrics() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_scrapes_read_the_systems_certificates_once(
    without_metrics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[ssl.SSLContext] = []
    honest = ssl.create_default_context

    def counted() -> ssl.SSLContext:
        read.append(honest())
        return read[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    _opener.cache_clear()
    monkeypatch.setattr(Silent, "status", 200)
    for _ in range(3):
        assert Address.parse(without_metrics).get("/metrics") == b""
    assert len(read) == 1


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (404, b"", "/metrics answers HTTP 404"),
        (200, b"<html>", "not in Prometheus' text format"),
        (200, b"", "no Prometheus metrics"),
    ],
)
def test_a_server_without_metrics_says_why(
    without_metrics: str, monkeypatch: pytest.MonkeyPatch, status: int, text: bytes, words: str
) -> None:
    monkeypatch.setattr(Silent, "status", status)
    monkeypatch.setattr(Silent, "text", text)
    scraper = Scraper(Address.parse(without_metrics))
    assert scraper.reason is not None and words in scraper.reason
    scraper.start()
    assert scraper.stop() == ([], 0)


def test_a_scrape_without_its_package_names_the_extra(
    without_metrics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "status", 200)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "prometheus_client.parser", raising=False)
    reason = Scraper(Address.parse(without_metrics)).reason
    assert reason is not None and reason.endswith("pip install 'llmopt[serve]'")
