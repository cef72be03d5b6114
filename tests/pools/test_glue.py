"""FLAN-T5's GLUE path from end to end, on a pico T5 and a GLUE of a few dozen rows, offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pico_t5 import GLUE, ROWS, PicoT5, tokenizer
from places import CONFIG
from safetensors.torch import load_file, save_file
from tiny import largest_difference
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.architectures import t5
from featcal_fusionbench.data.glue import load_glue_dataset
from featcal_fusionbench.errors import CalibrationDataError, ModelPoolError
from featcal_fusionbench.method import featcal as featcal_module
from featcal_fusionbench.pools.checkpoints import open_checkpoint
from featcal_fusionbench.pools.models import check_weights
from featcal_fusionbench.pools.opening import floating_tensors
from featcal_fusionbench.report import RunReport

TASK_ARITHMETIC = {
    "_target_": "fusion_bench.method.TaskArithmeticAlgorithm",
    "scaling_factor": 0.3,
}
TASKS = ("cola", "mnli", "stsb")
VARIANTS = sorted(path.stem for path in (CONFIG / "method/featcal").glob("flan_t5_*.yaml"))
QUICK = {
    "flan_t5_adamerging": ["method.merger.max_steps=1"],
    "flan_t5_wudi": ["method.merger.iter_num=2"],
}


@pytest.fixture
def pico(pico_t5: PicoT5) -> PicoT5:
    return pico_t5


def featcal(output_dir: Path, **settings: Any) -> FeatCalAlgorithm:
    defaults = {"merger": TASK_ARITHMETIC, "n_samples": 10, "n_heldout": 3, "batch_size": 4,
                "ridge_lambda": 1e-5, "target_alpha": 0.6}  # fmt: skip
    return FeatCalAlgorithm(output_dir=str(output_dir), **{**defaults, **settings})


def few(pico: PicoT5, **changes: Any) -> Any:
    """The pool with three of the eight tasks."""
    return pico.pool(tasks=TASKS, **changes)


@pytest.fixture(scope="module")
def calibrated(
    built_pico_t5: PicoT5, tmp_path_factory: pytest.TempPathFactory
) -> tuple[T5ForConditionalGeneration, Path]:
    """What the settings above make of `few`, and where its report is. Treat it as read-only."""
    directory = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(built_pico_t5.root)
        return featcal(directory).run(few(built_pico_t5)), directory


def read(output_dir: Path) -> RunReport:
    return RunReport.read(output_dir / "featcal_report.json")


def logits(model: Any) -> Tensor:
    words = tokenizer()
    inputs = words(["the film is good", "is it red or blue"], padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs, decoder_input_ids=torch.tensor([[0, 5, 9]] * 2)).logits


# --- the real command -------------------------------------------------------------------------


@pytest.mark.cli
@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_glue_from_end_to_end(pico: PicoT5, lora: bool) -> None:
    finished = pico.run_cli(
        "method=featcal/flan_t5_task_arithmetic",
        "method.n_samples=6",
        "method.n_heldout=2",
        "merged_model_save_path='{log_dir}/model'",
        lora=lora,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    (directory,) = (pico.root / "outputs/fabric_model_fusion").iterdir()

    scores = json.loads((directory / "program_report.json").read_text())
    assert {*GLUE, "model_info"} == scores.keys()
    assert all(0 <= scores[task]["accuracy"] <= 1 for task in GLUE if task != "stsb")
    assert "spearman_rho" in scores["stsb"]

    report = RunReport.read(directory / "featcal_report.json")
    assert report.status == "complete" and report.modules_calibrated == 46
    assert [data.source for data in report.data] == [f"{task}, train" for task in GLUE]
    assert report.settings.ridge_lambda == 1e-5 and report.settings.target_alpha == 0.6
    assert "experts' answers" in [phase.name for phase in report.phases]
    stacks = [block.name for block in report.drift_after[0].blocks]
    assert stacks == [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)]
    assert "encoder tokens" in finished.stdout

    saved = directory / "model"
    model = AutoModelForSeq2SeqLM.from_pretrained(saved)
    assert model.shared.weight is model.encoder.get_input_embeddings().weight
    assert model.lm_head.weight is not model.shared.weight
    words = AutoTokenizer.from_pretrained(saved)
    assert words("good film")["input_ids"] == tokenizer()("good film")["input_ids"]
    base = AutoModelForSeq2SeqLM.from_pretrained(pico.base)
    assert not torch.equal(logits(model), logits(base))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_ready_variants_run(pico: PicoT5, variant: str, tmp_path: Path) -> None:
    model = pico.run_method(
        f"method=featcal/{variant}",
        "method.n_samples=6",
        "method.n_heldout=0",
        f"method.output_dir={tmp_path}",
        *QUICK.get(variant, []),
    )
    assert isinstance(model, T5ForConditionalGeneration)
    report = read(tmp_path)
    assert report.modules_calibrated == 46
    settings = report.settings
    assert (settings.ridge_lambda, settings.anchor_rho, settings.target_alpha) == (1e-5, 2.0, 0.6)


# --- the method as an object ------------------------------------------------------------------


def test_a_saved_model_reloads_with_equal_outputs(
    pico: PicoT5, calibrated: Any, tmp_path: Path
) -> None:
    pool = few(pico)
    model, _ = calibrated
    pool.save_model(model, str(tmp_path / "model"))
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(model), logits(again.eval()))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == len(tokenizer())
    kept = {name.split(".")[0] for name in load_file(tmp_path / "model/model.safetensors")}
    assert kept == {"shared", "encoder", "decoder", "lm_head"}


def test_what_is_calibrated_and_what_is_listed(pico: PicoT5, calibrated: Any) -> None:
    merged = MergeOnlyAlgorithm(merger=TASK_ARITHMETIC).run(few(pico))
    model, directory = calibrated
    report = read(directory)
    assert report.result is not None
    before, after = floating_tensors(merged), floating_tensors(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[0] for name in changed} == {m.name for m in report.result.modules}
    skipped = {module.name for module in report.result.skipped}
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias" in skipped
    assert {"shared", "lm_head"} <= skipped
    unique = sum(p.numel() for p in model.parameters())
    assert {identity.parameters for identity in report.models} == {unique}


def test_lora_experts_are_calibrated_towards_as_full_weights(pico: PicoT5, tmp_path: Path) -> None:
    pool = few(pico, lora=True)
    full: Any = few(pico, lora=True)
    full._models = {name: pool.load_model(name) for name in pool.all_model_names}
    by_adapter = featcal(tmp_path / "a").run(pool)
    by_weights = featcal(tmp_path / "b").run(full)
    assert largest_difference(by_adapter.state_dict(), by_weights.state_dict()) == 0
    base, expert = pool.load_model("_pretrained_"), pool.load_model("glue-cola")
    assert base.state_dict().keys() == expert.state_dict().keys()
    name = "decoder.block.1.layer.1.EncDecAttention.q.weight"
    assert not torch.equal(base.state_dict()[name], expert.state_dict()[name])


def test_decoder_inputs_from_labels(pico: PicoT5, calibrated: Any, tmp_path: Path) -> None:
    by_expert, _ = calibrated
    by_labels = featcal(tmp_path / "b", decoder_inputs="labels").run(few(pico))
    assert largest_difference(by_expert.state_dict(), by_labels.state_dict()) > 1e-3
    assert "experts' answers" not in [phase.name for phase in read(tmp_path / "b").phases]
    rows = {m.name: m.rows for m in (read(tmp_path / "b").result or pytest.fail("")).modules}
    words, expected = tokenizer(), 0
    for data, task in zip(read(tmp_path / "b").data, TASKS, strict=True):
        train = load_glue_dataset(task, words)
        expected += sum(int((train[i]["labels"] >= 0).sum()) for i in data.indices)
    assert rows["decoder.block.0.layer.2.DenseReluDense.wo"] == expected


def test_results_repeat_and_batches_do_not_matter(pico: PicoT5, tmp_path: Path) -> None:
    settings = {"statistics_dtype": "float64", "forward_dtype": "float64", "ridge_lambda": 1e-2}
    one = featcal(tmp_path / "a", batch_size=3, **settings).run(few(pico))
    torch.rand(3)
    other = featcal(tmp_path / "b", batch_size=10, **settings).run(few(pico))
    again = featcal(tmp_path / "c", batch_size=3, **settings).run(few(pico))
    assert largest_difference(one.state_dict(), again.state_dict()) == 0
    assert largest_difference(one.state_dict(), other.state_dict()) < 1e-4


def test_items_alike_in_length_share_a_batch(
    pico: PicoT5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[Tensor] = []
    answer = t5.answer_greedily

    def watched(expert: nn.Module, inputs: Any, **kwargs: Any) -> Any:
        lengths.append(inputs["attention_mask"].sum(1))
        return answer(expert, inputs, **kwargs)

    monkeypatch.setattr(t5, "answer_greedily", watched)
    featcal(tmp_path, n_heldout=0).run(few(pico))
    assert len(lengths) == 3 * len(TASKS)  # of 4, 4 and 2 items
    for task in range(len(TASKS)):
        of_task = torch.cat(lengths[3 * task : 3 * task + 3])
        assert torch.equal(of_task, of_task.sort().values)
        assert of_task[0] < of_task[-1]


@pytest.mark.parametrize("settings", [{"granularity": "block"}, {"forward_dtype": "bfloat16"}])
def test_other_ways_to_calibrate(pico: PicoT5, tmp_path: Path, settings: Any) -> None:
    featcal(tmp_path, n_samples=36, **settings).run(few(pico))
    report = read(tmp_path)
    assert report.status == "complete" and report.modules_calibrated == 46
    assert report.mean_drift_before is not None and report.mean_drift_after is not None
    assert report.mean_drift_after < report.mean_drift_before


def test_a_merged_checkpoint_is_calibrated_like_the_merged_model(
    pico: PicoT5, calibrated: Any, tmp_path: Path
) -> None:
    pool = few(pico)
    MergeOnlyAlgorithm(merger=TASK_ARITHMETIC).run(pool).save_pretrained(tmp_path / "merged")
    one, _ = calibrated
    other = featcal(tmp_path / "b", merger=None, merged_model=str(tmp_path / "merged")).run(pool)
    assert largest_difference(one.state_dict(), other.state_dict()) == 0


def test_every_task_is_answered_by_its_own_expert(
    pico: PicoT5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model in memory, with each task's weights in turn."""
    seen: list[tuple[int, Tensor]] = []
    answer = t5.answer_greedily

    def watched(expert: nn.Module, inputs: Any, **kwargs: Any) -> Any:
        weight = expert.get_parameter("decoder.block.1.layer.2.DenseReluDense.wo.weight")
        seen.append((id(expert), weight.clone()))
        return answer(expert, inputs, **kwargs)

    monkeypatch.setattr(t5, "answer_greedily", watched)
    featcal(tmp_path, n_samples=4, n_heldout=2).run(few(pico))
    assert len({model for model, _ in seen}) == 1
    for index, task in enumerate(TASKS):
        stored = load_file(pico.expert(task) / "model.safetensors")
        expected = stored["decoder.block.1.layer.2.DenseReluDense.wo.weight"]
        for _, weight in seen[2 * index : 2 * index + 2]:  # calibration and held-out batch
            assert torch.equal(weight, expected)


