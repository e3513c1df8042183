"""What the parts of the client share: settings, the transport, small request helpers.

Not for: any path of the interface; those are in `client`, `log_calls` and `admin_calls`.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import quote

from gangline.client.config import Settings, resolve
from gangline.client.errors import GanglineError, ServerFailed
from gangline.client.http import Call, Exchange, Transport


class BaseClient:
    """Holds one transport. Use as a context manager, or call `close`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        environ: Mapping[str, str] | None = None,
        on_exchange: Callable[[Exchange], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        """Find server and token: arguments, then GANGLINE_URL and GANGLINE_TOKEN, then the config file.

        `timeout_seconds` bounds one exchange. `on_exchange` sees every exchange, `on_trouble` a sentence when a long
        wait goes on through an outage. No I/O but reading the config file. Raises NotAllowed when no server is known.
        """
        self.settings: Settings = resolve(url, token, os.environ if environ is None else environ)
        self.transport = Transport(self.settings, timeout_seconds=timeout_seconds, on_exchange=on_exchange)
        self.on_trouble = on_trouble

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()

    def get(self, path: str, **params: Any) -> Any:
        """JSON of `GET path`; parameters that are None are left out."""
        return self.transport.json(Call(method="GET", path=path, params=query(params)))

    def post(self, path: str, body: Any, *, key: str | None = None) -> Any:
        """JSON of `POST path` with a JSON body. With `key` it may be repeated after a lost answer."""
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.transport.json(
            Call(method="POST", path=path, headers=headers, content=json.dumps(body).encode("utf-8"))
        )

    def put(self, path: str) -> None:
        """`PUT path` without a body."""
        self.transport.send(Call(method="PUT", path=path))

    def delete(self, path: str) -> None:
        """`DELETE path`."""
        self.transport.send(Call(method="DELETE", path=path))

    def pages(self, path: str, page_limit: int, **params: Any) -> Iterator[dict[str, Any]]:
        """The items of a list, page after page, as far as they are asked for."""
        cursor: str | None = None
        while True:
            page = self.get(path, limit=page_limit, cursor=cursor, **params)
            yield from items_of(page)
            cursor = page.get("next")
            if not cursor:
                return


def items_of(page: Any) -> list[dict[str, Any]]:
    """The items of a list answer."""
    items = page.get("items") if isinstance(page, dict) else None
    if not isinstance(items, list):
        raise ServerFailed("the server's list has no items", fix="check that the address is a Gangline server")
    return items


def query(params: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Query parameters as text: None left out, lists repeated, a trailing `_` (Python keywords) dropped."""
    pairs: list[tuple[str, str]] = []
    for name, value in params.items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if item is not None:
                text = str(item).lower() if isinstance(item, bool) else str(item)
                pairs.append((name.removesuffix("_"), text))
    return tuple(pairs)


def segment(text: str | int) -> str:
    """A value as one segment of a path, whatever characters it has."""
    word = quote(str(text), safe="")
    if word in ("", ".", ".."):
        raise GanglineError(f"{str(text)!r} is not a name", code="usage")
    return word


def new_key() -> str:
    """A fresh Idempotency-Key."""
    return uuid.uuid4().hex
