"""Perplexity and token-by-token greedy text of a causal language model."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and what it was taken over.

    Attributes:
        value: exp of the mean negative log-likelihood per predicted token.
        rows: whole rows of `context` tokens that were used.
        context: tokens of a row; a row predicts ``context - 1`` of them.
        dropped: tokens at the end that fill no whole row, or lie past the row limit.
    """

    value: float
    rows: int
    context: int
    dropped: int

    def __float__(self) -> float:
        return self.value


@torch.inference_mode()
def perplexity(
    model: Any, tokenizer: Any, text: str, *, context: int = 256, max_rows: int | None = None, batch: int = 8
) -> Perplexity:
    """Measures the perplexity of `model` on `text`.

    The token ids of the whole text are cut into rows of `context` ids, each row its own context; the
    incomplete last row is dropped. Losses are taken in float32 and summed in double precision.

    Args:
        model: a causal language model, called as ``model(input_ids=..., use_cache=False).logits``.
        tokenizer: called as ``tokenizer(text)["input_ids"]``.
        text: the text to predict.
        context: tokens in a row, at least 2 and at most the model's positions.
        max_rows: use only the first rows.
        batch: rows in one forward.

    Raises:
        ValueError: `context` does not fit the model, or the text fills no row.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context < 2 or (positions is not None and context > positions):
        raise ValueError(f"context must be from 2 to the model's {positions} positions, got {context}")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
    rows = ids.numel() // context
    if rows == 0:
        raise ValueError(f"the text has {ids.numel()} tokens, one row of context={context} needs as many")
    if max_rows is not None:
        rows = min(rows, max_rows)
    table = ids[: rows * context].view(rows, context)  # [rows, context]

    total = 0.0
    for chunk in table.split(batch):
        chunk = chunk.to(model.device)
        logits = model(input_ids=chunk, use_cache=False).logits  # [batch, context, vocabulary]
        # Position t predicts token t + 1: the last position of a row has nothing to predict.
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), chunk[:, 1:].flatten(), reduction="none"
        )
        total += losses.double().sum().item()
    value = math.exp(total / (rows * (context - 1)))
    logger.debug("perplexity %.4f over %d rows of %d tokens", value, rows, context)
    return Perplexity(value, rows, context, ids.numel() - rows * context)


def end_of_text_ids(model: Any) -> tuple[int, ...]:
    """The ids that end a text, from the generation config, else from the model's config."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def check_length(model: Any, prompt_tokens: int, new_tokens: int) -> None:
    """Whether a prompt and its continuation fit the model; `greedy_ids` asks only when its first token is taken.

    Raises:
        ValueError: they do not, or the prompt is empty.
    """
    if not prompt_tokens:
        raise ValueError("the prompt must have at least one token, got none")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt_tokens + new_tokens > positions:
        raise ValueError(
            f"prompt and new tokens must fit the model's {positions} positions, got {prompt_tokens} + {new_tokens}"
        )


@torch.inference_mode()
def greedy_ids(
    model: Any, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int] | None = None
) -> Iterator[int]:
    """Yields the most likely next token, one at a time, as soon as it is known.

    Args:
        model: a causal language model with a key-value cache.
        prompt_ids: ids to continue, at least one.
        max_new_tokens: how many ids to yield at most.
        stop_ids: ids that end the text (the one that ends it is not yielded); None takes the model's own.

    Raises:
        ValueError: the prompt is empty, or prompt and continuation exceed the model's positions.
    """
    check_length(model, len(prompt_ids), max_new_tokens)
    stops = end_of_text_ids(model) if stop_ids is None else tuple(stop_ids)
    step = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=model.device)  # [1, tokens]
    # transformers renamed the key-value cache in 5.2x; the old name still works there, with a warning.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = None
    for _ in range(max_new_tokens):
        out = model(input_ids=step, use_cache=True, **{name: cache})
        cache = out[name]
        step = out.logits[:, -1:].argmax(-1)  # [1, 1]: only the new token is fed, the cache holds the rest
        token = int(step.item())
        if token in stops:
            return
        yield token


def stream_text(
    model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int, stop_ids: Sequence[int] | None = None
) -> Iterator[str]:
    """Yields the greedy continuation of `prompt` as pieces of text.

    A token may end inside a UTF-8 character: pieces are held back until the character is whole. The pieces
    joined are the continuation, without the prompt.
    """
    prompt_ids = tokenizer(prompt)["input_ids"]
    ids = list(prompt_ids)
    said = len(tokenizer.decode(ids))
    for token in greedy_ids(model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids):
        ids.append(token)
        text = tokenizer.decode(ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        yield text[said:]
        said = len(text)
    rest = tokenizer.decode(ids)[said:]
    if rest:
        yield rest
