from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.fakes import Script, make_app, running


@pytest.fixture(scope="module")
def _server(request: pytest.FixtureRequest) -> Iterator[Any]:
    app, manager = make_app(**getattr(request.module, "FLAGS", {}))
    with running(app) as url, httpx.Client(base_url=url, timeout=10) as http:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)
        yield SimpleNamespace(url=url, http=http, openai=client, manager=manager)


@pytest.fixture
def server(_server: Any) -> Any:
    """A running server: `http` and `openai` clients, and the `script` that its fake model follows."""
    _server.script = _server.manager.script = Script()
    return _server
