"""T5: encoder, decoder and cross-attention, padding, decoder inputs, tied weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from pico_t5 import tokenizer
from random_models.shapes import T5Shape
from reference import Reference
from tiny import Family, family, hooks_of, largest_difference, randn, tensors_of
from torch import Tensor, nn

from featcal_fusionbench.architectures import ItemCheck, architecture_of
from featcal_fusionbench.architectures.clip_vision import ClipVision
from featcal_fusionbench.architectures.t5 import T5, T5Settings, TokenRows, answer_greedily, t5_rows
from featcal_fusionbench.calibration import (
    CalibrationSettings,
    build_plan,
    calibrate,
)
from featcal_fusionbench.calibration.drift import measure_drift
from featcal_fusionbench.calibration.expert_path import ExpertPath
from featcal_fusionbench.calibration.trace import trace_forward
from featcal_fusionbench.errors import CalibrationDataError

GRANULARITIES = ["module", "block"]
TASKS = ("a", "b", "c")
EOS = 1
TEXTS = {"a": (6, 3, 5, 9), "b": (4, 7, 2), "c": (5, 8, 3, 1, 4)}
ANSWERS = {"a": (3, 1, 2, 4), "b": (1, 2, 3), "c": (2, 2, 1, 4, 3)}


def t5(*, tied: bool = False, gated: bool = True, vocabulary: int = 64) -> Any:
    """Two blocks on either side; as FLAN-T5 unless its head is to be tied."""
    shape = T5Shape(16, 4, 24, 2, 4, vocabulary, tied, gated)
    return shape.model("cpu", use_cache=False)


@lru_cache
def models(tied: bool = False, gated: bool = True, tasks: tuple[str, ...] = TASKS) -> Family:
    return family(t5(tied=tied, gated=gated), tasks=tasks)


def modules(gated: bool = True) -> list[list[str]]:
    """What is calibrated, block by block, written down from the architecture."""

    def attention(path: str, kind: str) -> list[str]:
        return [f"{path}.layer_norm", *(f"{path}.{kind}.{part}" for part in "qkvo")]

    def mlp(path: str) -> list[str]:
        wi = ("wi_0", "wi_1") if gated else ("wi",)
        return [f"{path}.layer_norm", *(f"{path}.DenseReluDense.{part}" for part in (*wi, "wo"))]

    encoder = [
        [
            *attention(f"encoder.block.{i}.layer.0", "SelfAttention"),
            *mlp(f"encoder.block.{i}.layer.1"),
        ]
        for i in range(2)
    ]
    decoder = [
        [
            *attention(f"decoder.block.{i}.layer.0", "SelfAttention"),
            *attention(f"decoder.block.{i}.layer.1", "EncDecAttention"),
            *mlp(f"decoder.block.{i}.layer.2"),
        ]
        for i in range(2)
    ]
    return encoder + decoder


def sequences(lengths: Sequence[int], key: str) -> list[Tensor]:
    return [
        torch.cat([randn(length - 1, key=(key, row)).mul(1000).long().abs() % 60 + 3,
                   torch.tensor([EOS])])
        for row, length in enumerate(lengths)
    ]  # fmt: skip


def padded(rows: Sequence[Tensor], width: int, side: str, filling: int) -> tuple[Tensor, Tensor]:
    width = max(width, *(len(row) for row in rows))
    ids = torch.full((len(rows), width), filling)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def batch(task: str, *, width: int = 0, side: str = "right", filling: int = 0) -> dict[str, Any]:
    """All inputs of a task in one batch, padded as asked."""
    ids, mask = padded(sequences(TEXTS[task], task), width, side, filling)
    answers = [
        torch.cat([torch.tensor([0]), row[:-1]])
        for row in sequences(ANSWERS[task], f"{task}/answers")
    ]
    # a decoder has its padding at the end: whatever stands there, no real token attends to it
    read, read_mask = padded(answers, width and width - 4, "right", filling)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": read,
        "decoder_attention_mask": read_mask,
        "use_cache": False,
    }


def rows_of(inputs: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    count = len(inputs["input_ids"])
    return [
        {k: v[i : i + size] if isinstance(v, Tensor) else v for k, v in inputs.items()}
        for i in range(0, count, size)
    ]


def weigh(module: str, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Row weights in the specification's words."""
    if module.startswith("encoder.") or module.split(".")[-2:] in (
        ["EncDecAttention", "k"],
        ["EncDecAttention", "v"],
    ):
        return inputs["attention_mask"]
    return inputs["decoder_attention_mask"]


