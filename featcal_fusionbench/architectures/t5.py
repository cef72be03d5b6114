"""T5: an encoder and a decoder, each with its own padding, that share one table of embeddings.

Modules of the encoder see the input's tokens, modules of the decoder the answer's; keys and values
of the decoder's cross-attention see the encoder's output. Padding counts nowhere. What the decoder
reads is the answer that the task's expert gives, generated greedily before the calibration, or, by
setting, the answer in the data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, T5ForConditionalGeneration

from ..calibration import Releasable, RowRule, RowRules
from ..calibration.inputs import Inputs, place_inputs
from ..data.draws import PrepareInputs, load_tokenizer
from ..data.items import Problems, UnusableItem, input_column, reason_of, whole_numbers
from ..errors import CalibrationDataError
from ..settings import Settings
from .base import Architecture, CompleteInputs, ItemCheck

__all__ = ["T5", "DecoderInputs", "T5Settings", "TokenRows", "answer_greedily", "t5_rows"]

DecoderInputs = Literal["expert", "labels"]

# Rows of the embedding that no token has, at most: published models round their number up.
_MOST_UNUSED_ROWS = 1024
# Columns of a data set that hold token ids, or texts which are not tokenised yet: those that are
# taken before others, those that are taken where they stand alone, and further texts with which
# they do not; and the column of the answer as text.
_PREFERRED, _TEXTS = ("input_ids", "input_text", "text"), ("sentence", "inputs", "question")
_FURTHER = ("sentence1", "sentence2", "premise", "hypothesis", "context", "passage")
_TARGET = "target_text"
_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class T5Settings(Settings):
    """Settings that T5 alone has.

    Attributes:
        decoder_inputs: What the decoder reads: ``expert``, the answer that the task's expert gives
            greedily (no labels needed), or ``labels``, the data set's.
        decoder_tokens: Tokens that an expert generates at most, ≥ 1.
    """

    decoder_inputs: DecoderInputs = "expert"
    decoder_tokens: int = 10

    def __post_init__(self) -> None:
        self._require_choice("decoder_inputs", get_args(DecoderInputs))
        self._require_count("decoder_tokens", 1)


@dataclass(frozen=True)
class TokenRows:
    """Weight 1 for real tokens, 0 for padding.

    Attributes:
        mask: The inputs' mask: that of the encoder's tokens or that of the decoder's.
    """

    mask: Literal["attention_mask", "decoder_attention_mask"]

    def __str__(self) -> str:
        side = "decoder" if self.mask == "decoder_attention_mask" else "encoder"
        return f"{side} tokens"

    def __call__(self, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Row weights of features of shape (batch, tokens, width)."""
        return inputs[self.mask].to(features.device)


_ENCODER, _DECODER = TokenRows("attention_mask"), TokenRows("decoder_attention_mask")


def t5_rows(module: str, block: int | None, blocks: int) -> RowRule:
    """Row weights of T5's modules, by the tokens that each of them reads."""
    reads_encoder = module.endswith((".EncDecAttention.k", ".EncDecAttention.v"))
    in_decoder = module.startswith(("decoder.", "lm_head"))
    return _DECODER if in_decoder and not reads_encoder else _ENCODER


