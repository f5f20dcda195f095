"""An OpenAI-compatible server: the handlers of `transformers serve` with the engine behind them."""

from stand.extra import missing_package

try:
    import fastapi  # noqa: F401
    import openai  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    install = '"stand-decoding[server]"'
    raise missing_package(error, str(error.name), asker="stand.plugins.server", install=install) from error