# --- the engine on T5 -------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("gated, tied", [(True, False), (False, True)])
def test_equals_an_independent_implementation(granularity: str, gated: bool, tied: bool) -> None:
    """Whole-model forwards, plain sums, least squares: see `reference`; with padding."""
    many = models(tied=tied, gated=gated)
    inputs = {task: batch(task) for task in TASKS}
    assert all(
        0 in of["attention_mask"] and 0 in of["decoder_attention_mask"] for of in inputs.values()
    )
    slow = Reference(granularity=granularity, ridge_lambda=1e-3, rho=2.0, alpha=0.6)
    whole = {task: [of] for task, of in inputs.items()}
    expected = slow.calibrate(many.merged, many.base, many.experts, whole, modules(gated), weigh)
    calibrated, result = many.calibrate(
        {task: rows_of(of, 2) for task, of in inputs.items()},
        t5_rows,
        granularity=granularity,
        ridge_lambda=1e-3,
        anchor_rho=2.0,
        target_alpha=0.6,
    )
    assert [m.name for m in result.modules] == [name for names in modules(gated) for name in names]
    assert largest_difference(calibrated.state_dict(), expected.state_dict()) < 1e-9
    assert largest_difference(calibrated.state_dict(), many.merged.state_dict()) > 1e-2
    rows = {m.name: m.rows for m in result.modules}
    encoder = sum(map(sum, TEXTS.values()))
    decoder = sum(map(sum, ANSWERS.values()))
    assert rows["encoder.block.1.layer.1.DenseReluDense.wo"] == encoder
    assert rows["decoder.block.1.layer.1.EncDecAttention.k"] == encoder
    assert rows["decoder.block.1.layer.1.EncDecAttention.q"] == decoder


def test_gated_inputs_and_cross_attention_share_their_gram_matrices() -> None:
    plan = build_plan(models().merged, batch("a"), CalibrationSettings(), t5_rows)
    groups = [
        [module.name.rpartition("layer.")[2] for module in group.modules]
        for stage in plan.stages
        for group in stage.groups
        if stage.name.startswith("decoder.block.0.") and group.kind.name == "linear"
    ]
    assert groups == [
        ["0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v"],
        ["0.SelfAttention.o"],
        ["1.EncDecAttention.q"],
        ["1.EncDecAttention.k", "1.EncDecAttention.v"],
        ["1.EncDecAttention.o"],
        ["2.DenseReluDense.wi_0", "2.DenseReluDense.wi_1"],
        ["2.DenseReluDense.wo"],
    ]
    wo = next(group for stage in plan.stages for group in stage.groups
              if group.leader.name.endswith("wo"))  # fmt: skip
    assert wo.expert_needs == "output"
    skipped = {module.name: module.reason for module in plan.skipped}
    for name in (
        "shared",
        "lm_head",
        "encoder.final_layer_norm",
        "decoder.final_layer_norm",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    ):
        assert skipped[name]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_single_expert_that_is_the_merged_model_is_given_back(granularity: str) -> None:
    one = models(tasks=("a",))
    expert = one.experts["a"]
    same = Family(expert, one.base, {"a": expert})
    data = {"a": rows_of(batch("a"), 2)}
    calibrated, result = same.calibrate(
        data, t5_rows, granularity=granularity, anchor_rho=1.0, ridge_lambda=1e-3, epsilon=1e-13
    )
    assert {m.kind for m in result.modules} == {"linear", "rms_norm"}
    assert largest_difference(calibrated.state_dict(), expert.state_dict()) < 1e-8


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_resumed_forwards_are_forwards_of_the_calibrated_model(granularity: Any) -> None:
    many = models()
    model = many.copy()
    data = {task: rows_of(batch(task), 2) for task in TASKS}
    chosen = CalibrationSettings(granularity=granularity)
    plan = build_plan(model, data["a"][0], chosen, t5_rows)
    outputs: dict[tuple[str, int], Any] = {}
    calibrate(
        model, many.base, many.weights, data, plan, chosen,
        on_output=lambda task, index, output: outputs.__setitem__((task, index), output),
    )  # fmt: skip
    for (task, index), output in outputs.items():
        with torch.no_grad():
            fresh = model(**data[task][index])
        pairs = list(zip(tensors_of(output), tensors_of(fresh), strict=True))
        assert pairs and all(torch.equal(one, other) for one, other in pairs)
    assert not hooks_of(model)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_does_not_matter(granularity: str, side: str) -> None:
    """Neither its length, nor its side, nor what stands in it."""
    many = models()

    def run(**padding: Any) -> dict[str, Tensor]:
        data = {task: rows_of(batch(task, **padding), 2) for task in TASKS}
        return many.calibrate(data, t5_rows, granularity=granularity)[0].state_dict()

    trimmed = run()
    # T5 takes softmax and norms in float32, where the order of a sum shows
    assert largest_difference(trimmed, run(width=17, side=side, filling=7)) < 1e-5


