"""Settings are checked when they are made, and each message names the setting and the remedy."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from places import CONFIG

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.architectures.clip_vision import ClipVisionSettings
from featcal_fusionbench.architectures.t5 import T5Settings
from featcal_fusionbench.calibration import CalibrationError, CalibrationSettings, SettingsError
from featcal_fusionbench.method.surgery import ProbSurgeryAlgorithm, RepresentationSurgeryAlgorithm

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        *(("ridge_lambda", v, "a number of at least 0") for v in (-1e-9, NAN, INF, "0.1", True)),
        ("ridge_lambda", None, "a number of at least 0"),
        *(("target_alpha", v, r"a number in \[0, 1\]") for v in (-0.1, 1.01, NAN, "1", False)),
        *(("anchor_rho", v, "a number that is finite") for v in (NAN, INF, -INF, "2", True)),
        *(("epsilon", v, "a number of at least 0") for v in (-1e-8, NAN, INF, "1e-8", True)),
        ("epsilon", 0, "a small positive value, e.g. 1e-8"),
        ("epsilon", 0.0, "a small positive value, e.g. 1e-8"),
        *(("n_samples", v, "whole number of at least 1") for v in (0, -5, 8.0, "8", True, NAN)),
        *(("batch_size", v, "whole number of at least 1") for v in (0, -5, 8.0, "8", True, None)),
        *(("n_heldout", v, "whole number of at least 0") for v in (-1, 8.0, "8", False, None)),
        *(("seed", v, "whole number of at least 0") for v in (-1, 0.0, "0", False, None)),
        *(("calibrate_bias", v, "true or false") for v in (0, 1, "true", None)),
        *(("calibrate_norm", v, "true or false") for v in (0, 1, "false", None)),
        *(("granularity", v, "one of module, block") for v in ("layer", "", None, 1, "Module")),
        *(("statistics_dtype", v, "one of float32, float64") for v in ("bfloat16", torch.float32)),
        *(("forward_dtype", v, "one of float32, float64, bfloat16") for v in ("float16", None)),
        *(("hold_activations", v, "one of auto, always, never") for v in (True, None, "no")),
        *(("on_failure", v, "one of raise, keep") for v in ("ignore", False)),
        *((w, v, "not a regular expression") for w in ("include", "exclude")
          for v in ("fc[", ("fc1", "*"), [1], ["ok", None])),
    ],
)  # fmt: skip
def test_bad_values_are_named_with_their_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy) as caught:
        CalibrationSettings(**{name: value})
    assert str(caught.value).startswith(name)
    shown = [value] if not isinstance(value, list | tuple) else [*value, value]
    assert any(repr(part) in str(caught.value) for part in shown) or name == "epsilon"
    assert isinstance(caught.value, CalibrationError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "kind, name, value, remedy",
    [
        *((ClipVisionSettings, "nonclass_row_weight", v, r"a number in \[0, 1\]")
          for v in (-0.1, 2, NAN, [], True)),
        *((T5Settings, "decoder_inputs", v, "one of expert, labels") for v in ("gold", None)),
        *((T5Settings, "decoder_tokens", v, "at least 1") for v in (0, 1.5)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", [FeatCalAlgorithm, ProbSurgeryAlgorithm])
def test_settings_of_architectures_are_checked_when_the_method_is_made(
    method: Any, kind: Any, name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(SettingsError, match=remedy) as caught:
        kind(**{name: value})
    assert str(caught.value).startswith(name)
    with pytest.raises(SettingsError, match=name):
        method(**{name: value})


METHODS = {
    "featcal": FeatCalAlgorithm,
    "merge_only": MergeOnlyAlgorithm,
    "prob_surgery": ProbSurgeryAlgorithm,
    "representation_surgery": RepresentationSurgeryAlgorithm,
}


@pytest.mark.parametrize("name", METHODS)
def test_signature_config_and_settings_name_the_same_with_the_same_defaults(name: str) -> None:
    method = METHODS[name]
    signature = {
        parameter.name: parameter.default
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    config: Any = OmegaConf.to_container(OmegaConf.load(CONFIG / "method" / f"{name}.yaml"))
    assert config.pop("_target_") == f"{method.__module__}.{method.__qualname__}"
    for group in ("defaults", "merger"):
        config.pop(group, None)
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in signature.items()} == {
        "merger": None
    } | config
    made = method()
    every = [made.settings, *(architecture.settings for architecture in made.architectures)]
    assert every == [type(settings)() for settings in every]
    own, *others = ({f.name for f in dataclasses.fields(settings)} for settings in every)
    assert own <= signature.keys()
    extra = signature.keys() - own - {"merger", "merged_model", "plan_only", "output_dir"}
    assert extra <= set().union(*others)


def test_settings_reach_what_they_are_for() -> None:
    changed = FeatCalAlgorithm(
        ridge_lambda=1, include=["fc1"], nonclass_row_weight=1, decoder_inputs="labels", seed=3
    )
    assert changed.settings == CalibrationSettings(ridge_lambda=1, include=("fc1",), seed=3)
    assert {type(a.settings): a.settings for a in changed.architectures} == {
        ClipVisionSettings: ClipVisionSettings(nonclass_row_weight=1),
        T5Settings: T5Settings(decoder_inputs="labels"),
    }
    assert changed.config.ridge_lambda == 1 and changed.config.decoder_inputs == "labels"


@pytest.mark.parametrize("name", ["granularity", "include", "ridge_lambda", "n_samples"])
def test_changes_are_checked_too(name: str) -> None:
    settings = CalibrationSettings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, name, getattr(settings, name))
    with pytest.raises(SettingsError, match=name):
        dataclasses.replace(settings, **{name: "["})


def test_defaults_are_the_paper_s() -> None:
    settings = CalibrationSettings()
    assert (settings.ridge_lambda, settings.anchor_rho, settings.target_alpha) == (0.05, 2.0, 0.3)
    assert (settings.n_samples, settings.epsilon) == (256, 1e-8)
    assert ClipVisionSettings().nonclass_row_weight == 0.01


def test_patterns_may_come_in_any_sequence_or_alone() -> None:
    expected = CalibrationSettings(include=("fc1", "fc2"))
    assert CalibrationSettings(include=["fc1", "fc2"]) == expected
    assert CalibrationSettings(exclude="fc1").exclude == ("fc1",)
    assert CalibrationSettings(include=None).include == ()


def test_whole_numbers_become_floats() -> None:
    settings = CalibrationSettings(ridge_lambda=3, target_alpha=1, anchor_rho=2)
    assert [type(v) for v in (settings.ridge_lambda, settings.target_alpha)] == [float, float]
    assert settings == CalibrationSettings(ridge_lambda=3.0, target_alpha=1.0, anchor_rho=2.0)
    assert hash(settings) == hash(CalibrationSettings(ridge_lambda=3.0, target_alpha=1.0))


@given(
    ridge_lambda=st.floats(0, 1e6),
    anchor_rho=st.floats(-10, 10),
    target_alpha=st.floats(0, 1),
    epsilon=st.floats(1e-300, 1),
    n_samples=st.integers(1, 10**6),
    seed=st.integers(0, 2**63),
    granularity=st.sampled_from(["module", "block"]),
    statistics_dtype=st.sampled_from(["float32", "float64"]),
    forward_dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
    include=st.lists(st.text(max_size=5).map(re.escape), max_size=3),
    calibrate_bias=st.booleans(),
)
def test_as_dict_is_a_round_trip_through_json(**values: Any) -> None:
    settings = CalibrationSettings(**values)
    plain = json.loads(json.dumps(settings.as_dict(), allow_nan=False))
    assert CalibrationSettings(**plain) == settings
    assert list(plain) == [field.name for field in dataclasses.fields(settings)]
    assert settings.torch_statistics_dtype == getattr(torch, values["statistics_dtype"])
