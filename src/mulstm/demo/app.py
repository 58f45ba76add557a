"""The page's server: for this machine alone, and for requests that come from the page itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mulstm import heat
from mulstm.checkpoint import Checkpoint
from mulstm.demo.reading import MOST, Over, Reader
from mulstm.errors import MulstmError
from mulstm.heat import Scale
from mulstm.sample import Sampling

ADDRESS = "127.0.0.1"
LONGEST = 2_000  # symbols drawn for one request
BODY = 8 * MOST  # bytes of a request: JSON may write a byte in six
PAGE = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")}
PAGE |= {"/page.js": ("page.js", "text/javascript"), "/favicon.ico": ("icon.svg", "image/svg+xml")}
# Nothing from elsewhere, nothing for elsewhere, and nothing that a model has written can run.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def listening(port: int) -> socket.socket:
    """A socket of this machine alone; port 0 takes any that is free."""
    here = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        here.bind((ADDRESS, port))
        here.listen()  # who comes before the server runs waits for it
    except OSError as fault:
        here.close()
        raise MulstmError(
            f"Port {port} cannot be had ({fault.strerror}). Give another with --port, or 0 for any free one."
        ) from None
    return here


def serve(here: socket.socket, reader: Reader, about: dict[str, Any]) -> None:
    """Until a signal ends it."""

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            reader.close()  # a text that is being read or drawn would hold up the end
            # From now on requests are broken off, which uvicorn would tell with a traceback.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            super().handle_exit(sig, frame)

    how = uvicorn.Config(make(reader, about), log_level="error", timeout_graceful_shutdown=2)
    Server(how).run(sockets=[here])


def facts(loaded: Checkpoint, name: Path) -> dict[str, Any]:
    """What the page tells about a model."""
    recipe, metrics = loaded.model.recipe, loaded.meta.get("metrics")
    # Of the model of a run only the latter is known.
    parts = {"test": "test_bits_per_char", "validation": "valid_bits_per_char"}
    costs = {part: metrics.get(key) for part, key in parts.items()} if isinstance(metrics, dict) else {}
    # JSON has no word for what is not finite.
    sound = {part: bits for part, bits in costs.items() if isinstance(bits, int | float) and 0 <= bits < 1e9}
    part = next(iter(sound), None)
    return {
        "name": os.fsencode(name).decode(errors="replace"),
        "cell": recipe.cell,
        "hidden": recipe.hidden,
        "layers": recipe.layers,
        "parameters": loaded.model.parameter_count(),
        "alphabet": loaded.alphabet.size,
        "measured_on": part,
        "bits_per_char": None if part is None else sound[part],
    }


def make(reader: Reader, about: dict[str, Any]) -> ASGIApp:
    """The application for one model; `about` is what `facts` tells of it."""

    async def model(request: Request) -> Response:
        return JSONResponse(about)

    async def read(request: Request) -> Response:
        asked = await _asked(request)
        unit = None if asked.get("unit") is None else int(_number(asked, "unit", 0))
        return JSONResponse(await _while_wanted(request, partial(reader.read, _text(asked), unit)))

    async def go_on(request: Request) -> Response:
        asked = await _asked(request)
        how = Sampling(
            length=min(int(_number(asked, "length", 300)), LONGEST),
            temperature=_number(asked, "temperature", 1.0),
            top_p=_number(asked, "top_p", 1.0),
            seed=int(_number(asked, "seed", 1)),
        )
        pieces = await _while_wanted(request, partial(reader.go_on, _text(asked), how))
        return StreamingResponse(_lines(pieces), media_type="application/x-ndjson")

    routes = [Route(path, _file(*file)) for path, file in PAGE.items()]
    routes += [Route("/colours.css", _colours), Route("/model", model)]
    routes += [Route("/read", read, methods=["POST"]), Route("/continue", go_on, methods=["POST"])]
    made = Starlette(
        routes=routes,
        # A page from elsewhere could have its own name point here: only our names are answered.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[ADDRESS, "localhost"])],
        exception_handlers={MulstmError: _refused, HTTPException: _refused},
    )
    return _guarded(made)


async def _while_wanted(request: Request, work: Callable[[Over], Any]) -> Any:
    """What `work` gives, in a thread of its own; it is told when whoever asked has gone."""
    gone = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    watching = asyncio.ensure_future(watch())
    try:
        return await run_in_threadpool(work, gone.is_set)
    finally:
        watching.cancel()


def _guarded(app: ASGIApp) -> ASGIApp:
    """The application for its own page alone. Around all of it: answers to faults need HEADERS too."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http" and _is_foreign(Headers(scope=scope)):
            sentence = "A page from elsewhere asked for this. Open the page by its own address."
            await JSONResponse({"error": sentence}, status_code=403)(scope, receive, headed)
        else:
            await app(scope, receive, headed)

    return answer


def _is_foreign(headers: Headers) -> bool:
    """Whether a browser says that another page asks; one may link to this page."""
    own = f"http://{headers.get('host', '')}"
    is_link = headers.get("sec-fetch-mode") == "navigate"
    return headers.get("origin", own) != own or (
        headers.get("sec-fetch-site") == "cross-site" and not is_link
    )


def _file(name: str, kind: str) -> Any:
    async def answer(request: Request) -> Response:
        return Response(files(__package__).joinpath(name).read_bytes(), media_type=kind)

    return answer


async def _colours(request: Request) -> Response:
    one = heat.colours(Scale("bits", 0, 1))
    both = heat.colours(Scale("h", -1, 1, diverging=True), name="d")
    return Response(f"{one}\n{both}\n", media_type="text/css")


async def _refused(request: Request, fault: Exception) -> Response:
    code = fault.status_code if isinstance(fault, HTTPException) else 400
    sentence = fault.detail if isinstance(fault, HTTPException) else str(fault)
    return JSONResponse({"error": sentence}, status_code=code)


async def _asked(request: Request) -> dict[str, Any]:
    """The request's JSON object. A foreign page cannot send that type without asking first, in vain."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "Send JSON.")
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY:
                raise HTTPException(413, f"The text is too long. Give at most {MOST:,} bytes.")
    except ClientDisconnect:
        raise HTTPException(400, "The text did not come whole.") from None
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise HTTPException(400, "Send a JSON object.")
    return asked


def _text(asked: dict[str, Any]) -> str:
    text = asked.get("text", "")
    if not isinstance(text, str):
        raise HTTPException(400, "The text must be a string.")
    return text


def _number(asked: dict[str, Any], name: str, default: float) -> float:
    value = asked.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise HTTPException(400, f"{name} must be a number from 0 on.")
    return value


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    """What is drawn, and what ended it: a status that has been sent cannot tell that any more."""
    try:
        for piece in pieces:
            yield json.dumps({"text": piece}) + "\n"
    except MulstmError as fault:
        yield json.dumps({"error": str(fault)}) + "\n"
