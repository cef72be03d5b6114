"""Tables as configs: every one is read, and every cell of every one composes."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from featcal_fusionbench.sweeps.cells import Plan, Planner, Selection, cells_of
from featcal_fusionbench.sweeps.command_line import override
from featcal_fusionbench.sweeps.compose import compose_config, compose_method, plain
from featcal_fusionbench.sweeps.directory import Job, State, Status, SweepDirectory
from featcal_fusionbench.sweeps.errors import ExperimentError
from featcal_fusionbench.sweeps.experiment import (
    Calibrator,
    Experiment,
    Merger,
    load_experiment,
    table_names,
)
from featcal_fusionbench.sweeps.layout import layout_of
from featcal_fusionbench.sweeps.pools import Pools
from featcal_fusionbench.sweeps.preflight import Kind, sources_of
from featcal_fusionbench.tables.results import BASE, EXPERTS, Cell, Size

TABLES = table_names()
B32 = "clip-vit-base-patch32_TA8"
MODELS = Path("/models")


@cache
def experiment_of(name: str) -> Experiment:
    return load_experiment(name)


@cache
def pools_of(name: str) -> Pools:
    experiment = experiment_of(name)
    overrides = [*experiment.pools, *experiment.overrides]
    return Pools.of(compose_config(overrides), experiment.expert)


@cache
def composed_method(overrides: tuple[str, ...]) -> DictConfig:
    """Rows and columns are alike in many tables: each is composed once."""
    return compose_method(overrides)


def plans_of(name: str, size: Size = "full", **selection: object) -> list[Plan]:
    experiment = experiment_of(name)
    chosen = Selection.parse(experiment, size, **selection)  # type: ignore[arg-type]
    return Planner(
        experiment=experiment, size=size, selection=chosen, pools=pools_of(name), models=MODELS
    ).plans()


def test_the_tables_of_the_paper_and_of_the_embedded_benchmarks_are_there() -> None:
    clip = {
        f"clip-vit-{backbone}_{tasks}"
        for backbone in ("base-patch32", "base-patch16", "large-patch14")
        for tasks in ("TA8", "TALL14", "TALL20")
    }
    text = {"flan-t5-base_glue", "flan-t5-base_glue_lora16", "flan-t5-large_glue_lora16"}
    others = {"robustness", "embedded_image", "embedded_image_robustness", "embedded_text"}
    others |= {"demo_image", "demo_text"}
    assert clip | text | others <= set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_column_and_size_composes(name: str) -> None:
    """A cell's overrides are those of its row, of its column and of the pools; nesting is below."""
    experiment = experiment_of(name)
    if experiment.published_values is not None:
        assert experiment.published_values.resolve()
    for merger in (experiment.mergers[row] for row in experiment.rows_shown):
        if merger.config:
            choice = ("method=merge_only", f"method@method.merger={merger.config}")
            assert_settings(merger, composed_method(choice).merger)
    for column in experiment.columns_shown:
        calibrator = experiment.calibrators[column]
        found = composed_method((f"method={calibrator.config}",))
        assert_settings(calibrator, found)
        assert ("seed" in found) == (calibrator.random or calibrator.config == "merge_only")
        assert "merged_model" in found
        for setting, curve in experiment.curves.items():
            assert column not in curve.calibrators or setting in found
    # the experts' last run has all overrides of a size; columns add some of their own
    (experts,) = (p for p in plans_of(name, "smoke", seeds="1") if p.cell.merger == EXPERTS)
    config = compose_config(experts.runs[-1].overrides)
    assert Pools.of(config, experiment.expert).tasks == (experts.runs[-1].task,)
    assert sources_of(config)
    (row, *_) = experiment.rows_shown
    for plan in plans_of(name, seeds="1", only=[f"merger={row}"]):
        if experiment.calibrators[plan.cell.calibrator].overrides:
            assert sources_of(compose_config(plan.runs[0].others))


