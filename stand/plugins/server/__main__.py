"""Serve one model to OpenAI's clients: python -m stand.plugins.server MODEL."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Coroutine
from contextlib import nullcontext
from functools import partial

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers.cli.serving.model_manager import ModelManager

from stand.argument_checks import whole_number
from stand.drafters.blended import BlendedDrafter
from stand.plugins.open_runs import ClosedError
from stand.plugins.saving import Saver, check_can_be_written
from stand.plugins.server.answers import Answers, OneManager
from stand.plugins.server.handlers import ChatHandler, TextHandler, error_told
from stand.plugins.server.responses import ResponseHandler
from stand.seeds import checked_seed
from stand.trees import BlendedLookup
from stand.wrapping import wrap

POLLING = 0.5  # seconds between two looks at whether a client is still there


class Server(uvicorn.Server):
    """Ends what is decoded before it waits for those who are connected."""

    def __init__(self, config: uvicorn.Config, manager: Answers, saver: Saver | None = None):
        super().__init__(config)
        self._manager, self._saver = manager, saver

    async def shutdown(self, sockets: list | None = None) -> None:
        await asyncio.to_thread(self._manager.stop)
        await super().shutdown(sockets)
        if self._saver is not None:
            self._saver.finish()  # here: uvicorn raises SIGTERM again, by which the process ends


def new_app(manager: Answers, models: ModelManager, *, chat_template_kwargs: dict | None = None) -> FastAPI:
    """The endpoints. What does not fit is answered by 400 and the rule it breaks."""
    state = OneManager(manager)
    chats = ChatHandler(models, state, chat_template_kwargs=chat_template_kwargs)
    texts = TextHandler(models, state)
    responses = ResponseHandler(models, state, chat_template_kwargs=chat_template_kwargs)
    begun = int(time.time())
    app = FastAPI()
    for kind, status in ((ValueError, 400), (TemplateError, 400), (ClosedError, 503), (Exception, 500)):
        app.add_exception_handler(kind, partial(_tell, status))
    app.add_exception_handler(RequestValidationError, _tell_body)
    app.add_exception_handler(HTTPException, _pass_on)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: dict) -> object:
        return await _while_connected(request, chats.handle_request(_given(body), _name("chatcmpl", request)))

    @app.post("/v1/completions")
    async def text(request: Request, body: dict) -> object:
        return await _while_connected(request, texts.handle_request(_given(body), _name("cmpl", request)))

    @app.post("/v1/responses")
    async def respond(request: Request, body: dict) -> object:
        return await _while_connected(request, responses.handle_request(_given(body), _name("stand", request)))

    def shown() -> dict:
        return {"id": models.force_model, "object": "model", "created": begun, "owned_by": "stand"}

    @app.get("/v1/models")
    async def list_models() -> dict:
        return {"object": "list", "data": [shown()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict:
        if name != models.force_model:
            raise HTTPException(status_code=404, detail=f"{name} is not served, {models.force_model} is")
        return shown()

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    return app


async def _while_connected(request: Request, answering: Coroutine[None, None, object]) -> object:
    """The answer; one that nobody waits for any more is ended."""
    task = asyncio.ensure_future(answering)
    try:
        while not (await asyncio.wait({task}, timeout=POLLING))[0]:
            if await request.is_disconnected():
                raise ClosedError("nobody waits for the answer any more")
        return task.result()
    finally:
        task.cancel()


def main(arguments: list[str] | None = None) -> None:
    """Load the model, refuse what cannot be served exactly, and serve until an interrupt."""
    options = _parser().parse_args(arguments)
    is_told = options.log_level in ("info", "debug", "trace")
    logging.getLogger("transformers.cli").setLevel(logging.INFO if is_told else logging.ERROR)  # else a line a request
    try:
        drafter = _checked(options)  # before the model, which takes minutes
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    models = ModelManager(
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        force_model=options.model,
    )
    model, processor = models.load_model_and_processor(models.process_model_name(options.model))
    engine = wrap(model, processor, drafter=drafter, verifier=options.verifier)
    marks = {"thoughts_begin": options.thoughts_begin, "thoughts_end": options.thoughts_end}
    manager = Answers(engine, num_rows=options.rows, seed=options.seed, draft=options.draft, **marks)
    saver = None if options.save_lookup is None else Saver(manager, engine.lookup, options.save_lookup)
    kept = nullcontext() if options.keep_prompts is None else engine.keep_prompts(options.keep_prompts * 2**30)
    app = new_app(manager, models, chat_template_kwargs=options.chat_template_kwargs)
    config = uvicorn.Config(app, host=options.host, port=options.port, log_level=options.log_level)
    with kept:
        Server(config, manager, saver).run()


def _checked(options: argparse.Namespace) -> BlendedDrafter:
    """The drafter. Raises OSError and ValueError for options that do not fit, as far as they need no model."""
    whole_number("--rows", options.rows, "16 is usual")
    checked_seed(options.seed)
    kept, kwargs, learned = options.keep_prompts, options.chat_template_kwargs, None
    if kept is not None and not 0 < kept < math.inf:
        raise ValueError(f"--keep-prompts must be a positive number of GiB, got {kept}; leave it out to keep none")
    if not isinstance(kwargs, dict):
        raise ValueError(f'--chat-template-kwargs must be an object of JSON, got {kwargs!r}; {{"name": 1}} is one')
    if options.save_lookup is not None:
        check_can_be_written(options.save_lookup, "--save-lookup")
    if options.lookup is not None:
        try:
            learned = BlendedLookup.load(options.lookup)
        except OSError as error:
            raise ValueError(
                f"--lookup must be a file that was saved, got {options.lookup!r} ({error.strerror}); leave it out to "
                "begin with none"
            ) from error
    return BlendedDrafter(learned, share=options.share)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stand.plugins.server", description=__doc__)
    add = parser.add_argument
    add("model", help="a folder, or a name on the hub; requests name it so, too")
    add("--host", default="localhost", help="address to listen on (localhost: this machine alone)")
    add("--port", type=int, default=8000, help="(8000)")
    add("--rows", type=int, default=16, help="answers of equal settings that are decoded together at most (16)")
    add("--device", default="auto", help="as transformers takes it (auto)")
    add("--dtype", default="auto", help="as transformers takes it (auto)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model (no)")
    add("--verifier", default="traversal", help="which rule (traversal); docs/verifiers.md")
    add("--seed", type=int, help="of the first run; later ones count on (drawn)")
    add("--no-drafts", dest="draft", action="store_false", help="ordinary decoding, to compare with (drafts)")
    add("--lookup", help="a file that the drafter starts from (none)")
    add("--save-lookup", help="a file that it is saved to, every few minutes and at the end (none)")
    add("--share", help="a folder in which processes tell each other what they learn (none)")
    add("--keep-prompts", type=float, help="GiB of prompts' keys that stay for requests that begin alike (none)")
    add("--thoughts-end", help='text that ends thoughts, such as "</think>" (the model is taken for one without any)')
    add("--thoughts-begin", help='text that begins them, such as "<think>" (they begin with the first token)')
    add("--chat-template-kwargs", type=json.loads, default={}, help="JSON for the chat template (none)")
    add("--log-level", default="warning", help="of the web server (warning)")
    return parser


def _given(body: dict) -> dict:
    """Fields that are null are as if they were not there."""
    return {name: value for name, value in body.items() if value is not None}


def _name(kind: str, request: Request) -> str:
    return request.headers.get("x-request-id") or f"{kind}-{uuid.uuid4().hex}"


async def _tell(status: int, request: Request, error: Exception) -> JSONResponse:
    return _error(status, str(error) if status < 500 else f"{type(error).__name__}: {error}")


async def _tell_body(request: Request, error: RequestValidationError) -> JSONResponse:
    return _error(400, f"the body must be an object of JSON, got {error.errors()[0]['msg']}; see OpenAI's reference")


async def _pass_on(request: Request, error: HTTPException) -> JSONResponse:
    return _error(error.status_code, str(error.detail))


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": error_told(kind, message)}, status_code=status)


if __name__ == "__main__":
    main()