def test_drift_leaves_padding_out() -> None:
    many = models()
    architecture = T5()

    def run(**padding: Any) -> list[float]:
        data = {task: rows_of(batch(task, **padding), 2) for task in TASKS}
        trace = trace_forward(many.merged, data["a"][0])
        plan = build_plan(many.merged, data["a"][0], CalibrationSettings(), t5_rows)
        drifts = measure_drift(
            many.merged, many.weights, data, plan.blocks, trace,
            architecture.final_features, architecture.drift_rows,
        )  # fmt: skip
        return [
            value
            for drift in drifts
            for value in (drift.final, *(v for b in drift.blocks
                                         for v in (b.total, b.local, b.propagated)))
        ]  # fmt: skip

    trimmed = run()
    assert len(trimmed) == len(TASKS) * (1 + 4 * 3) and all(v >= 0 for v in trimmed)
    assert run(width=17, side="left", filling=7) == pytest.approx(trimmed, rel=1e-5)


def test_drift_is_that_of_the_real_tokens() -> None:
    """Against forwards of the whole models, one text at a time and without any padding."""
    many = models()
    data = batch("c")
    trace = trace_forward(many.merged, data)
    plan = build_plan(many.merged, data, CalibrationSettings(), t5_rows)
    (drift,) = measure_drift(
        many.merged, {"c": many.weights["c"]}, {"c": [data]}, plan.blocks, trace,
        T5().final_features, T5().drift_rows,
    )  # fmt: skip
    squares = torch.zeros(3, 2, dtype=torch.float64)
    for row in rows_of(data, 1):
        text = row["input_ids"][:, : int(row["attention_mask"].sum())]
        read = row["decoder_input_ids"][:, : int(row["decoder_attention_mask"].sum())]
        with torch.no_grad():
            cal, exp = (
                model(input_ids=text, decoder_input_ids=read, use_cache=False,
                      output_hidden_states=True)
                for model in (many.merged, many.experts["c"])
            )  # fmt: skip
        centre = [out.logits - out.logits.mean(-1, keepdim=True) for out in (cal, exp)]
        pairs = [
            (cal.encoder_hidden_states[1], exp.encoder_hidden_states[1]),
            (cal.decoder_hidden_states[1], exp.decoder_hidden_states[1]),
            centre,
        ]
        for k, (one, other) in enumerate(pairs):
            squares[k] += torch.stack([(one - other).square().sum(), other.square().sum()])
    expected = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
    measured = [drift.blocks[0].total, drift.blocks[2].total, drift.final]
    assert measured == pytest.approx(expected, rel=1e-9)