def assert_settings(method: Merger | Calibrator, found: DictConfig) -> None:
    for setting in {**method.settings, **method.smoke}:
        assert setting in found, (method.title, setting)


def test_tasks_and_experts_come_from_the_pools() -> None:
    glue = pools_of("flan-t5-base_glue")
    assert glue.tasks[:2] == ("cola", "mnli") and glue.experts["cola"] == "glue-cola"
    assert len(pools_of("clip-vit-large-patch14_TALL20").tasks) == 20


def test_a_row_shares_its_merged_model_between_its_columns() -> None:
    plans = {plan.cell: plan for plan in plans_of(B32, seeds="2")}
    merged = plans[Cell("task_arithmetic", "none", 0)]
    assert merged.saves and merged.stage == 0
    for seed in (0, 1):  # the merger is deterministic: there is one model for both seeds
        plan = plans[Cell("task_arithmetic", "featcal", seed)]
        assert plan.needs == merged.cell and plan.stage == 1
        assert f"method.merged_model={MODELS}/task_arithmetic/none/seed0" in plan.runs[0].arguments
        assert f"method.seed={seed}" in plan.runs[0].arguments
    assert plans[Cell("regmean", "featcal", 1)].needs == Cell("regmean", "none", 1)
    assert Cell("task_arithmetic", "none", 1) not in plans


def test_the_printed_command_needs_no_other_cell() -> None:
    (plan,) = (
        p
        for p in plans_of(B32, seeds="1")
        if p.cell.merger == "regmean_plusplus_featcal" and p.cell.calibrator == "prob_surgery"
    )
    assert plan.stage == 2 and plan.needs == Cell("regmean_plusplus", "featcal", 0)
    assert str(MODELS) not in plan.command
    overrides = plan.command.removeprefix("fusion_bench ").split()
    method = plain(compose_config(overrides).method, resolve=False)
    assert method["_target_"].endswith("ProbSurgeryAlgorithm")
    assert method["merger"]["_target_"].endswith("FeatCalAlgorithm")
    assert "RegMean" in method["merger"]["merger"]["_target_"]
    assert method["merger"]["seed"] == method["seed"] == 0


def test_a_table_may_merge_anew_for_every_column() -> None:
    plans = plans_of("demo_image", seeds="1")
    (plan,) = (p for p in plans if p.cell.calibrator == "featcal-block")
    assert plan.command.endswith(shlex.join(plan.runs[0].arguments))
    assert not any(p.needs or p.saves or p.stage for p in plans)


def test_experts_are_evaluated_each_on_its_own_task() -> None:
    for name, task, expert in (
        (B32, "dtd", "dtd"),
        ("flan-t5-base_glue_lora16", "rte", "glue-rte"),
    ):
        (plan,) = (p for p in plans_of(name, seeds="1") if p.cell.merger == EXPERTS)
        (run,) = (run for run in plan.runs if run.task == task)
        config = compose_config(run.overrides)
        assert config.modelpool.models._merged_ == config.modelpool.models[expert]
        assert Pools.of(config, experiment_of(name).expert).tasks == (task,)


def test_curves_vary_one_setting() -> None:
    plans = plans_of("clip-vit-base-patch32_TA8_curves", seeds="1")
    (plan,) = (
        p for p in plans if p.cell == Cell("task_arithmetic", "featcal", 0, (("n_samples", 8),))
    )
    assert plan.cell.id == "task_arithmetic/featcal/n_samples=8/seed0"
    assert compose_config(plan.runs[0].overrides).method.n_samples == 8


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    plans = plans_of("clip-vit-base-patch32_TA8_curves", seeds="1")
    (plan,) = (p for p in plans if p.cell.point == (("n_samples", 8),) and "featcal" in p.cell.id)
    environment = {"NAME": "value"}
    job = Job(table="t", size="full", plan=plan, program=(), environment=environment, directory=".")
    directory = SweepDirectory(tmp_path)
    directory.write_job(job)
    assert Job.read(directory.cell(plan.cell) / "job.json") == job


