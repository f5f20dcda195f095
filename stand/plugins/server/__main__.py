"""Serve one model to OpenAI's clients: python -m stand.plugins.server MODEL."""

from __future__ import annotations

import argparse
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from transformers.cli.serving.model_manager import ModelManager

from stand.drafters.blended import BlendedDrafter
from stand.plugins.saving import Saver, check_can_be_written
from stand.plugins.server.answers import Answers, OneManager
from stand.plugins.server.handlers import ChatHandler, TextHandler
from stand.trees import BlendedLookup
from stand.wrapping import wrap


def new_app(manager: Answers, models: ModelManager, *, chat_template_kwargs: dict | None = None) -> FastAPI:
    """The endpoints. What does not fit is answered by 400 and the rule it breaks."""
    state = OneManager(manager)
    chats = ChatHandler(models, state, chat_template_kwargs=chat_template_kwargs)
    texts = TextHandler(models, state)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        manager.stop()

    app = FastAPI(lifespan=lifespan)
    begun = int(time.time())

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: ValueError) -> JSONResponse:
        return _error(400, str(error))

    @app.exception_handler(Exception)
    async def tell(request: Request, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__}: {error}")

    @app.exception_handler(HTTPException)
    async def pass_on(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: dict) -> object:
        return await chats.handle_request(body, _name("chatcmpl", request))

    @app.post("/v1/completions")
    async def text(request: Request, body: dict) -> object:
        return await texts.handle_request(body, _name("cmpl", request))

    @app.get("/v1/models")
    async def list_models() -> dict:
        model = {"id": models.force_model, "object": "model", "created": begun, "owned_by": "stand"}
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    return app


def main(arguments: list[str] | None = None) -> None:
    """Load the model, refuse what cannot be served exactly, and serve until an interrupt."""
    options = _parser().parse_args(arguments)
    is_told = options.log_level in ("info", "debug", "trace")
    logging.getLogger("transformers.cli").setLevel(logging.INFO if is_told else logging.ERROR)  # else a line a request
    if options.save_lookup is not None:
        check_can_be_written(options.save_lookup, "--save-lookup")
    learned = None if options.lookup is None else BlendedLookup.load(options.lookup)
    drafter = BlendedDrafter(learned, share=options.share)  # before the model, which takes minutes
    models = ModelManager(
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        force_model=options.model,
    )
    model, processor = models.load_model_and_processor(models.process_model_name(options.model))
    engine = wrap(model, processor, drafter=drafter, verifier=options.verifier)
    manager = Answers(
        engine, num_rows=options.rows, seed=options.seed, draft=options.draft, thoughts_end=options.thoughts_end
    )
    saver = None if options.save_lookup is None else Saver(manager, engine.lookup, options.save_lookup)
    kept = nullcontext() if options.keep_prompts is None else engine.keep_prompts(options.keep_prompts * 2**30)
    app = new_app(manager, models, chat_template_kwargs=options.chat_template_kwargs)
    try:
        with kept:
            uvicorn.run(app, host=options.host, port=options.port, log_level=options.log_level)
    finally:
        if saver is not None:
            saver.finish()


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
    add("--thoughts-end", help='text behind which answers by a schema begin, such as "</think>" (they begin at once)')
    add("--chat-template-kwargs", type=json.loads, default={}, help="JSON for the chat template (none)")
    add("--log-level", default="warning", help="of the web server (warning)")
    return parser


def _name(kind: str, request: Request) -> str:
    return request.headers.get("x-request-id") or f"{kind}-{uuid.uuid4().hex}"


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    told = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": told}, status_code=status)


if __name__ == "__main__":
    main()