def test_a_plan_generates_nothing(
    pico: PicoT5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        featcal_module, "complete_all", lambda *_, **__: pytest.fail("it generates")
    )
    assert featcal(tmp_path, plan_only=True).run(few(pico)) is None
    assert read(tmp_path).status == "planned"


def test_models_of_mixed_precision_come_back_as_such(pico: PicoT5, tmp_path: Path) -> None:
    """T5 keeps `wo` in float32 beside weights in half precision."""
    pool = few(pico)
    pool._models = {name: pool.load_model(name) for name in pool.all_model_names}
    for model in pool._models.values():
        for name, value in model.named_parameters():
            value.data = value.data.to(torch.float32 if ".wo." in name else torch.bfloat16)
    model = featcal(tmp_path).run(pool)
    dtypes = {name: value.dtype for name, value in model.named_parameters()}
    assert {d for n, d in dtypes.items() if ".wo." in n} == {torch.float32}
    assert {d for n, d in dtypes.items() if ".wo." not in n} == {torch.bfloat16}


# --- pool and data ----------------------------------------------------------------------------


def test_rows_are_fusionbenchs_own(pico: PicoT5) -> None:
    from fusion_bench.tasks.flan_t5_text_generation import glue_load_dataset as upstream

    for task in ("cola", "stsb", "mnli"):
        theirs = upstream.load_glue_dataset(task, tokenizer(), cache_dir=None, split="train")
        ours = load_glue_dataset(task, str(pico.base))
        assert len(ours) == len(theirs) == ROWS["train"]
        for i in (0, 7):
            for key in ("input_ids", "attention_mask", "labels"):
                assert ours[i][key].tolist() == theirs[i][key]
    with pytest.raises(CalibrationDataError, match="'wnli' is no task"):
        load_glue_dataset("wnli", tokenizer())


