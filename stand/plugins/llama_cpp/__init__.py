"""llama.cpp: the engine around a model of `llama_cpp.Llama`, of a GGUF file on whatever it runs on.

>>> engine = stand.plugins.llama_cpp.wrap(llama_cpp.Llama("model.gguf", n_ctx=64), tokenizer, num_slots=16384)

A branch of a draft is one more sequence of llama.cpp's, and a node belongs to the sequences of all branches through it.
So a whole tree is scored in one `llama_decode`, and keeping a path copies and moves no keys.
"""

from stand.extra import missing_package

try:
    from stand.plugins.llama_cpp.door import wrap
except ModuleNotFoundError as error:
    raise missing_package(error, "llama_cpp", asker=__name__, install="llama-cpp-python") from error

__all__ = ["wrap"]
