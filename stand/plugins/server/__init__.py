"""An OpenAI-compatible server: the handlers of `transformers serve` with the engine behind them."""
