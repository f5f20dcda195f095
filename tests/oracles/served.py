"""A server for OpenAI's clients in a thread of the test's process, and their own client."""

import copy
import json
import re
import threading
import time

import openai
import torch
import uvicorn
from free_port import free_port
from letter_tokenizer import letter_tokenizer
from tiny_models import tiny_model
from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager

import stand
from stand.plugins.server import __main__ as command
from stand.plugins.server.answers import Answers

CALLS = {  # TAtrueU calls the tool A with the argument true
    "defaults": {"role": "assistant"},
    "start_anchor": "ABC",
    "fields": {
        "tool_calls": {
            "open_pattern": "T(?P<name>[A-D])", "close": "U", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": "=", "content": "text"},
    },
}  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Served:
    """A server in a thread."""

    def __init__(self, folder, tokenizer, model, *, chat_template: str | None = TEMPLATE, **settings):
        """tokenizer: or a processor. chat_template: None for its own."""
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        self.name = str(folder)
        models = ModelManager(device="cpu", force_model=self.name)
        self.model, self.tokenizer = models.load_model_and_processor(models.process_model_name(self.name))
        self.answers = Answers(stand.wrap(self.model, self.tokenizer, verifier="match"), **settings)
        port = free_port()
        app = command.new_app(self.answers, models)
        self._server = command.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"), self.answers)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)

    def chat(self, text: str | list[dict], **settings) -> object:
        """text: or contents in parts."""
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model=self.name, messages=messages, **settings)

    def text(self, prompt: object, **settings) -> object:
        return self.client.completions.create(model=self.name, prompt=prompt, **settings)

    def alone(self, prompt: object, **settings) -> stand.GenerationOutput:
        """What a fresh engine answers."""
        engine = stand.wrap(self.model, self.tokenizer, verifier="match")
        given = {"input_ids": prompt} if isinstance(prompt, list) else {"prompts": prompt}
        return engine.generate(**given, **settings)

    def repeated(self, prompt: str, fingerprint: str, **settings) -> list[stand.Trajectory]:
        """What an answer's numbers draw in a run of its own."""
        seed, first, last = map(int, re.fullmatch(r"seed (\d+), rows (\d+) to (\d+)", fingerprint).groups())
        engine = stand.wrap(self.model, self.tokenizer, verifier="match")
        rows = list(range(first, last + 1))
        found = engine.run([stand.Request(prompt, rows=rows)], seed=seed, **settings)
        return sorted(found, key=lambda one: one.row)

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


def written(tokenizer, text: str) -> dict:
    """Settings by which an answer to a prompt that ends with its first letter is the rest of the text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    biases = [[[first, second], 1e4] for first, second in zip(tokens, tokens[1:], strict=False)]
    return {"extra_body": {"generation_config": json.dumps({"sequence_bias": biases})}}


def serve_letters(folder) -> Served:
    """A tiny model of single letters."""
    torch.manual_seed(0)
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    return Served(folder, letter_tokenizer(), model, num_rows=4, seed=11)