def test_embeddings_that_are_only_lent_are_not_put_on_the_device_again_and_again() -> None:
    merged = models().merged
    path = ExpertPath(merged, trace_forward(merged, batch("a")))
    asked = []

    class Recorded(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    weights = Recorded(merged.state_dict())
    trace = trace_forward(merged, batch("a"))
    (call,) = trace.calls_of("decoder.block.1")
    with path.resident(weights, call.enter, call.exit):
        pass
    assert asked and all(name.startswith("decoder.block.1.") for name in asked)


@pytest.mark.parametrize("tied", [True, False])
def test_ties_survive(tied: bool) -> None:
    many = models(tied=tied)
    calibrated: Any = many.calibrate({t: rows_of(batch(t), 3) for t in TASKS}, t5_rows)[0]
    shared = calibrated.shared.weight
    assert calibrated.encoder.embed_tokens.weight is shared
    assert calibrated.decoder.embed_tokens.weight is shared
    assert (calibrated.lm_head.weight is shared) == tied
    assert torch.equal(shared, many.merged.get_parameter("shared.weight"))


# --- decoder inputs ---------------------------------------------------------------------------


def single_precision() -> nn.Module:
    return copy.deepcopy(models().merged).float()


def test_greedy_answers_are_those_of_generate() -> None:
    model: Any = single_precision()
    inputs = batch("c")
    answered = answer_greedily(model, inputs, tokens=6)
    generated = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=6,
        do_sample=False,
        num_beams=1,
        use_cache=True,
    )
    for row, (ids, mask) in enumerate(
        zip(answered["decoder_input_ids"], answered["decoder_attention_mask"], strict=True)
    ):
        read = ids[mask > 0].tolist()
        answer = generated[row].tolist()
        whole = answer[: answer.index(EOS)] if EOS in answer else answer[:6]
        assert read == whole[:6], row
        assert mask.sum() == len(read)
    assert {k: v for k, v in answered.items() if "decoder" not in k}.keys() == {
        "input_ids", "attention_mask", "use_cache",
    }  # fmt: skip


