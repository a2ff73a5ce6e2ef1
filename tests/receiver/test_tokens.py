"""Tokens and passwords: as people write them down, and told to nobody."""

from __future__ import annotations

import httpx
import pytest

from deltastore.errors import DeltastoreError, EngineError, UsageError
from deltastore.tokens import read_token
from receiver.cli.asking import ask
from receiver.engines import make_engine
from receiver.engines.gated import behind_gateway
from receiver.gateway.server import GatewayServer
from receiver.status import Status, StatusServer

NOWHERE = "http://user:pa55word@127.0.0.1:9"


def told(error):
    return f"{error} {error.key} {error.hint}"


@pytest.mark.parametrize("kind", ["torch", "vllm", "sglang"])
def test_a_password_in_an_engines_url_is_told_to_nobody(kind):
    engine = make_engine(kind, url=NOWHERE)
    with pytest.raises(EngineError) as caught:
        engine.info()
    engine.close()
    assert "127.0.0.1:9" in told(caught.value)
    assert "pa55word" not in told(caught.value)
    with pytest.raises(UsageError) as refused:
        make_engine(kind, url=NOWHERE.replace("http", "ftp"))
    assert "pa55word" not in told(refused.value)


def test_a_password_in_a_gateways_urls_is_told_to_nobody(monkeypatch):
    monkeypatch.setattr("receiver.engines.gated._PATIENCE_SECONDS", 0.0)
    engine = behind_gateway(make_engine("none"), NOWHERE)
    with pytest.raises(EngineError) as caught:
        engine.info()
    engine.close()
    assert "pa55word" not in told(caught.value)
    ftp = NOWHERE.replace("http", "ftp")
    with pytest.raises(UsageError) as refused:
        behind_gateway(make_engine("none"), ftp)
    assert "pa55word" not in told(refused.value)
    with pytest.raises(UsageError) as refused:
        GatewayServer(ftp, "127.0.0.1:0", control="127.0.0.1:0")
    assert "pa55word" not in told(refused.value)


def test_white_space_round_a_token_is_no_part_of_it(monkeypatch, tmp_path):
    monkeypatch.setenv("RECEIVER_TOKEN", " s3cret\n")
    status = Status(store="s", checkpoint=str(tmp_path), target="latest")
    with StatusServer(status, "127.0.0.1:0", token=read_token("RECEIVER_TOKEN"), receiver=None) as server:
        assert ask(server.url, "GET", "/status", fields=("state",))["state"] == "starting"
        sent = httpx.get(f"{server.url}/status", headers={"Authorization": "Bearer s3cret"}, trust_env=False)
        assert sent.status_code == 200
        assert httpx.get(f"{server.url}/status", trust_env=False).status_code == 401


@pytest.mark.parametrize("token", ["s\u00e9cret", "s3\ncret", "s3\udcffcret"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_token_that_no_header_carries_is_wrong_use_and_told_to_nobody(monkeypatch, kind, token):
    monkeypatch.setenv("RECEIVER_ENGINE_TOKEN", token)
    with pytest.raises(DeltastoreError) as caught:
        make_engine(kind, url="http://127.0.0.1:9").info()
    assert isinstance(caught.value, UsageError)
    assert token not in told(caught.value)


def test_no_token_is_none(monkeypatch):
    monkeypatch.setenv("RECEIVER_TOKEN", "\n")
    assert read_token("RECEIVER_TOKEN") is None
    monkeypatch.delenv("RECEIVER_TOKEN")
    assert read_token("RECEIVER_TOKEN") is None