def test_smoke_is_small() -> None:
    (plan,) = (p for p in plans_of(B32, "smoke") if p.cell == Cell("adamerging", "featcal", 0))
    assert compose_config(plan.runs[0].overrides).method.n_samples == 8
    (merger,) = (p for p in plans_of(B32, "smoke") if p.cell == plan.needs)
    config = compose_config(merger.runs[0].overrides)
    assert config.method.merger.max_steps == 2 and config.fast_dev_run


def test_the_wrong_task_gets_no_task_its_own_inputs() -> None:
    for name, key in (("robustness", "path"), ("embedded_image_robustness", "task")):
        plans = {plan.cell: plan for plan in plans_of(name, seeds="1")}
        clean, wrong = (
            compose_config(plans[Cell("task_arithmetic", column, 0)].runs[0].overrides)
            for column in ("featcal", "featcal_wrong_task")
        )
        clean, wrong = clean.modelpool.train_datasets, wrong.modelpool.train_datasets
        assert all(clean[task][key] != wrong[task][key] for task in clean)
        assert {clean[task][key] for task in clean} == {wrong[task][key] for task in clean}


def test_corrupted_inputs_are_chosen_by_one_override() -> None:
    plans = {plan.cell: plan for plan in plans_of("robustness", seeds="1")}
    plan = plans[Cell("wudi", "featcal_motion_blur", 0)]
    sources = sources_of(compose_config(plan.runs[0].overrides))
    splits = {s.split for s in sources if s.setting.startswith("modelpool.train_datasets")}
    assert splits == {"motion_blur"}


# --- what is wanted of a table ---


def test_only_takes_rows_and_columns_and_what_they_start_from() -> None:
    plans = plans_of(B32, only=["merger=wudi,tsvm,calibrator=featcal"], seeds="1")
    assert [plan.cell.id for plan in plans] == [
        "wudi/none/seed0",
        "tsvm/none/seed0",
        "wudi/featcal/seed0",
        "tsvm/featcal/seed0",
    ]


def test_some_tasks_restrict_both_pools() -> None:
    (plan,) = plans_of(B32, only=["merger=task_arithmetic,calibrator=none"], tasks="dtd,mnist")
    config = compose_config(plan.runs[0].overrides)
    assert list(config.modelpool.models) == ["_pretrained_", "mnist", "dtd"]
    assert list(config.modelpool.train_datasets) == ["mnist", "dtd"]
    assert list(config.taskpool.test_datasets) == ["mnist", "dtd"]
    assert len(plan.tasks) == 8


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", (0, 1, 2)), ("0,", (0,)), ("4,1", (4, 1)), (None, (0, 1, 2))]
)
def test_seeds_are_a_number_or_a_list(text: str | None, seeds: tuple[int, ...]) -> None:
    assert Selection.parse(experiment_of(B32), "full", seeds=text).seeds == seeds


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"only": ["merger=task_arithmetik"]}, "Did you mean task_arithmetic"),
        ({"only": ["calibrator=featcla"]}, "Did you mean featcal"),
        ({"only": ["rows=a"]}, "give merger=KEY"),
        ({"only": ["merger=base,calibrator=featcal"]}, "leaves no cell"),
        ({"seeds": "x"}, "--seeds 'x'"),
        ({"seeds": "-1,2"}, "none negative"),
        ({"seeds": "1,1"}, "each once"),
        ({"tasks": "dtdd"}, "Did you mean dtd"),
    ],
)
def test_wrong_selections_are_refused(selection: dict[str, object], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        plans_of(B32, **selection)


def test_an_unknown_table_is_refused_with_near_names() -> None:
    with pytest.raises(ExperimentError, match="Did you mean .*clip-vit-base-patch32_TA8"):
        load_experiment("clip-vit-base-patch32_TA9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rows: [tsvn]", "There is no row .* Did you mean tsvm"),
        ("columns: [featcol]", "There is no column .* Did you mean featcal"),
        ("mergers: {mine: {title: Mine}}", "needs one of config and after"),
        ("mergers: {mine: {title: Mine, after: base/featcal}}", "There is no row"),
        ("mergers: {base: {title: Mine, config: dummy}}", "in every table by itself"),
        ("mergers: {'a b': {title: Mine, config: dummy}}", "is no key"),
        ("calibrators: {mine: {like: featcel, title: Mine}}", "Did you mean featcal"),
        ("mergerz: {}", "unknown entries: mergerz"),
        ("title: [1]", "title should be a string"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "table").mkdir()
    text = f"defaults:\n  - {B32}\n  - _self_\n{change}\n"
    (tmp_path / "table/mine.yaml").write_text(text)
    with pytest.raises(ExperimentError, match=message) as caught:
        load_experiment("mine", tmp_path)
    assert "config/table/mine.yaml" in str(caught.value)


def test_a_table_of_the_user_is_found_beside_the_packages(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    text = f"defaults: [{B32}, _self_]\ntitle: Mine\nrows: [wudi]\n"
    (tmp_path / "table/mine.yaml").write_text(text)
    assert "mine" in table_names(tmp_path)
    cells = cells_of(load_experiment("mine", tmp_path), "full", (0,))
    assert {cell.merger for cell in cells} == {BASE, EXPERTS, "wudi"}


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.5, 1e-06, "plain", "a b", "it's", "a,b", "{x}", "null", [1, "b c"], {"k": 1}],
)
def test_overrides_are_quoted_for_hydra(value: object) -> None:
    config = compose_method(["method=dummy", override("+method.probe", value)])
    assert plain(config, resolve=False)["probe"] == value


