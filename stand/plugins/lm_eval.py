"""lm-eval's harness: the model class `stand`, which generates by the engine and scores as `hf` does.

    python -m stand.plugins.lm_eval run --model stand --model_args pretrained=MODEL --tasks TASK

takes what `lm-eval` takes; lm-eval itself finds models only in its own table. From Python: pass a `StandLM` as `model`
to `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

import sys

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from stand.drafters.blended import BlendedDrafter
from stand.extra import missing_package
from stand.plugins.generate import engine_of, stand_generate, use_engine
from stand.stats import Stats
from stand.trees import BlendedLookup
from stand.wrapping import wrap

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM, stop_sequences_criteria
except ModuleNotFoundError as error:
    raise missing_package(error, "lm_eval", asker="stand.plugins.lm_eval", install='"lm-eval[hf]"') from error


class HarnessStops(StoppingCriteria):
    """lm-eval's own criteria for stop strings, which look at new tokens alone, for one row without padding.

    The engine asks every row's copy for the first time when the row has one new token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: list[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._criteria: StoppingCriteriaList | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **others: object) -> bool:
        if self._criteria is None:
            num_prompt = input_ids.shape[1] - 1
            self._criteria = stop_sequences_criteria(self._tokenizer, self._stop, num_prompt, batch_size=1)
        return any(criterion(input_ids, scores) for criterion in self._criteria)


@register_model("stand")
class StandLM(HFLM):
    """HFLM whose `generate_until` decodes by the engine. Loglikelihoods are the plain model's, as HFLM has them.

    Greedy responses are HFLM's. Sampled ones have their law; `torch.manual_seed` decides them, as it does HFLM's.
    lookup: a file that the drafter starts from; share: a folder in which processes tell each other what they learn
    (`BlendedDrafter`); further arguments are HFLM's.
    `stats`: what all generation so far was worth (`stand.stats.Stats`).

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError by name for a setting that
    cannot.
    """

    def __init__(self, pretrained: object, lookup: str | None = None, share: str | None = None, **settings: object):
        learned = None if lookup is None else BlendedLookup.load(lookup)
        drafter = BlendedDrafter(learned, share=share)  # before the model, which takes minutes
        super().__init__(pretrained=pretrained, **settings)
        self.stats = Stats()
        if self.backend != "causal":
            raise ValueError(f"stand serves decoder-only models, got backend {self.backend!r}; use --model hf")
        if self.mixed_precision_dtype is not None:
            raise ValueError(
                f"mixed_precision_dtype must be None, got {self.mixed_precision_dtype}; load the model in one dtype"
            )
        use_engine(wrap(self.model, self.tokenizer, drafter=drafter))

    def save_lookup(self, path: str) -> None:
        """Write what the drafter has learned, for `lookup=` of a later run. Raises OSError."""
        engine_of(self.model).lookup.save(path)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **settings: object
    ) -> torch.Tensor:
        """What HFLM asks of its model: int64[B, L] -> int64[B, at most max_length]."""
        settings.setdefault("temperature", 0.0)
        if settings["temperature"] == 0.0 and not settings.get("do_sample"):
            del settings["temperature"]
            settings["do_sample"] = False
        output = self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=StoppingCriteriaList([HarnessStops(self.tokenizer, stop)]),
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            custom_generate=stand_generate,
            **settings,
        )
        self.stats = self.stats + output.stats
        return output.sequences

    def get_model_info(self) -> dict:
        """HFLM's, and what the drafts were worth; lm-eval puts it into its results."""
        return {
            **super().get_model_info(),
            "stand_tokens_per_step": self.stats.mean_acceptance_length,
            "stand_tokens_per_second": self.stats.tokens_per_second,
        }


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