def test_the_pool_works_where_fusionbenchs_fails(pico: PicoT5) -> None:
    pool = few(pico, lora=True, model_kwargs={"torch_dtype": "bfloat16"})
    adapter = pool.load_model("glue-cola")
    assert adapter.get_parameter("encoder.block.0.layer.0.SelfAttention.k.weight").dtype == (
        torch.bfloat16
    )
    assert len(pool.load_tokenizer()) == len(tokenizer())
    pool._models = {"_pretrained_": str(pico.base), "glue-cola": str(pico.expert("cola"))}
    assert isinstance(pool.load_model("glue-cola"), T5ForConditionalGeneration)


def test_paths_serve_as_models(pico: PicoT5, calibrated: Any, tmp_path: Path) -> None:
    paths = few(pico)
    paths._models = {
        "_pretrained_": str(pico.base),
        **{f"glue-{task}": str(pico.expert(task)) for task in TASKS},
    }
    one, _ = calibrated
    other = featcal(tmp_path / "b").run(paths)
    assert largest_difference(one.state_dict(), other.state_dict()) == 0


@pytest.mark.parametrize(
    "kept", ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
)
def test_a_checkpoint_may_hold_any_one_of_the_tied_tensors(
    pico: PicoT5, tmp_path: Path, kept: str
) -> None:
    reference = floating_tensors(AutoModelForSeq2SeqLM.from_pretrained(pico.base))
    stored = load_file(pico.expert("cola") / "model.safetensors")
    expected = stored.pop("shared.weight")
    save_file({**stored, kept: expected}, tmp_path / "model.safetensors")
    found = open_checkpoint(str(tmp_path), reference, name="cola")
    assert found is not None and found.weights.keys() == reference.keys()
    for name in ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        assert torch.equal(found.weights[name], expected)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelPoolError, match="'cola' .* lacks 3 .*shared.weight"):
        open_checkpoint(str(tmp_path), reference, name="cola")


