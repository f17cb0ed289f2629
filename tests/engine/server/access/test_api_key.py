"""The key file: what it may hold, and refusals of one line that show no key."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.keys import (
    MAX_FILE_BYTES,
    KeyRing,
    read_key_file,
    warn_if_readable,
)
from llmopt.quant.base.errors import BadInput

SECRET = "sk-open-sesame"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return path


def test_entries_have_names_keys_and_limits(tmp_path: Path) -> None:
    text = f"""
keys:
  - name: alice
    key: {SECRET}
    rpm: 60
    tpm: 40000
    admin: true
  - {{name: bob, sha256: ["{"0" * 64}", {"A" * 64}], max_concurrency: 2}}
"""
    alice, bob = read_key_file(written(tmp_path, text))
    assert (alice.name, alice.rpm, alice.tpm, alice.admin) == ("alice", 60, 40000, True)
    assert [value.hex() for value in alice.digests()] == [DIGEST]
    assert (bob.rpm, bob.admin, bob.max_concurrency) == (None, False, 2)
    assert [value.hex() for value in bob.digests()] == ["0" * 64, "a" * 64]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "give 'keys:' alone"),
        ("[]", "give 'keys:' alone"),
        ("keys: []", "0 keys"),
        ("keys: {a: b}", "give 'keys:' alone"),
        (f"keys: [{{name: a, key: {SECRET}}}]\nother: 1", "give 'keys:' alone"),
        ("keys: [\n", "not YAML at line"),
        ("keys: [{name: a}]", "entry 1: give a key"),
        (f"keys: [{{key: {SECRET}}}]", "entry 1: name"),
        (f"keys: [{{name: 'a b', key: {SECRET}}}]", "entry 1: name"),
        (f"keys: [{{name: a, key: {SECRET}, rpms: 3}}]", "entry 1: rpms"),
        (f"keys: [{{name: a, key: {SECRET}, rpm: 0}}]", "entry 1: rpm"),
        ("keys: [{name: a, sha256: sk-open-sesame}]", "entry 1: sha256.0"),
        ("keys: [{name: a, key: 'sk-open-sesame '}]", "entry 1: a key is empty or has"),
        ("keys: [{name: a, key: ''}]", "entry 1: a key is empty or has"),
        (f"keys: [{{name: a, sha256: {hashlib.sha256(b'').hexdigest()}}}]", "an empty key"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: a, key: x}}]", "the name a is there twice"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: b, sha256: {DIGEST}}}]", "a and b have the"),
        (f"keys: [{SECRET}]", "entry 1"),
        ("keys: [" + "{name: a, key: b}," * 1001 + "]", "1001 keys"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_bad_file_is_one_line_without_a_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_key_file(written(tmp_path, text))
    message = str(refused.value)
    assert named in message and "keys.yaml" in message
    assert "\n" not in message and SECRET not in message


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        KeyRing(ServerOptions(api_key_file=tmp_path / "none.yaml"))


def test_a_file_that_everybody_reads_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("llmopt"), "propagate", True)
    path = written(tmp_path, "keys: []")
    path.chmod(0o640)
    warn_if_readable(path)
    assert not caplog.records
    path.chmod(0o604)
    warn_if_readable(path)
    assert "chmod 600" in caplog.text


def ring(tmp_path: Path, text: str, **options: object) -> KeyRing:
    return KeyRing(ServerOptions(api_key_file=written(tmp_path, text), **options))  # type: ignore[arg-type]


def test_a_client_stays_the_same_when_its_key_is_replaced(tmp_path: Path) -> None:
    keys = ring(tmp_path, "keys: [{name: a, key: k1}, {name: b, key: k2}]", rpm_per_key=7)
    a, b = keys.find(b"k1"), keys.find(b"k2")
    assert a is not None and b is not None and a.number != b.number
    assert a.limits.headers()[0][1] == b"7"
    written(tmp_path, "keys: [{name: b, key: [k2, k3], rpm: 9}, {name: c, key: k1}]")
    keys.replace(keys.read())
    c = keys.find(b"k1")
    assert c is not None and c.number not in (a.number, b.number)  # not a's prefix cache
    assert keys.find(b"k3") is keys.find(b"k2") is b
    assert b.limits.headers()[0][1] == b"9"
    assert [one.key_name for one in keys.named] == ["b", "c"]
    written(tmp_path, "keys: [{name: a, key: k9}]")
    keys.replace(keys.read())
    again = keys.find(b"k9")
    assert again is not None and again.number == a.number and keys.find(b"k2") is None


def test_keys_of_options_and_file_go_together(tmp_path: Path) -> None:
    keys = ring(tmp_path, "keys: [{name: a, key: k1}]", api_keys=("cli",))
    admin, a = keys.find(b"cli"), keys.find(b"k1")
    assert admin is not None and a is not None
    assert (admin.key_name, admin.is_admin, a.is_admin) == ("api-key-1", True, False)
    assert keys.find(b"") is None and keys.find(b"k") is None
    with pytest.raises(BadInput, match="have the same key"):
        ring(tmp_path, "keys: [{name: a, key: cli}]", api_keys=("cli",))
