"""The requests of `tools/fuzz_server.py`: `fuzz_driver.py URL MODEL REQUESTS SEED HANG_SECONDS SHARE`.

Runs in schemathesis' environment, without llmopt. Of each operation of the server's OpenAPI document it sends
requests that a client would send (`fuzz_bodies.py`), then requests as the document allows them, and as it
forbids them. Ids of earlier responses are used in later ones. Prints a JSON object: for each operation how
often each status came, and the failures: a status of 500 or above, and no answer within the limit.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter, deque
from typing import Any

import requests
import schemathesis
from fuzz_bodies import bounded, mended, tightened
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import errors as hypothesis_errors

NUM_PROBES = 300
"""Requests to an operation that takes nothing."""
SHARES = {"sensible": 0.7, "allowed": 0.15, "forbidden": 0.15}
CHEAP = ("/abort", "/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Operations with a body that do not run the model."""
MAX_IDS = 64


class Fuzzer:
    """Sends requests, and counts the answers."""

    def __init__(self, url: str, model: str, hang_seconds: float, seed: int) -> None:
        self._url = url
        self._model = model
        self._hang_seconds = hang_seconds
        self._session = requests.Session()
        self._session.trust_env = False
        self._random = random.Random(seed)
        self._ids: deque[str] = deque(["none"], maxlen=MAX_IDS)
        self.statuses: dict[str, Counter[str]] = {}
        self.refusals: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest = 0.0

    def send(self, operation: str, case: Any, mode: str) -> None:
        """Send a case; what follows from its answer is recorded."""
        is_sensible = mode == "sensible"
        if is_sensible and isinstance(case.body, dict):
            case.body = mended(case.body, self._pick_id())
        if not is_sensible and isinstance(case.body, dict):
            case.body = bounded(case.body, operation)
        for name in case.path_parameters if is_sensible else ():
            known = self._model if name == "name" else self._pick_id()
            case.path_parameters[name] = known
        begin = time.monotonic()
        try:
            answer = case.call(
                base_url=self._url, session=self._session, timeout=self._hang_seconds
            )
        except requests.Timeout:
            self.failures.append(f"{operation}: no answer in time to {case.body!r}"[:2000])
            return
        except (requests.RequestException, ValueError) as error:
            if isinstance(error, requests.ConnectionError):
                self.failures.append(f"{operation}: {error!r} to {case.body!r}"[:2000])
            return  # else the client itself would not send it
        self.slowest = max(self.slowest, time.monotonic() - begin)
        counts = self.statuses.setdefault(operation, Counter())
        counts[str(answer.status_code)] += 1
        if answer.status_code >= 500:
            text = f"{operation}: {answer.status_code} {answer.text[:300]} to {case.body!r}"
            self.failures.append(text[:2000])
        elif answer.status_code < 300:
            self._remember(answer)
        elif is_sensible:
            self.refusals[f"{operation}: {answer.text[:120]}"] += 1

    def _pick_id(self) -> str:
        return self._random.choice(self._ids)

    def _remember(self, answer: Any) -> None:
        if answer.text.startswith("{"):
            found = answer.json()
            if isinstance(found, dict) and isinstance(found.get("id"), str):
                self._ids.append(found["id"])

    @property
    def num_answers(self) -> int:
        return sum(sum(counts.values()) for counts in self.statuses.values())


def fuzz(fuzzer: Fuzzer, name: str, operation: Any, mode: str, count: int, number: int) -> None:
    """Send `count` cases of an operation; the one case of an operation without input is repeated."""
    times = NUM_PROBES if count == 1 else 1
    kind = schemathesis.GenerationMode.NEGATIVE if mode == "forbidden" else None
    strategy = operation.as_strategy(generation_mode=kind or schemathesis.GenerationMode.POSITIVE)

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def every(case: Any) -> None:
        for _ in range(times):
            fuzzer.send(name, case, mode)

    try:
        every()
    except hypothesis_errors.Unsatisfiable:
        pass  # nothing is forbidden to an operation without parameters
    except (hypothesis_errors.HypothesisException, schemathesis.errors.SchemathesisError) as error:
        print(f"{name} {mode}: {error!r}"[:300], file=sys.stderr)


def is_costly(path: str, method: str) -> bool:
    """Whether the operation runs the model."""
    return method == "post" and path not in CHEAP


def main() -> None:
    url, model, count, number, hang_seconds, costly_share = sys.argv[1:]
    document = requests.get(f"{url}/openapi.json", timeout=30).json()
    schemas = {
        "sensible": schemathesis.openapi.from_dict(tightened(document, model)),
        "allowed": schemathesis.openapi.from_dict(document),
    }
    schemas["forbidden"] = schemas["allowed"]
    fuzzer = Fuzzer(url, model, float(hang_seconds), int(number))
    operations = [
        (path, method, bool(found.get("requestBody") or found.get("parameters")))
        for path, methods in document["paths"].items()
        for method, found in methods.items()
    ]
    num_left = int(count) - NUM_PROBES * sum(not takes for *_, takes in operations)
    num_costly = sum(takes and is_costly(path, method) for path, method, takes in operations)
    num_cheap = sum(takes for *_, takes in operations) - num_costly
    shares = {
        True: num_left * float(costly_share) / num_costly,
        False: num_left * (1 - float(costly_share)) / num_cheap,
    }
    for index, (path, method, takes_input) in enumerate(operations):
        share = shares[is_costly(path, method)]
        for mode, schema in schemas.items():
            num_cases = round(share * SHARES[mode]) if takes_input else 1
            if takes_input or mode == "sensible":
                name = f"{method.upper()} {path}"
                operation = schema[path][method.upper()]
                fuzz(fuzzer, name, operation, mode, num_cases, int(number) + index)
        print(f"{fuzzer.num_answers} answers, up to {method} {path}", file=sys.stderr, flush=True)
    for refusal, number_of_it in fuzzer.refusals.most_common(12):
        print(f"refused {number_of_it} times: {refusal}", file=sys.stderr)
    print(
        json.dumps(
            {
                "schemathesis": schemathesis.__version__,
                "by_operation": {
                    name: dict(sorted(counts.items())) for name, counts in fuzzer.statuses.items()
                },
                "slowest_seconds": fuzzer.slowest,
                "failures": fuzzer.failures,
            }
        )
    )


if __name__ == "__main__":
    main()