class T5(Architecture[T5Settings]):
    """``transformers.T5ForConditionalGeneration`` in all its sizes and both versions."""

    name = "T5"
    settings_type = T5Settings

    def recognises(self, model: nn.Module) -> bool:
        """Whether the model is a T5 with a language modelling head."""
        return isinstance(model, T5ForConditionalGeneration)

    def row_rules(self) -> RowRules:
        """Padding counts nowhere."""
        return t5_rows

    def drift_rows(self, block: str) -> RowRule:
        """Padding counts nowhere; the final features are the decoder's."""
        return t5_rows(block or "lm_head", None, 0)

    def final_features(self, output: Any) -> Tensor:
        """The logits less their mean over the vocabulary, which no probability depends on."""
        return output.logits - output.logits.mean(-1, keepdim=True)

    def releasable(self, model: nn.Module) -> Releasable:
        """The embeddings, once the first block of either stack has run."""
        return Releasable(block_inputs=not model.config.output_hidden_states)  # pyright: ignore

    def load_processor(self, pool: BaseModelPool) -> PreTrainedTokenizerBase:
        """The pool's tokenizer."""
        return load_tokenizer(pool)

    def prepare_inputs(
        self, processor: Any, model: nn.Module, column: str | None = None
    ) -> PrepareInputs:
        """Rows of token ids, or texts, to padded batches.

        With ``decoder_inputs=expert`` the decoder inputs are placeholders, as long as the longest
        answer, until :meth:`complete_inputs` puts the expert's in their place.

        Raises:
            CalibrationDataError: The tokenizer is not the model's.
        """
        _require_the_models_tokenizer(processor, model)
        start, _ = _special_tokens(model)
        return partial(_prepare, processor, start, self.settings, column)

    def check_items(
        self,
        task: str,
        items: Iterable[tuple[int, Any]],
        processor: Any,
        model: nn.Module,
        column: str | None = None,
    ) -> ItemCheck:
        """Find rows that cannot be read, texts that are empty, too long or of another vocabulary.

        Texts that the tokenizer cuts off, and a label that all items have, are warned of.
        """
        problems, cut = Problems(), Problems()
        answers: set[tuple[int, ...]] = set()
        lengths: dict[int, int] = {}
        size = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        needs_answer = self.settings.decoder_inputs == "labels"
        longest = processor.model_max_length
        for index, item in items:
            try:
                ids, mask, whole = _tokens(item, processor, column)
                answer = _answer(item, processor, needed=needs_answer)
            except Exception as error:  # also the tokenizer's
                problems.add(reason_of(error), index)
                continue
            real = ids[mask > 0]
            lengths[index] = len(ids)
            if answer is not None:
                answers.add(tuple(answer.tolist()))
            if whole > len(ids):
                cut.add(f"texts longer than the tokenizer's model_max_length {longest}", index)
            for problem, is_so in (
                ("no column 'labels' or 'target_text'", needs_answer and answer is None),
                ("no token in the labels", needs_answer and answer is not None and not len(answer)),
                ("an empty text", not _has_content(real, processor)),
                (f"more tokens than the tokenizer's model_max_length {longest}",
                 len(real) > longest),
                (f"tokens beyond the model's vocabulary of {size}", not _all_below(size, real)),
                (f"labels beyond the model's vocabulary of {size}",
                 needs_answer and answer is not None and not _all_below(size, answer)),
            ):  # fmt: skip
                if is_so:
                    problems.add(problem, index)
        if problems:
            raise CalibrationDataError(
                f"the calibration data of task {task} cannot be used: {problems}. Filter or "
                "tokenise the data set again with the model's tokenizer; "
                "decoder_inputs=expert needs no labels."
            )
        warnings = []
        if cut:
            warnings.append(f"task {task}: cut off by the tokenizer, as in evaluation: {cut}.")
        if len(answers) == 1 and len(lengths) > 1:
            answer = processor.decode(next(iter(answers)), skip_special_tokens=True)
            warnings.append(
                f"task {task}: all {len(lengths)} items drawn have the same label, {answer!r}: "
                "draw from a data set with every class in it."
            )
        return ItemCheck(tuple(warnings), lengths)

    def complete_inputs(self) -> CompleteInputs | None:
        """The expert's greedy answers, where they are what the decoder shall read."""
        if self.settings.decoder_inputs == "labels":
            return None
        return partial(answer_greedily, tokens=self.settings.decoder_tokens)


def answer_greedily(expert: nn.Module, inputs: Inputs, *, tokens: int) -> Inputs:
    """Put what the expert answers, token by token, in the place of the decoder inputs.

    Written out instead of ``generate``, whose result may depend on a checkpoint's generation
    settings: this is what the decoder reads while it answers, without the end of the answer.

    Args:
        expert: A T5, in evaluation mode.
        inputs: Inputs of a forward; their decoder inputs are not looked at.
        tokens: Length of the answer at most.

    Returns:
        The inputs with ``decoder_input_ids`` of shape (batch, longest answer), on the host.
    """
    start, ends = _special_tokens(expert)
    given = place_inputs(inputs, expert)
    encoder = {key: given[key] for key in ("input_ids", "attention_mask")}
    ids = torch.full_like(encoder["input_ids"][:, :1], start)
    real = torch.ones_like(ids)
    with torch.no_grad():
        encoded = expert.get_encoder()(**encoder)  # pyright: ignore[reportCallIssue]
        for _ in range(tokens - 1):
            logits = expert(
                encoder_outputs=encoded,
                attention_mask=encoder["attention_mask"],
                decoder_input_ids=ids,
                use_cache=False,
            ).logits[:, -1:]
            following = logits.argmax(-1)
            goes_on = real[:, -1:] * ~torch.isin(following, ends.to(following.device))
            if not bool(goes_on.any()):
                break
            ids = torch.cat([ids, torch.where(goes_on > 0, following, start)], dim=1)
            real = torch.cat([real, goes_on], dim=1)
    completed = {"decoder_input_ids": ids.cpu(), "decoder_attention_mask": real.cpu()}
    return {**inputs, **completed}