def test_an_answer_ends_where_the_expert_ends_it() -> None:
    """A head that prefers the end of the answer, after a given number of other tokens."""
    model: Any = single_precision()
    inputs = batch("a")

    class Scripted(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            logits = torch.zeros(*hidden.shape[:2], 64)
            for row, length in enumerate((0, 2, 1, 9)):
                following = EOS if hidden.shape[1] > length else 10 + row
                logits[row, -1, following] = 1
            return logits

    model.lm_head = Scripted()
    answered = answer_greedily(model, inputs, tokens=4)
    assert answered["decoder_input_ids"].tolist() == [
        [0, 0, 0, 0], [0, 11, 11, 0], [0, 12, 0, 0], [0, 13, 13, 13],
    ]  # fmt: skip
    assert answered["decoder_attention_mask"].tolist() == [
        [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1],
    ]  # fmt: skip
    one = answer_greedily(model, inputs, tokens=1)
    assert one["decoder_input_ids"].tolist() == [[0]] * 4


def prepare(items: Sequence[Any], **settings: Any) -> Mapping[str, Any]:
    words = tokenizer()
    model = t5(vocabulary=len(words))
    return T5(T5Settings(**settings)).prepare_inputs(words, model)(items)


def test_rows_of_any_padding_and_texts_are_prepared_alike() -> None:
    words = tokenizer()
    texts = ["the film is good", "is the question answered by the text or not"]
    items: list[list[Any]] = [[{"text": text} for text in texts]]
    for side in ("right", "left"):
        rows = [words(t)["input_ids"] for t in texts]
        ids, mask = padded([torch.tensor(row) for row in rows], 40, side, words.pad_token_id)
        items.append([{"input_ids": i.tolist(), "attention_mask": m.tolist()}
                      for i, m in zip(ids, mask, strict=True)])  # fmt: skip
        items.append([{"input_ids": i} for i in ids])
    first, *others = (prepare(of) for of in items)
    assert first["input_ids"].shape[1] == max(len(words(t)["input_ids"]) for t in texts)
    assert first["decoder_input_ids"].tolist() == [[0] * 10] * 2  # placeholders
    for other in others:
        for key in first:
            assert torch.equal(torch.as_tensor(first[key]), torch.as_tensor(other[key])), key


def test_labels_are_shifted_right() -> None:
    items = [
        {"input_ids": [5, 1, 0], "labels": [7, 8, 1, -100, -100]},
        {"input_ids": [6, 1, 0], "labels": [9, 1, 0, 0, 0]},
        {"input_ids": [6, 1, 0], "labels": [1, -100, -100, -100, -100]},
    ]
    inputs = prepare(items, decoder_inputs="labels")
    assert inputs["decoder_input_ids"].tolist() == [[0, 7, 8], [0, 9, 0], [0, 0, 0]]
    assert inputs["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert T5(T5Settings(decoder_inputs="labels")).complete_inputs() is None


def test_rows_say_what_they_weigh() -> None:
    assert str(TokenRows("attention_mask")) == "encoder tokens"
    assert str(TokenRows("decoder_attention_mask")) == "decoder tokens"
    assert isinstance(architecture_of(t5(), [ClipVision(), T5()]), T5)


# --- bad input --------------------------------------------------------------------------------


def check(items: Sequence[Any], **settings: Any) -> ItemCheck:
    words = tokenizer()
    model = t5(vocabulary=len(words))
    return T5(T5Settings(**settings)).check_items("cola", enumerate(items), words, model)


GOOD = {"input_ids": [5, 6, 1], "labels": [7, 1]}


@pytest.mark.parametrize(
    "item, settings, message",
    [
        ({"input_ids": [1, 0, 0]}, {}, "an empty text in item 1"),
        ({"input_ids": [0, 0], "attention_mask": [0, 0]}, {}, "an empty text in item 1"),
        ({"text": ""}, {}, "an empty text in item 1"),
        ({"input_ids": [5] * 300}, {}, "model_max_length 256"),
        ({"input_ids": [5, 9999]}, {}, "beyond the model's vocabulary"),
        ({"review": "raw"}, {}, "no column 'input_ids' .*set method.input_column .*in item 1"),
        (7, {}, "items must be rows .*in item 1"),
        ({"input_ids": [5, 1]}, {"decoder_inputs": "labels"}, "no column 'labels'"),
        ({"input_ids": [5, 1], "labels": [-100]}, {"decoder_inputs": "labels"}, "no token in the"),
    ],
)
def test_bad_items_are_named(item: Any, settings: Any, message: str) -> None:
    with pytest.raises(CalibrationDataError, match=message) as caught:
        check([GOOD, item], **settings)
    assert "cola" in str(caught.value)


def test_a_single_class_is_warned_of() -> None:
    other = {"input_ids": [5, 1], "labels": [8, 1, -100]}
    assert check([GOOD, other]).warnings == ()
    assert check([{"input_ids": [5, 1]}] * 3).warnings == ()  # no labels, nothing to say
    (warning,) = check([GOOD, {**GOOD, "labels": [7, 1, -100]}]).warnings
    assert "all 2 items drawn have the same label" in warning


def test_lengths_are_those_without_padding() -> None:
    items = [GOOD, {"input_ids": [0, 0, 5, 1]}, {"input_ids": [5, 1], "attention_mask": [1, 1]}]
    assert check(items).lengths == {0: 3, 1: 2, 2: 2}


@pytest.mark.parametrize("change", [{"vocabulary": 20}, {"vocabulary": 5000}, {"eos": 2}])
def test_a_tokenizer_of_another_model(change: dict[str, int]) -> None:
    words = tokenizer()
    model = t5(vocabulary=change.get("vocabulary", len(words)))
    model.config.eos_token_id = change.get("eos", 1)
    with pytest.raises(CalibrationDataError, match="is not the model's"):
        T5().prepare_inputs(words, model)