def test_composing_leaves_a_surrounding_hydra_as_it_was(tmp_path: Path) -> None:
    with initialize_config_dir(str(tmp_path), version_base=None):
        compose_method(["method=dummy"])
        assert compose(overrides=["+a=1"]).a == 1


def test_sources_name_the_setting_to_override() -> None:
    sources = sources_of(compose_config([*experiment_of(B32).pools]))
    by_setting = {source.setting: source for source in sources}
    assert by_setting["modelpool.models.dtd"].id == "tanganke/clip-vit-base-patch32_dtd"
    data = by_setting["modelpool.train_datasets.dtd.path"]
    assert (data.kind, data.id, data.split) == (Kind.DATASET, "tanganke/dtd", "train")
    glue = sources_of(compose_config([*load_experiment("flan-t5-base_glue_lora16").pools]))
    ids = {source.id for source in glue}
    assert {"google/flan-t5-base", "tanganke/flan-t5-base_glue-rte_lora-16"} <= ids
    splits = {source.split for source in glue if (source.id, source.name) == ("glue", "mnli")}
    assert splits == {"train", "validation_matched"}


def test_sources_of_hyper_parameters_are_those_of_the_rows_and_columns_shown() -> None:
    experiment = experiment_of(B32)
    every = experiment.sources(experiment.mergers, experiment.calibrators)
    some = experiment.sources({"regmean"}, {"none", "featcal"})
    assert [line.split(":")[0] for line in some] == ["RegMean", "FeatCal"]
    assert set(some) < set(every)


def test_chains_start_from_cells_that_the_table_has() -> None:
    experiment = experiment_of("embedded_image")
    cells = cells_of(experiment, "full", (0,))
    pending = {cell: Status(State.PENDING) for cell in cells}
    table = layout_of(experiment, pools_of("embedded_image"), pending, "command")
    assert table.starts == {
        "task_arithmetic_featcal": ("task_arithmetic", "featcal"),
        "regmean_plusplus_featcal": ("regmean_plusplus", "featcal"),
    }
    assert {Cell(*start, 0) for start in table.starts.values()} <= {*cells}
