"""`aioflux sign`: urls with which anyone can send one kind of request for an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from aioflux.cli._output import print_lines
from aioflux.cli._patterns import run_for_each
from aioflux.cli._text import json_line, parse_age
from aioflux.cli._uri_or_path import Json, Objects  # noqa: TC001  typer reads them

if TYPE_CHECKING:
    from aioflux.cli._uri_or_path import UriOrPath
    from aioflux.store import UrlMethod


def sign(
    uris: Objects,
    *,
    expires: Annotated[
        str,
        typer.Option(metavar="AGE", help="Time for which the url is valid: 90s, 30m, 12h, 7d."),
    ] = "1h",
    method: Annotated[
        str, typer.Option(metavar="METHOD", help="GET, HEAD, PUT or DELETE: what the url allows.")
    ] = "GET",
    as_json: Json = False,
) -> int:
    """Print a signed url for each object. Who has the url needs no credentials: keep it secret.

    The object need not exist. On gs://, a service account key or impersonated credentials sign;
    on az://, an account key. On gs:// and s3:// a url is valid for 7 days at most.

    --json: uri and url.

    Example: curl "$(aioflux sign --expires 15m gs://bucket/a.bin)" -o a.bin
    """
    seconds = parse_age(expires)

    async def show(argument: UriOrPath) -> None:
        argument.require_object("sign")
        store, key = argument.open()
        allowed = cast("UrlMethod", method.upper())  # `Store.sign` checks it
        url = await store.sign(key, method=allowed, expires=seconds)
        row = {"uri": str(argument.location), "url": url}
        await print_lines(json_line(row) if as_json else url)

    return run_for_each(uris, show)