def _prepare(
    tokenizer: Any,
    start: int,
    settings: T5Settings,
    column: str | None,
    items: Sequence[Any],
) -> Inputs:
    rows = [_tokens(item, tokenizer, column)[:2] for item in items]
    if settings.decoder_inputs == "labels":
        answers = [_answer(item, tokenizer, needed=True) for item in items]
        if any(answer is None or not len(answer) for answer in answers):
            raise UnusableItem("no label: set decoder_inputs=expert, which needs none")
        read = [torch.cat([answer.new_tensor([start]), answer[:-1]]) for answer in answers]  # pyright: ignore
    else:
        read = [torch.full((settings.decoder_tokens,), start) for _ in items]
    return {
        "input_ids": pad_sequence([ids for ids, _ in rows], batch_first=True),
        "attention_mask": pad_sequence([mask for _, mask in rows], batch_first=True),
        "decoder_input_ids": pad_sequence(read, batch_first=True),
        "decoder_attention_mask": pad_sequence([torch.ones_like(r) for r in read], True),
        "use_cache": False,
    }


def _tokens(item: Any, tokenizer: Any, column: str | None) -> tuple[Tensor, Tensor, int]:
    """Token ids and mask of an item without its padding, and how many there are of the whole text.

    Raises:
        UnusableItem: The item has no input, several, or one of another form.
    """
    value, name = item, "the item"
    if isinstance(item, Mapping):
        column = input_column(
            item, column, _PREFERRED, _TEXTS, "token ids or texts", beside=_FURTHER
        )
        value, name = item[column], f"column {column!r}"
    elif column is not None or not isinstance(item, str):
        raise UnusableItem(
            f"items must be rows with columns{' or texts' * (column is None)}, not of type "
            f"{type(item).__name__}"
        )
    if isinstance(value, str):
        ids = _tokenised(value, tokenizer)
        whole = len(ids)
        if whole > tokenizer.model_max_length:
            ids = _tokenised(value, tokenizer, truncation=True)
        return ids, torch.ones_like(ids), whole
    ids = whole_numbers(value, name)
    given = item.get("attention_mask") if isinstance(item, Mapping) else None
    if given is None:
        mask = (ids != tokenizer.pad_token_id).long()
    else:
        mask = whole_numbers(given, "column 'attention_mask'", may_be_bool=True)
        if len(mask) != len(ids):
            raise UnusableItem(f"an attention_mask of {len(mask)} for {len(ids)} token ids")
        if not bool(torch.isin(mask, torch.tensor([0, 1])).all()):
            raise UnusableItem("an attention_mask with other values than 0 and 1")
    (real,) = mask.nonzero(as_tuple=True)
    kept = slice(int(real[0]), int(real[-1]) + 1) if len(real) else slice(0)
    ids = ids[kept]
    return ids, mask[kept], len(ids)


def _tokenised(text: str, tokenizer: Any, **options: Any) -> Tensor:
    # not verbose: what is too long is cut off and warned of
    ids = tokenizer(text, verbose=False, **options)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def _answer(item: Any, tokenizer: Any, *, needed: bool) -> Tensor | None:
    """Token ids of an item's label, or None where it has none, or none that is text.

    Raises:
        UnusableItem: A label is needed, and the item's is of another form.
    """
    if not isinstance(item, Mapping):
        return None
    if isinstance(item.get(_TARGET), str):
        return _without_padding(_tokenised(item[_TARGET], tokenizer), tokenizer)
    if item.get("labels") is None:
        return None
    try:
        return _without_padding(whole_numbers(item["labels"], "column 'labels'"), tokenizer)
    except UnusableItem:
        if needed:
            raise
        return None  # the class of a classifier, say: labels that are not read may be anything


def _without_padding(labels: Tensor, tokenizer: Any) -> Tensor:
    return labels[(labels != _IGNORED) & (labels != tokenizer.pad_token_id)]


def _all_below(size: int, ids: Tensor) -> bool:
    return not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < size


def _has_content(ids: Tensor, tokenizer: Any) -> bool:
    special = torch.tensor(tokenizer.all_special_ids, dtype=torch.long)
    return bool((~torch.isin(ids, special)).any())


def _special_tokens(model: Any) -> tuple[int, Tensor]:
    """The token that a decoder starts with, and those that end an answer."""
    config, generation = model.config, model.generation_config
    starts = (
        generation.decoder_start_token_id,
        getattr(config, "decoder_start_token_id", None),
        config.pad_token_id,
    )
    ends = generation.eos_token_id
    ends = config.eos_token_id if ends is None else ends
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return next(int(s) for s in starts if s is not None), torch.tensor(ends, dtype=torch.long)


def _require_the_models_tokenizer(tokenizer: Any, model: Any) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CalibrationDataError(
            f"modelpool.tokenizer is a {type(tokenizer).__name__}, not a tokenizer."
        )
    rows, tokens = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    if (
        not tokens <= rows <= tokens + _MOST_UNUSED_ROWS
        or tokenizer.pad_token_id != pad
        or tokenizer.eos_token_id != end
    ):
        raise CalibrationDataError(
            f"the tokenizer {tokenizer.name_or_path!r} is not the model's: it has {tokens} tokens, "
            f"padding {tokenizer.pad_token_id} and end {tokenizer.eos_token_id}; the model has "
            f"{rows}, {pad} and {end}. Set modelpool.tokenizer to the one that the base was "
            "trained with."
        )
