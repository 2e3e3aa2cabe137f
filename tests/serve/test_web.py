"""What HTTP does to a reply before anybody reads it."""

import asyncio

import h11
import pytest

from notepad_jax.serve.web import Door


@pytest.mark.parametrize("key", [None, "secret-1"], ids=["routes", "door"])
def test_a_reply_to_what_turned_out_to_be_no_http_is_dropped(key):
    """The head was good and the body is not: uvicorn has said so, and takes no other reply."""
    said, come = [], [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        said.append(message["status"])
        raise h11.LocalProtocolError("can't handle event type Response when state=MUST_CLOSE")

    async def receive():
        return come.pop(0)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    asyncio.run(Door(app, key, key, ())(scope, receive, send))
    assert said == [401 if key else 200] and not come  # it stayed until the line was closed
