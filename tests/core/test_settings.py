"""Settings: the environment is read when asked, and what is wrong in it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsetile.core import settings

NAMES = (
    "SPARSETILE_CACHE_DIR",
    "SPARSETILE_CACHE_MEGABYTES",
    "SPARSETILE_CAPABILITY",
    "SPARSETILE_DATA_DIR",
    "SPARSETILE_ENTRY_LIMIT",
    "SPARSETILE_TUNE_DIR",
    "XDG_CACHE_HOME",
)


@pytest.fixture(autouse=True)
def plain_environment(tmp_path: Path, environment) -> None:
    environment(**dict.fromkeys(NAMES), HOME=tmp_path)


def test_folders_are_in_the_user_s_cache_by_default(tmp_path):
    assert settings.cache_dir() == tmp_path / ".cache" / "sparsetile" / "kernels"
    assert settings.data_dir() == tmp_path / ".cache" / "sparsetile" / "data"


def test_the_desktop_s_cache_folder_is_respected(tmp_path, environment):
    environment(XDG_CACHE_HOME=tmp_path / "xdg")
    assert settings.cache_dir() == tmp_path / "xdg" / "sparsetile" / "kernels"
    assert settings.data_dir() == tmp_path / "xdg" / "sparsetile" / "data"


def test_each_folder_can_be_set_and_a_change_is_seen_at_once(environment):
    environment(SPARSETILE_CACHE_DIR="one", SPARSETILE_DATA_DIR="other")
    assert (settings.cache_dir(), settings.data_dir()) == (Path("one"), Path("other"))
    environment(SPARSETILE_CACHE_DIR="two")
    assert settings.cache_dir() == Path("two")


@pytest.mark.parametrize("name", ["SPARSETILE_CACHE_DIR", "SPARSETILE_DATA_DIR", "XDG_CACHE_HOME"])
def test_an_empty_setting_means_the_default(tmp_path, name, environment):
    environment(**{name: ""})
    assert settings.cache_dir() == tmp_path / ".cache" / "sparsetile" / "kernels"
    assert settings.data_dir() == tmp_path / ".cache" / "sparsetile" / "data"


@pytest.mark.parametrize("text, megabytes", [(None, 512), ("", 512), ("1", 1), (" 64 ", 64)])
def test_the_limit_of_the_cache_is_in_megabytes(text, megabytes, environment):
    environment(SPARSETILE_CACHE_MEGABYTES=text)
    assert settings.cache_limit_bytes() == megabytes * 1024 * 1024


@pytest.mark.parametrize("text", ["0", "-1", "much", "1.5", "1e3"])
def test_rejects_an_invalid_cache_limit(text, environment):
    environment(SPARSETILE_CACHE_MEGABYTES=text)
    with pytest.raises(ValueError) as caught:
        settings.cache_limit_bytes()
    assert str(caught.value) == (
        "settings: SPARSETILE_CACHE_MEGABYTES must be a positive whole number, "
        f"got {text!r}. Unset it or give a size in megabytes."
    )


@pytest.mark.parametrize("text, limit", [(None, 2**31), ("", 2**31), ("2", 2), ("1000", 1000)])
def test_a_lower_limit_of_entries_is_seen_at_once(text, limit, environment):
    environment(SPARSETILE_ENTRY_LIMIT=text)
    assert settings.entry_limit() == limit


@pytest.mark.parametrize("text", ["0", "1", "-5", "many", "2147483649"])
def test_rejects_a_limit_of_entries_that_kernels_cannot_number(text, environment):
    environment(SPARSETILE_ENTRY_LIMIT=text)
    with pytest.raises(ValueError) as caught:
        settings.entry_limit()
    assert str(caught.value) == (
        "settings: SPARSETILE_ENTRY_LIMIT must be a whole number from 2 to 2147483648, "
        f"got {text!r}. Unset it: only tests need it."
    )


def test_the_description_names_every_setting_with_the_value_in_force(environment):
    environment(
        SPARSETILE_CACHE_DIR="kernels",
        SPARSETILE_CACHE_MEGABYTES="9",
        SPARSETILE_CAPABILITY=" 8.6 ",
        SPARSETILE_DATA_DIR="matrices",
        SPARSETILE_ENTRY_LIMIT="1000",
        SPARSETILE_TUNE_DIR="timings",
    )
    assert settings.describe_settings() == {
        "SPARSETILE_CACHE_DIR": "kernels",
        "SPARSETILE_CACHE_MEGABYTES": "9",
        "SPARSETILE_CAPABILITY": "8.6",
        "SPARSETILE_DATA_DIR": "matrices",
        "SPARSETILE_ENTRY_LIMIT": "1000",
        "SPARSETILE_TUNE_DIR": "timings",
    }


@pytest.mark.parametrize(
    "text, capability, processors, l2_bytes",
    [
        ("8.0", (8, 0), None, None),
        ("8.9:142", (8, 9), 142, None),
        ("12.0:84:48", (12, 0), 84, 48 * 2**20),
    ],
)
def test_a_gpu_can_be_chosen_for_tests(environment, text, capability, processors, l2_bytes):
    environment(SPARSETILE_CAPABILITY=text)
    assert settings.chosen_gpu() == settings.ChosenGPU(capability, processors, l2_bytes)


def test_without_a_choice_it_is_the_gpu_at_hand():
    assert settings.chosen_gpu() is None
    assert settings.describe_settings()["SPARSETILE_CAPABILITY"] == "not set"


@pytest.mark.parametrize("text", ["8", "sm_80", "7.5", "8.0:", "8.0:0", "8.0:1:x", "80"])
def test_rejects_an_invalid_capability(environment, text):
    environment(SPARSETILE_CAPABILITY=text)
    with pytest.raises(ValueError) as caught:
        settings.chosen_gpu()
    assert str(caught.value) == (
        "settings: SPARSETILE_CAPABILITY must be a compute capability from 8.0 on, such as 8.0 or, "
        f"with SMs and megabytes of L2, 8.0:108:40, got {text!r}. Unset it or give one of those."
    )