def test_fusionbenchs_own_pool_is_not_stood_in_the_way_of(
    pico: PicoT5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves a file of pickled tensors: where that goes there must be no directory."""
    from fusion_bench.modelpool import Seq2SeqLMPool

    ours = few(pico)
    pool = Seq2SeqLMPool(
        ours._models, tokenizer=ours._tokenizer, train_datasets=ours._train_datasets
    )
    method = featcal(tmp_path)
    program = type("Program", (), {"merged_model_save_path": str(tmp_path / "model")})()
    monkeypatch.setattr(method, "_program", program)
    model = method.run(pool)
    pool.save_model(model, str(tmp_path / "model"))
    assert any("pickled tensors" in warning for warning in read(tmp_path).warnings)


# --- bad input --------------------------------------------------------------------------------


def without_tokenizer(pool: Any, root: Path) -> None:
    pool._tokenizer = None


def unreadable_tokenizer(pool: Any, root: Path) -> None:
    pool._tokenizer = str(root / "nowhere")


def no_tokenizer_at_all(pool: Any, root: Path) -> None:
    pool._tokenizer = object()


def tokenizer_of_a_larger_model(pool: Any, root: Path) -> None:
    words = AutoTokenizer.from_pretrained(root / "base")
    words.add_tokens([f"new{i}" for i in range(100)])
    pool._tokenizer = words


@pytest.mark.parametrize(
    "spoil, message",
    [
        (without_tokenizer, "set modelpool.tokenizer"),
        (unreadable_tokenizer, "tokenizer cannot be loaded"),
        (no_tokenizer_at_all, "not a tokenizer"),
        (tokenizer_of_a_larger_model, "is not the model's"),
    ],
)
def test_a_missing_or_foreign_tokenizer(
    pico: PicoT5, tmp_path: Path, spoil: Callable[[Any, Path], None], message: str
) -> None:
    pool = few(pico)
    spoil(pool, pico.root)
    with pytest.raises(CalibrationDataError, match=message):
        featcal(tmp_path).run(pool)
    assert message.split()[0] in (read(tmp_path).error or "")


def test_missing_labels_are_found_before_anything_is_loaded(pico: PicoT5, tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"text": "good film"}] * 20).to_parquet(tmp_path / "texts/train.parquet")
    pool = few(pico)
    pool._train_datasets["glue-mnli"] = {
        "_target_": "datasets.load_dataset", "path": str(tmp_path / "texts"), "split": "train",
    }  # fmt: skip
    with pytest.raises(CalibrationDataError, match="glue-mnli cannot be used: no column 'labels'"):
        featcal(tmp_path, decoder_inputs="labels").run(pool)
    featcal(tmp_path).run(pool)  # without labels it runs on raw texts
    assert read(tmp_path).status == "complete"


def test_a_task_of_one_class_is_warned_of(pico: PicoT5, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"text": f"good film {i}", "target_text": "yes"} for i in range(20)]
    Dataset.from_list(rows).to_parquet(tmp_path / "texts/train.parquet")
    pool = few(pico)
    pool._train_datasets["glue-stsb"] = {
        "_target_": "datasets.load_dataset", "path": str(tmp_path / "texts"), "split": "train",
    }  # fmt: skip
    featcal(tmp_path).run(pool)
    (warning,) = [w for w in read(tmp_path).warnings if "same label" in w]
    assert "glue-stsb" in warning and "'yes'" in warning


def test_an_adapter_for_another_base(pico: PicoT5, tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=192, d_model=16, d_kv=4, d_ff=8, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "small")
    pool = few(pico, lora=True)
    pool._models["glue-mnli"]["base_model_path"] = str(tmp_path / "small")
    with pytest.raises(ModelPoolError, match="'.*mnli' does not fit the base '.*small'"):
        featcal(tmp_path).run(pool)


def test_an_adapter_that_names_another_base_is_warned_of(pico: PicoT5, tmp_path: Path) -> None:
    shutil.copytree(pico.adapter("cola"), tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": "google/t5-v1_1-base"}))
    pool = few(pico, lora=True)
    pool._models["glue-cola"]["peft_model_path"] = str(tmp_path / "adapter")
    featcal(tmp_path, n_heldout=0).run(pool)
    (warning,) = [w for w in read(tmp_path).warnings if "LoRA" in w]
    assert "glue-cola" in warning and "google/t5-v1_1-base" in warning


def test_an_expert_that_cannot_be_loaded_is_named(pico: PicoT5, tmp_path: Path) -> None:
    pool = few(pico, lora=True)
    pool._models["glue-cola"]["peft_model_path"] = str(tmp_path / "nowhere")
    with pytest.raises(ModelPoolError, match="model 'glue-cola' .* cannot be loaded"):
        featcal(tmp_path).run(pool)


def test_tied_tensors_are_counted_and_read_once(pico: PicoT5) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(pico.base)
    tensors = floating_tensors(model)
    checked = check_weights("base", "base", tensors, "here", tensors)
    assert checked.identity.parameters == sum(p.numel() for p in model.parameters())
