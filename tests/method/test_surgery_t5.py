"""Surgery after a T5: the decoder's final hidden state, as its head reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import run_fusion_bench
from pico_t5 import GLUE, PicoT5, tokenizer
from random_models.shapes import T5Shape
from random_models.weights import fill
from torch import Tensor, nn

from featcal_fusionbench.architectures.t5 import answer_greedily
from featcal_fusionbench.baselines import RepresentationSurgerySettings, SurgeryModule
from featcal_fusionbench.benchmark.text.taskpool import TextGenerationTaskPool
from featcal_fusionbench.calibration import CalibrationError
from featcal_fusionbench.corrected import CorrectedT5, load_corrected_model
from featcal_fusionbench.method.surgery import RepresentationSurgeryAlgorithm
from featcal_fusionbench.method.surgery_report import SurgeryReport
from featcal_fusionbench.report import RunReport

TASK_ARITHMETIC = {
    "_target_": "fusion_bench.method.TaskArithmeticAlgorithm",
    "scaling_factor": 0.3,
}


@pytest.fixture
def pico(pico_t5: PicoT5) -> PicoT5:
    return pico_t5


def inputs() -> dict[str, Tensor]:
    texts = ["the film is good", "is it red or blue in the house"]
    return dict(tokenizer()(texts, padding=True, return_tensors="pt"))


def corrected(model: nn.Module, tasks: tuple[str, ...] = ("cola", "glue-sst2")) -> CorrectedT5:
    wrapper = CorrectedT5(model)
    modules = {}
    for index, task in enumerate(tasks):
        module = SurgeryModule(32, 4, torch.Generator().manual_seed(index))
        nn.init.normal_(module.up.weight, std=4.0, generator=torch.Generator().manual_seed(index))
        modules[task] = module
    wrapper.set_corrections(modules, RepresentationSurgerySettings(hidden_width=4))
    return wrapper


@pytest.mark.parametrize("tied", [False, True])
def test_the_correction_is_of_what_the_head_reads(tied: bool) -> None:
    model = fill(T5Shape(32, 8, 48, 2, 4, vocabulary=256, tied=tied).model("cpu"))
    read = torch.tensor([[0, 5, 9], [0, 7, 0]])
    batch = {**inputs(), "decoder_input_ids": read, "use_cache": False,
             "decoder_attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}  # fmt: skip
    wrapper = corrected(model)
    with torch.no_grad():
        plain = model(**batch, output_hidden_states=True)
        features, mask = wrapper.representation(batch)
        head = model.lm_head
        # whatever the release scales, the head's own weights give the logits
        torch.testing.assert_close(head(features), plain.logits)
        ratio = features / plain.decoder_hidden_states[-1]
        torch.testing.assert_close(ratio, torch.full_like(ratio, ratio.mean().item()))
        assert ratio.mean().item() == pytest.approx(32**-0.5 if tied else 1.0, rel=1e-4)
        wrapper.set_task("glue-cola")
        logits = wrapper(**batch).logits
        module = wrapper.corrections[0]
        torch.testing.assert_close(logits, head(features - module(features)))
    assert mask.tolist() == [[True] * 3, [True, True, False]]
    assert not head._forward_pre_hooks
    assert torch.equal(model(**batch).logits, plain.logits)  # nothing is left on the model


def test_generate_is_corrected_for_the_task_that_is_set(pico: PicoT5) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(pico.base).eval()
    wrapper = corrected(model)
    batch = inputs()
    answers = {}
    for task in wrapper.tasks:
        wrapper.set_task(task)
        answers[task] = wrapper.generate(**batch, max_new_tokens=4, do_sample=False)
        ids = torch.zeros(2, 1, dtype=torch.long)
        with torch.no_grad():
            for _ in range(2):
                logits = wrapper(**batch, decoder_input_ids=ids).logits[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        assert torch.equal(answers[task][:, :2], ids[:, :2])
    plain = model.generate(**batch, max_new_tokens=4, do_sample=False)
    assert any(answer.tolist() != plain.tolist() for answer in answers.values())


def test_without_a_task_the_remedy_is_named(pico: PicoT5) -> None:
    from transformers import AutoModelForSeq2SeqLM

    wrapper = corrected(AutoModelForSeq2SeqLM.from_pretrained(pico.base))
    with pytest.raises(CalibrationError, match="taskpool=flan-t5_glue_featcal"):
        wrapper.generate(**inputs(), max_new_tokens=2)
    with pytest.raises(CalibrationError, match="task 'mnli', only for cola, glue-sst2"):
        wrapper.set_task("mnli")
    wrapper.set_task("sst2")


def test_rows_are_the_positions_of_the_experts_answers(pico: PicoT5, tmp_path: Path) -> None:
    pool = pico.pool(tasks=("cola", "mnli"))
    model = RepresentationSurgeryAlgorithm(
        merger=TASK_ARITHMETIC, n_samples=9, n_heldout=2, batch_size=4, steps=30,
        decoder_tokens=4, output_dir=str(tmp_path),
    ).run(pool)  # fmt: skip
    report = RunReport.read(tmp_path / "representation_surgery_report.json")
    assert isinstance(report, SurgeryReport) and report.result is not None
    for result, data in zip(report.result.tasks, report.data, strict=True):
        expert = pool.load_model(data.task).eval()
        rows, losses = 0, []
        for index in data.indices:
            item = pool.load_train_dataset(data.task)[index]
            ids = torch.as_tensor(item["input_ids"])[None]
            batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
            answered = answer_greedily(expert, {**batch, "use_cache": False}, tokens=4)
            rows += int(answered["decoder_attention_mask"].sum())
            with torch.no_grad():
                ours, theirs = (
                    m(**answered, output_hidden_states=True).decoder_hidden_states[-1]
                    for m in (model.model, expert)
                )
            losses.append((ours - theirs).abs().flatten())
        assert (result.inputs, result.rows, result.width) == (9, rows, 32)
        assert result.loss_start == pytest.approx(float(torch.cat(losses).mean()), rel=1e-3)
        assert result.loss_end < result.loss_start


def test_our_task_pool_tells_the_task(pico: PicoT5) -> None:
    from transformers import AutoModelForSeq2SeqLM

    wrapper = corrected(AutoModelForSeq2SeqLM.from_pretrained(pico.base))
    told: list[str] = []
    wrapper.set_task, plain = lambda task: (told.append(task), plain(task)), wrapper.set_task  # type: ignore
    item = {"input_ids": tokenizer()("the film is good")["input_ids"], "labels": [5, 1]}
    TextGenerationTaskPool({"sst2": [item], "cola": [item]}, tokenizer=tokenizer()).evaluate(
        wrapper
    )
    assert told == ["sst2", "cola"]


@pytest.mark.cli
@pytest.mark.slow
def test_glue_from_end_to_end(pico: PicoT5) -> None:
    """FusionBench's GLUE with the task told: a saved model of either method that reloads."""
    overrides = [
        override.replace("flan-t5_glue_text_generation", "flan-t5_glue_featcal")
        for override in pico.overrides(
            "method=prob_surgery", "method.n_samples=6", "method.n_heldout=2",
            "merged_model_save_path='{log_dir}/model'",
        )
    ]  # fmt: skip
    finished = run_fusion_bench(overrides, cwd=pico.root)
    assert finished.returncode == 0, finished.stdout[-3000:]
    (directory,) = (pico.root / "outputs/fabric_model_fusion").iterdir()
    scores = json.loads((directory / "program_report.json").read_text())
    assert {*GLUE, "model_info"} == scores.keys()
    report = RunReport.read(directory / "prob_surgery_report.json")
    assert isinstance(report, SurgeryReport) and report.result is not None
    assert [task.task for task in report.result.tasks] == [f"glue-{task}" for task in GLUE]
    again: Any = load_corrected_model(directory / "model")
    again.set_task("rte")
    assert again.generate(**inputs(), max_new_tokens=3).shape[0] == 2
    assert (directory / "model/tokenizer.json").exists()
